"""One rank that ``crosstraffic run`` started on this machine: ``python -m crosstraffic.bench.worker FOLDER``."""

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

from crosstraffic.bench.heartbeat import Heart, State
from crosstraffic.bench.open import open_transport
from crosstraffic.bench.ranks import identify
from crosstraffic.bench.session import run_rank, take_up
from crosstraffic.errors import CrosstrafficError, EnvironmentRefused


def bind(rank: int) -> None:
    """Bind an MPI rank to one processor, ranks in turn, as launchers of MPI do on request.

    Ranks poll. With more of them than processors, the scheduler moves them about and lets ranks that wait for one
    another share a processor: unbound, beside other programs, the same calls took 2 to 600 times as long (median, 4
    ranks on 2 processors).
    """
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[rank % len(allowed)]})


def main(arguments: list[str]) -> int:
    """Measure as one rank; return the exit code."""
    folder = Path(arguments[0])
    identity = identify(os.environ)
    if identity is None:
        raise EnvironmentRefused("no launcher told this process its rank; start ranks with crosstraffic run")
    faulthandler.register(signal.SIGUSR1)  # the watchdog asks where a rank that stands still is
    with Heart.in_folder(folder, identity.rank) as heart:
        try:
            session = take_up(folder)
            if session.transport_name == "mpi":
                bind(identity.rank)
            transport = open_transport(session.transport_name, identity)
            run_rank(session, transport, heart)
            transport.close()
            heart.state(State.FINISHED)
        except BaseException as error:  # the others wait in a call that will not end: go at once, and loudly
            heart.state(State.FAILED)
            try:
                if isinstance(error, CrosstrafficError):
                    print(f"rank {identity.rank}: {error}", file=sys.stderr)
                else:
                    traceback.print_exc()
                sys.stderr.flush()
            finally:  # also when the log cannot be written
                os._exit(error.exit_code if isinstance(error, CrosstrafficError) else 1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
