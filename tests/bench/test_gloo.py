"""The Gloo transport on real ranks: content of every op, streams in flight together, control calls, refusals."""

import builtins
from collections.abc import Callable

import pytest

from crosstraffic.bench.gloo import GlooTransport, load_torch
from crosstraffic.bench.ranks import RankIdentity
from crosstraffic.errors import EnvironmentRefused

RunProgram = Callable[..., list[str]]


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_every_op_carries_what_the_reference_says(run_program: RunProgram, num_ranks: int) -> None:
    logs = run_program("program_operations", "gloo", num_ranks)
    assert all(log.endswith("all ok\n") for log in logs)


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_streams_run_together_and_restart(run_program: RunProgram, num_ranks: int) -> None:
    logs = run_program("program_together", "gloo", num_ranks)
    assert all(log.endswith("all ok\n") for log in logs)


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_control_calls_and_preflight(run_program: RunProgram, num_ranks: int) -> None:
    logs = run_program("program_control", "gloo", num_ranks)
    assert all(log.endswith("all ok\n") for log in logs)


@pytest.mark.gloo
def test_what_is_composed_is_declared() -> None:
    described = GlooTransport(None).describe()
    assert described["reduce_scatter"].startswith("composed: all_to_all")
    assert "copy" in described["all_reduce"]


@pytest.mark.gloo
def test_no_place_to_meet_is_refused_with_what_to_set() -> None:
    identity = RankIdentity(rank=0, world_size=2, local_rank=None, launcher="mpiexec", meeting_point=None)
    with pytest.raises(EnvironmentRefused, match="MASTER_ADDR"):
        GlooTransport(identity)


def test_a_missing_library_gives_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_torch(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "torch":
            raise ImportError("No module named 'torch'")
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(EnvironmentRefused, match=r"pip install 'crosstraffic\[torch\]'") as caught:
        load_torch()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
