"""Run rank programs (tests/bench/programs) on real local ranks; make this folder's simulated runs importable."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crosstraffic.bench.launch import launch_local
from crosstraffic.bench.watchdog import watch

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = ["programs"]  # they run on ranks of their own, and import each other there


def program_environment(transport: str, **extra: str) -> dict[str, str]:
    """Return what a rank program needs beside what every rank gets."""
    return {"PYTHONPATH": str(PROGRAMS), "TEST_TRANSPORT": transport, **extra}


@pytest.fixture
def environment_of() -> Callable[..., dict[str, str]]:
    return program_environment


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[[str, str, int], list[str]]:
    """Run a program on local ranks to its end; return what each rank printed."""

    def run(module: str, transport: str, num_ranks: int) -> list[str]:
        environment = program_environment(transport)
        with launch_local(transport, num_ranks, tmp_path, module=module, environment=environment) as ranks:
            outcome = watch(ranks, start_limit_s=100)
        assert outcome.failure is None, outcome.failure
        return [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(num_ranks)]

    return run
