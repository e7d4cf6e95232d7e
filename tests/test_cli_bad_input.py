"""Whatever is asked wrongly is refused with one line, which names the value, and exit code 2; nothing is ignored."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from crosstraffic import cli

QWEN = ("traffic", "Qwen3-30B-A3B", "--layout", "tp=2,dp=2,ep=4")
LLAMA = ("traffic", "Llama-3.1-70B")
SUBMIT = ("slurm", "submit", "--dry-run", "--nodes", "2", "--mpi", "none")
HUGE = "1" + "0" * 30


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["crosstraffic", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param((*QWEN, "--batch", "x"), "Invalid value for '--batch'", id="no number"),
        pytest.param((*QWEN, "--batch", "x"), "integer: 'x'", id="no number, with its value"),
        pytest.param((*QWEN, "--batch", "x y " * 2000), "integer: 'x y x y", id="no number, without end"),
        pytest.param(("run", "--ranks", "0"), "or equal to 1: '0'", id="below the least"),
        pytest.param((*QWEN, "--nope"), "No such option: --nope", id="no option"),
        pytest.param(("nope",), "No such command 'nope'", id="no command"),
        pytest.param(("traffic",), "Missing argument", id="no model"),
        pytest.param(("traffic", "a\nb"), r"unknown model: 'a\nb'", id="line break in a name"),
        pytest.param(("traffic", "a\nb.json"), r"model: a\nb.json", id="line break in a path"),
        pytest.param(("traffic", "x" * 5000), "its name is too long: 'xxx", id="name too long"),
        pytest.param((*QWEN, "--dtype", "x" * 5000), "unknown dtype: 'xxx", id="value too long"),
        pytest.param((*QWEN, "--replica-tokens", "9" * 5000), "--replica-tokens takes whole", id="number too long"),
        pytest.param((*QWEN, "--replica-tokens", f"{HUGE},1"), f"replica_tokens must .*: {HUGE}", id="tokens of one"),
        pytest.param((*QWEN, "--layer-partition", f"1,{HUGE}"), f"layer_partition must .*: {HUGE}", id="a stage"),
        pytest.param((*QWEN, "--replica-tokens", "4,+2"), "whole numbers, as 64,3,0: '+2'", id="a sign"),
        pytest.param((*QWEN, "--context-style", "ring"), "context_style has an effect in prefill only", id="style"),
        pytest.param((*QWEN, "--kv-schedule", "layer"), "kv_schedule has an effect in handoff only", id="schedule"),
        pytest.param((*QWEN, "--phase", "handoff", "--padded"), "padded has an effect in prefill and", id="padded"),
        pytest.param((*QWEN, "--batch", "3", "--replica-tokens", "4,2"), "the largest replica, 4", id="two batches"),
        pytest.param((*QWEN, "--phase", "handoff", "--block-tokens", HUGE), f"block_tokens.* {HUGE}", id="page"),
        pytest.param((*QWEN, "--context", HUGE), f"context must .* up to .*: {HUGE}", id="context"),
        pytest.param((*QWEN, "--redundant-experts", HUGE), f"redundant_experts must .*: {HUGE}", id="replicas"),
        pytest.param((*QWEN, "--redundant-experts", "1" + "0" * 14), "at most 384", id="more replicas than ranks hold"),
        pytest.param((*QWEN, "--kv-dtype", ""), "unknown dtype: ''", id="empty is not absent"),
        pytest.param((*QWEN, "--routing", "power_law:inf"), "power_law: .* finite number: inf", id="infinite"),
        pytest.param((*QWEN, "--routing", "lognormal:nan"), "lognormal: .* finite number: nan", id="no number of skew"),
        pytest.param((*QWEN, "--routing", "one_hot:nan"), "one_hot: .* finite number: nan", id="no number of a rank"),
        pytest.param((*LLAMA, "--gpu", "nope"), "unknown GPU: 'nope'", id="GPU where nothing is reduced"),
        pytest.param((*LLAMA, "--gpu", "H100", "--phase", "handoff"), "--gpu says", id="GPU of a handoff"),
        pytest.param(
            (*LLAMA, "--model-runner", "v2", "--framework", "sglang"), "model_runner=v2 is vllm's", id="model runner"
        ),
        pytest.param(
            ("layouts", "Qwen3-30B-A3B", "--gpus", "8", "--gpu-memory", "80GB", "--batch", HUGE),
            f"batch must be a whole number up to .*: {HUGE}",
            id="batch of layouts",
        ),
        pytest.param((*SUBMIT, "--budget", "nan"), "--budget must .*: nan", id="budget of a job"),
        pytest.param((*SUBMIT, "--ranks-per-node", "0"), "ranks_per_node must .* from 1: 0", id="no ranks on a node"),
        pytest.param((*SUBMIT, "--cpus-per-rank", HUGE), f"processors: .*{HUGE}", id="processors of a job"),
        pytest.param((*SUBMIT, "nope"), "no such scenario: 'nope'", id="scenario of a job"),
        pytest.param(
            ("slurm", "submit", "--dry-run", "--nodes", "0"), "num_nodes must .* from 1: 0", id="before Slurm is asked"
        ),
        pytest.param(
            ("coupling", "Qwen3-30B-A3B", "--layout", "dp=16384", "--framework", "vllm"),
            "at most 8192: .* has 16384",
            id="group too large",
        ),
        pytest.param(
            ("groups", "--layout", "tp=2", "--framework", "", "--order", "tp-dp"), "unknown framework: ''", id="engine"
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code = run(monkeypatch, *arguments)
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert len(line) < 800
    assert re.search(".*".join(map(re.escape, said.split(".*"))), line), line


def test_loads_beyond_the_largest_float_stay_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *QWEN, "--routing", "lognormal:400", "--json") == 0
    printed = capsys.readouterr().out
    assert "NaN" not in printed
    assert json.loads(printed)["routing"]["distribution"] == "lognormal"


def test_nested_without_end_is_no_scenario(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000, encoding="utf-8")
    assert run(monkeypatch, "run", str(tmp_path / "deep.toml"), "--transport", "simulated") == 2
    assert "is not valid TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("groups --layout tp=8,dp=8192 --json | head -c 1", ("{", ""), id="closed by its reader"),
        pytest.param("groups --layout tp=2 >&-", ("", ""), id="none"),
        pytest.param(
            "traffic Llama-3.1-8B >/dev/full", ("", "error: cannot print: No space left on device\n"), id="full"
        ),
    ],
)
def test_output_that_takes_nothing_is_no_traceback(line: str, said: tuple[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m crosstraffic.cli {line}"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == said


def test_a_letter_that_the_terminal_lacks_is_replaced() -> None:
    command = [sys.executable, "-m", "crosstraffic.cli", "traffic", "Llama-3.1-8B", "--phase", "handoff"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
