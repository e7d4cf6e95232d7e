"""What a guard does for a rank that ends badly: the shared memory that it had mapped is removed."""

import mmap
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest

from crosstraffic.bench.child import Child
from crosstraffic.bench.heartbeat import Heart, State, shared_memory
from crosstraffic.bench.processes import SHARED_MEMORY, SHARED_PREFIX


def forked(segment: Path) -> Child:
    """Fork a rank that maps a segment, says that it measures, and waits."""
    memory, log = shared_memory(), tempfile.TemporaryFile()  # noqa: SIM115 (the child writes into it)
    pid = os.fork()
    if pid == 0:
        with segment.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        Heart(memory).state(State.MEASURING)
        time.sleep(60)
        os._exit(len(mapped))
    return Child(0, pid, memory, log)


@pytest.mark.parametrize("killer", ["its guard", "somebody else"])
def test_shared_memory_of_a_rank_that_was_killed_is_removed(killer: str) -> None:
    segment = SHARED_MEMORY / f"{SHARED_PREFIX}test_{os.getpid()}"
    other = SHARED_MEMORY / f"other_{os.getpid()}"
    for path in (segment, other):
        path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        child = forked(segment)
        until = time.monotonic() + 20
        while not any("beat" in message and message["beat"][1] == State.MEASURING for message in child.news()):
            assert time.monotonic() < until
            time.sleep(0.01)
        if killer == "its guard":
            child.kill()
        else:
            os.kill(child.pid, signal.SIGKILL)
            while not child.reap():
                assert time.monotonic() < until
                time.sleep(0.01)
        assert child.signal == "SIGKILL"
        assert not segment.exists()
        assert other.exists()
    finally:
        for path in (segment, other):
            path.unlink(missing_ok=True)
