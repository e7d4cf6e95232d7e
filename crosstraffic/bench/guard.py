"""Run one rank as a child and write down how it ended: ``python -m crosstraffic.bench.guard``, started by ``launch``.

With a command as arguments it only ties that command's life to its parent's: mpiexec must not outlive who started it.

MPICH's launcher kills all its processes at once when a signal ends one of them, whatever it was told about cleaning
up, so that nobody can tell which was first; and no launcher says in a form that can be read how each one ended. The
guard is the process that the launcher knows; the rank is its child. When the rank ends badly, the guard stays until
it is told to go, so that the rank can be named first.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from crosstraffic.bench.heartbeat import ranks_folder
from crosstraffic.bench.processes import die_with_parent
from crosstraffic.bench.ranks import identify

RUN_VARIABLE = "CROSSTRAFFIC_RUN"
MODULE_VARIABLE = "CROSSTRAFFIC_MODULE"
LINGER_S = 60.0


def log_path(run_dir: Path, rank: int) -> Path:
    """Return where a rank's stdout and stderr go."""
    return run_dir / "logs" / f"rank-{rank}.log"


def exit_path(run_dir: Path, rank: int) -> Path:
    """Return where the end of a rank is written: ``{"pid", "exit_code", "signal"}``, one of the last two null."""
    return ranks_folder(run_dir) / f"rank-{rank}.exit"


def guard(run_dir: Path, module: str, rank: int) -> int:
    """Run ``python -m module run_dir`` as this rank; return its exit code, 128 + signal where one ended it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank inherits it: only the command decides what Ctrl-C means
    # MPICH's launcher sends it to ranks that are still leaving when others have left: deadly to who does not expect it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    _write_output_to(log_path(run_dir, rank))
    child = os.fork()
    if child == 0:
        die_with_parent()
        os.execv(sys.executable, [sys.executable, "-X", "faulthandler", "-m", module, str(run_dir)])  # noqa: S606
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, signal.SIGKILL))
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = os.waitstatus_to_exitcode(status)
    ended = {
        "pid": child,
        "exit_code": code if code >= 0 else None,
        "signal": signal.Signals(-code).name if code < 0 else None,
    }
    draft = exit_path(run_dir, rank).with_suffix(".exit.new")
    try:
        draft.write_text(json.dumps(ended))
        draft.replace(exit_path(run_dir, rank))
    except OSError as error:  # the disk is full, say: the rank's own log and the launcher's code must do
        print(f"rank {rank} ended: {ended}; this could not be written down: {error}", flush=True)
    if code != 0:
        time.sleep(LINGER_S)
    return code if code >= 0 else 128 - code


def _write_output_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


def main() -> None:
    """Read what to run from the environment: the command line of a guard names neither the run nor the module."""
    if len(sys.argv) > 1:
        die_with_parent()
        os.execv(sys.argv[1], sys.argv[1:])  # noqa: S606
    identity = identify(os.environ)
    if identity is None or RUN_VARIABLE not in os.environ or MODULE_VARIABLE not in os.environ:
        sys.exit(f"started by hand: {__spec__.name if __spec__ else 'guard'} is for crosstraffic's own launcher")
    sys.exit(guard(Path(os.environ[RUN_VARIABLE]), os.environ[MODULE_VARIABLE], identity.rank))


if __name__ == "__main__":
    main()
