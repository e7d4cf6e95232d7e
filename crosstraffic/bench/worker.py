"""One rank that ``crosstraffic run`` started on this machine: ``python -m crosstraffic.bench.worker FOLDER``."""

import os
import sys
import traceback
from pathlib import Path

from crosstraffic.bench.heartbeat import Heartbeat
from crosstraffic.bench.open import open_transport
from crosstraffic.bench.ranks import identify
from crosstraffic.bench.session import run_rank, take_up
from crosstraffic.errors import CrosstrafficError, EnvironmentRefused


def main(arguments: list[str]) -> int:
    """Measure as one rank; return the exit code."""
    folder = Path(arguments[0])
    identity = identify(os.environ)
    if identity is None:
        raise EnvironmentRefused("no launcher told this process its rank; start ranks with crosstraffic run")
    with Heartbeat.create(folder, identity.rank) as heart:
        try:
            session = take_up(folder)
            transport = open_transport(session.transport_name, identity)
            run_rank(session, transport, heart)
            heart.finished()
            transport.close()
        except CrosstrafficError as error:
            heart.failed()
            print(f"rank {identity.rank}: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)
        except Exception:  # the others wait in a call that will never end: this rank must go, at once and loudly
            heart.failed()
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
