"""Scenario files: what is shipped, what is read, and what a wrong one says."""

import json
from pathlib import Path

import pytest
from simulated_runs import toml_of

from crosstraffic.bench.resolve import resolve
from crosstraffic.bench.scenario import BUILT_IN, MeasureSpec, default_scenario, read_scenario
from crosstraffic.errors import UsageError

STREAM = '[[stream]]\nname = "a"\nop = "all_reduce"\npayload = "64KiB"\n'


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("*.toml")))
def test_shipped_scenarios_are_read_by_name_and_can_be_simulated(name: str) -> None:
    scenario = read_scenario(name)
    assert scenario.name == name
    assert scenario.simulated is not None
    assert scenario.measure.num_sizes >= 12


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [(1, "collectives"), (2, "default-2"), (3, "collectives"), (4, "default-4"), (8, "default-8")],
)
def test_the_default_fits_the_ranks(num_ranks: int, name: str) -> None:
    assert default_scenario(num_ranks).name == name


def test_a_file_is_read_with_sizes_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'name = "own"\nranks = 2\n{STREAM}[measure]\nsizes = ["1KiB", 4096, "1.5MiB"]\n')
    scenario = read_scenario(str(path))
    assert (scenario.ranks, scenario.stream[0].payload) == (2, 65536)
    assert scenario.measure.sizes == (1024, 4096, 1572864)
    assert scenario.measure.budget_s == MeasureSpec().budget_s


def test_what_the_tests_write_is_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(toml_of(num_sizes=3, verify=False, cadences=["isolated"]))
    assert read_scenario(str(path)).measure.verify is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not valid TOML"),
        (STREAM, "name: Field required"),
        (f'name = "x"\ncolour = 1\n{STREAM}', r"unknown key: colour; allowed: name, ranks"),
        (f'name = "x"\n{STREAM}size = 3\n', r"unknown key: stream\.0\.size; allowed: name, op, payload"),
        (f'name = "x"\n{STREAM}[measure]\nsizzes = [1]\n', r"unknown key: measure\.sizzes; allowed: sizes"),
        (
            'name = "x"\n[[stream]]\nname = "a"\nop = "scan"\npayload = 1\n',
            r"stream\.0\.op: Input should be 'all_reduce'",
        ),
        ('name = "x"\n[[stream]]\nname = "a b"\nop = "broadcast"\npayload = 1\n', r"stream\.0\.name: .*pattern"),
        ('name = "x"\n[[stream]]\nname = "a"\nop = "broadcast"\npayload = -4\n', "a size must not be negative: -4"),
        ('name = "x"\n[[stream]]\nname = "a"\nop = "broadcast"\npayload = 0\n', "greater than or equal to 1"),
        ('name = "x"\n[[stream]]\nname = "a"\nop = "broadcast"\npayload = "12 parsecs"\n', "not a size: '12 parsecs'"),
        (f'name = "x"\n{STREAM}groups = []\n', "at least 1 item"),
        (f'name = "x"\n{STREAM}groups = [[]]\n', "at least 1 item"),
        (f'name = "x"\n{STREAM}[measure]\nsizes = [64, -1]\n', r"measure\.sizes\.1: .*must not be negative: -1"),
        (f'name = "x"\n{STREAM}[measure]\nbudget_s = 0\n', r"measure\.budget_s: Input should be greater than 0"),
        (f'name = "x"\n{STREAM}[measure]\nbudget_s = inf\n', r"measure\.budget_s: Input should be a finite number"),
        (
            f'name = "x"\n{STREAM}[measure]\nmin_size = 64\nmax_size = 8\n',
            "min_size must not be over max_size: 64 bytes",
        ),
        (f'name = "x"\n{STREAM}[measure]\nsizes = []\n', "at least 1 item"),
        (f'name = "x"\n{STREAM}[measure]\ncadences = []\n', "at least 1 item"),
        (f'name = "x"\n{STREAM}[measure]\nmodes = []\n', "at least 1 item"),
        ('name = "../../x"\n', "String should match pattern"),
        ('name = "x"\n[decode]\nlayout = "tp=2"\nrouting_parameter = nan\n', "finite number"),
        ('name = "x"\n[decode]\nlayout = "tp=2"\nbacth = 3\n', r"unknown key: decode\.bacth; allowed: .*batch"),
        (f'name = "x"\n{STREAM}matrx = "ring"\n', r"unknown key: stream\.0\.matrx; allowed: .*matrix"),
        ('name = "x"\nmodle = "Llama-3.1-8B"\n', "unknown key: modle; allowed: .*model"),
        (f'name = "x"\n{STREAM}[measure]\ntriples = -1\n', "greater than or equal to 0"),
        (f'name = "x"\n{STREAM}[measure]\ncadences = ["often"]\n', "Input should be 'isolated' or 'streaming'"),
    ],
    ids=lambda value: "",
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        read_scenario(str(path))
    assert "wrong.toml" in str(caught.value)


def test_a_model_may_lie_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "mine.toml"
    path.write_text('name = "x"\nmodel = "config.json"\n[decode]\nlayout = "tp=2"\n')
    assert read_scenario(str(path)).model == str(tmp_path / "config.json")
    path.write_text('name = "x"\nmodel = "Llama-3.1-8B"\n[decode]\nlayout = "tp=2"\n')
    assert read_scenario(str(path)).model == "Llama-3.1-8B"


def test_recorded_counts_may_lie_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "counts.json").write_text(json.dumps([1] * 64 + [3] * 64))
    path = tmp_path / "mine.toml"
    phase = '[decode]\nlayout = "dp=4,ep=4"\nbatch = 64\nrouting = "counts:counts.json"\n'
    path.write_text(f'name = "x"\nmodel = "Qwen3-30B-A3B"\n{phase}')
    streams = {stream.name: stream for stream in resolve(read_scenario(str(path)), 4).streams}
    received = streams["ep.dispatch"].matrix().sum(axis=0)
    assert (received[2:] / received[:2]).tolist() == pytest.approx([3, 3], rel=0.02)


@pytest.mark.parametrize("name", ["nothing", "missing/file.toml", "../default-4", ""])
def test_an_unknown_scenario_names_those_there_are(name: str) -> None:
    with pytest.raises(UsageError, match="one of: collectives, default-2, default-4, default-8") as caught:
        read_scenario(name)
    assert repr(name) in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not valid TOML"):
        read_scenario(str(path))
