"""How long the command line takes to answer."""

import subprocess
import sys

from pytest_benchmark.fixture import BenchmarkFixture


def test_help_starts(benchmark: BenchmarkFixture) -> None:
    command = [sys.executable, "-m", "crosstraffic.cli", "--help"]
    done = benchmark.pedantic(
        subprocess.run, args=(command,), kwargs={"capture_output": True}, rounds=5, warmup_rounds=1
    )
    assert done.returncode == 0
