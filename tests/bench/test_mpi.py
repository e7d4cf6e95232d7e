"""The MPI transport on real ranks: content of every op, streams in flight together, control calls, refusals."""

import builtins
import subprocess
import sys
from collections.abc import Callable

import pytest

from crosstraffic.bench.buffers import MAX_BUFFER_BYTES, allocate
from crosstraffic.bench.mpi import load_mpi
from crosstraffic.errors import EnvironmentRefused

RunProgram = Callable[..., list[str]]


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_every_op_carries_what_the_reference_says(run_program: RunProgram, num_ranks: int) -> None:
    logs = run_program("program_operations", "mpi", num_ranks)
    assert all(log.endswith("all ok\n") for log in logs)


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_streams_run_together_and_restart(run_program: RunProgram, num_ranks: int) -> None:
    logs = run_program("program_together", "mpi", num_ranks)
    assert all(log.endswith("all ok\n") for log in logs)


@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_control_calls_and_preflight(run_program: RunProgram, num_ranks: int) -> None:
    logs = run_program("program_control", "mpi", num_ranks)
    assert all(log.endswith("all ok\n") for log in logs)


@pytest.mark.mpi
def test_independent_one_rank_jobs_are_refused() -> None:
    """nccl-tests issue 254 and its family: ranks that a launcher started without MPI's knowledge."""
    code = (
        "from crosstraffic.bench.open import open_transport\n"
        "from crosstraffic.bench.ranks import identify\n"
        "import os\n"
        "open_transport('mpi', identify(os.environ))\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "the launcher started 4 ranks, but MPI sees a world of 1" in done.stderr


def test_a_missing_library_gives_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_mpi4py(name: str, *args: object, **kwargs: object) -> object:
        if name.split(".")[0] == "mpi4py":
            raise ImportError("No module named 'mpi4py'")
        return real_import(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without_mpi4py)
    with pytest.raises(EnvironmentRefused, match=r"pip install 'crosstraffic\[local\]'") as caught:
        load_mpi()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("num_bytes", [-1, MAX_BUFFER_BYTES + 1])
def test_a_buffer_beyond_a_c_int_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"0 to {MAX_BUFFER_BYTES} bytes"):
        allocate(num_bytes)


def test_buffers_start_on_a_page_and_are_zero() -> None:
    for num_bytes in (0, 1, 4096, 10_001):
        buffer = allocate(num_bytes)
        assert buffer.size == num_bytes
        assert buffer.ctypes.data % 4096 == 0 or num_bytes == 0
        assert not buffer.any()
