"""``crosstraffic`` under a launcher, with one rank that breaks when it measures its first point."""

import os

from crosstraffic.bench import engine
from crosstraffic.bench.ranks import identify
from crosstraffic.cli import main


def break_down(*_: object) -> None:
    raise ValueError("broken on purpose")


if __name__ == "__main__":
    identity = identify(os.environ)
    if identity is not None and identity.rank == int(os.environ["TEST_BROKEN_RANK"]):
        engine.measure_alone = break_down  # type: ignore[assignment]
    main()
