"""``crosstraffic groups``: the grid, the lists, the picture, what is refused, and how much is printed."""

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.errors import UsageError
from crosstraffic.patterns.layout import FRAMEWORKS, parse_layout, process_groups

M1 = ("groups", "--world", "16", "--layout", "tp=2,pp=2,cp=2,ep=4", "--framework", "megatron")


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    return str(caught.value)


def grid_rows(output: str) -> dict[str, list[int]]:
    """Read the grid back: each row's numbers, in order of the printed ranks."""
    rows: dict[str, list[int]] = {}
    for line in output.splitlines():
        if "│" in line:
            name, cells = line.split("│", maxsplit=1)
            rows.setdefault(name.strip(), []).extend(int(cell) for cell in re.findall(r"\d+", cells))
    return rows


@pytest.mark.parametrize(
    ("framework", "layout", "ranks_per_node"),
    [
        ("megatron", "tp=2,cp=2,pp=2,dp=2,ep=4", 8),
        ("vllm", "tp=8,pp=2,dp=4", 8),
        ("vllm", "tp=3,dp=5", 4),
        ("sglang", "tp=32,dp=4,ep=8", 16),
        ("tensorrt_llm", "tp=8,ep=4,pp=3", 1),
        ("vllm", "tp=8,dp=9", 72),
        ("vllm", "tp=8,pp=16,dp=1024", 8),
    ],
)
def test_numbers_in_the_grid_are_those_of_the_groups(framework, layout, ranks_per_node):
    output = call("groups", "--layout", layout, "--framework", framework, "--ranks-per-node", str(ranks_per_node))
    rows = grid_rows(output)
    found = process_groups(parse_layout(layout), framework)
    ranks = rows.pop("rank")
    assert len(set(ranks)) == len(ranks)
    assert rows
    for name, numbers in rows.items():
        assert [found[name][number].count(rank) for rank, number in zip(ranks, numbers, strict=True)] == [1] * len(
            ranks
        )
    shown = {found[name] for name in rows}
    assert shown == {groups for groups in found.values() if len(groups[0]) > 1}


def test_a_grid_of_two_nodes():
    lines = call(*M1).splitlines()
    assert lines[0] == "tp=2,cp=2,pp=2,dp=2,ep=4 in Megatron-Core: 16 ranks on 2 nodes of 8"
    assert lines[3].split("┌")[1:] == [" node 0 ─────────────────┐", " node 1 ─────────────────┐"]
    assert "pp        │  0  1  2  3  4  5  6  7 ││  0  1  2  3  4  5  6  7 │" in lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            M1,
            [
                "tp                    8 x 2       in a node     [0 1] [2 3]",
                "etp-ep (tp_ep_mp)     4 x 4       as tp-cp",
            ],
        ),
        (
            M1,
            ["etp (ep_tp)           16 x 1      each rank alone", "etp is taken as 1", "own default is tp: say etp=2"],
        ),
        (
            ("groups", "--layout", "tp=3,dp=5"),
            ["1 across      [0 1 2]", "eplb (where it is on)", "replicas of a dense one"],
        ),
        (("groups", "--layout", "tp=8,pp=16,dp=1024"), ["131040 ranks left out", "and 16380 more; --json has all"]),
        (("groups", "--layout", "tp=1"), ["1 rank on 1 node of 8", "each rank alone"]),
        (("groups", "--layout", "tp=4,replicas=2,dp=1"), ["8 ranks on 1 node", "[0 1 2 3] [4 5 6 7]"]),
    ],
)
def test_what_the_lists_say(words, expected):
    output = call(*words)
    for part in expected:
        assert part in output


