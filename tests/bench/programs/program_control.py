"""A rank program: the control calls of a transport, and the preflight over them."""

import os
import time

import numpy as np

from crosstraffic.bench import preflight
from crosstraffic.bench.open import open_transport
from crosstraffic.bench.ranks import identify
from crosstraffic.bench.transport import Transport


def control(transport: Transport) -> None:
    rank, size = transport.rank, transport.world_size
    for value in (b"", b"x", b"decision" * 1000):
        assert transport.broadcast(value if rank == 0 else None) == value
    values = np.arange(6.0).reshape(2, 3) + 100 * rank
    gathered = transport.gather(values)
    assert (gathered is None) == (rank != 0)
    if gathered is not None:
        assert gathered.shape == (size, 2, 3)
        assert all(np.array_equal(gathered[peer], np.arange(6.0).reshape(2, 3) + 100 * peer) for peer in range(size))
    empty = transport.gather(np.empty((0, 2)))
    assert empty is None or empty.shape == (size, 0, 2)
    texts = transport.gather_bytes(b"r" * (3 * rank))
    assert texts == ([b"r" * (3 * peer) for peer in range(size)] if rank == 0 else None)
    assert transport.gather_bytes(b"") == ([b""] * size if rank == 0 else None)
    for peer in range(1, size):
        if rank == 0:
            transport.send_float(peer, 0.1 * peer)
            assert transport.receive_float(peer) == -0.1 * peer
        elif rank == peer:
            assert transport.receive_float(0) == 0.1 * peer
            transport.send_float(0, -0.1 * peer)
    if rank == size - 1:
        transport.sleep(0.05)
    before = transport.now_s()
    transport.barrier()
    assert transport.now_s() >= before
    late = transport.gather(np.array([before, time.perf_counter()]))
    if late is not None:
        assert late[:, 1].min() >= late[:, 0].max(), "a rank left the barrier before the last one came"


def main() -> None:
    transport = open_transport(os.environ["TEST_TRANSPORT"], identify(os.environ))
    control(transport)
    reports = preflight.gather(transport)
    assert (reports is None) == (transport.rank != 0)
    if reports is not None:
        assert preflight.check(reports, transport.world_size) == []
        assert [place.rank for place in preflight.places(reports)] == list(range(transport.world_size))
        assert preflight.versions(reports)["numpy"] == np.__version__
    transport.close()
    print("all ok", flush=True)


if __name__ == "__main__":
    main()