@pytest.mark.parametrize("ranks_per_node", [1, 4, 7, 8, 72, 1000])
@pytest.mark.parametrize(
    ("framework", "layout"),
    [
        ("megatron", "tp=8,pp=16,dp=1024,ep=64"),
        ("sglang", "tp=8192,pp=16,dp=1024,ep=64"),
        ("tensorrt_llm", "tp=8192,pp=16,ep=64"),
        ("vllm", "tp=8,pp=16,dp=1024"),
        ("vllm", "tp=8,dp=16"),
        ("megatron", "tp=8,cp=2,pp=16,dp=128,ep=64,etp=2,replicas=2"),
        ("tensorrt_llm", "tp=16,pp=2,etp=4,moe_cluster=4"),
        ("sglang", "tp=8,cp=2,moe_dp=2,ep=4,dcp=2,replicas=4"),
    ],
)
def test_output_is_bounded_and_fits_80_columns(framework, layout, ranks_per_node):
    output = call("groups", "--layout", layout, "--framework", framework, "--ranks-per-node", str(ranks_per_node))
    lines = output.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 200
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_json_is_the_groups(framework):
    found = json.loads(call("groups", "--layout", "tp=4,pp=2", "--framework", framework, "--json"))
    expected = process_groups(parse_layout("tp=4,pp=2"), framework)
    assert found == {name: [list(group) for group in groups] for name, groups in expected.items()}


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_a_picture_is_written(tmp_path, suffix):
    path = tmp_path / f"groups.{suffix}"
    output = call(*M1, "--picture", str(path))
    assert output.startswith("tp=2,cp=2,pp=2,dp=2,ep=4 in Megatron-Core")
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    assert path.read_bytes().startswith(magic)


def test_a_picture_leaves_json_alone(tmp_path):
    path = tmp_path / "groups.svg"
    assert json.loads(call(*M1, "--json", "--picture", str(path)))["tp"][0] == [0, 1]
    assert path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--picture", "groups.gif"), "not a kind of picture: 'groups.gif'; allowed: .png, .svg, .pdf"),
        (("--picture", "groups"), "not a kind of picture: 'groups'"),
        (("--picture", ""), "not a kind of picture"),
        (("--picture", "{folder}/nowhere/groups.png"), "cannot be written: No such file or directory"),
        (("--picture", "{folder}/folder.png"), "cannot be written: Is a directory"),
        (("--ranks-per-node", "0"), "ranks_per_node must be a whole number from 1: 0"),
    ],
)
def test_what_is_refused(tmp_path, words, message):
    (tmp_path / "folder.png").mkdir()
    assert message in refused(*M1, *(word.replace("{folder}", str(tmp_path)) for word in words))
    assert not list(tmp_path.glob("*.gif"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--layout", "tp=100000000000000"), "tp must be at most 1048576 (2**20 ranks): 100000000000000"),
        (("--layout", "tp=8", "--world", "100000000000000"), "world must be a whole number from 1 to 1048576"),
        (("--layout", "tp=8", "--world", "-8"), "world must be a whole number from 1 to 1048576"),
        (("--layout", "tp=1000000,dp=1000000"), "at most 1048576 (2**20) ranks are described"),
        (("--layout", "tp=1000000,pp=1000000", "--framework", "sglang"), "at most 1048576 (2**20) ranks are described"),
    ],
)
def test_more_ranks_than_any_machine_has(words, message):
    assert message in refused("groups", *words)


def test_a_terminal_without_lines_gets_plain_ones():
    command = [sys.executable, "-m", "crosstraffic.cli", *M1]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert "+ node 0 -----------------++ node 1 -----------------+" in done.stdout
    assert "pp        |  0  1  2  3  4  5  6  7 ||  0  1  2  3  4  5  6  7 |" in done.stdout


def test_exit_code_of_a_picture_that_cannot_be_written():
    words = ["groups", "--layout", "tp=2", "--picture", "groups.bmp"]
    code = f"from crosstraffic.cli import main; import sys; sys.argv = ['crosstraffic', *{words!r}]; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: picture: not a kind of picture: 'groups.bmp'; allowed: .png, .svg, .pdf\n"
