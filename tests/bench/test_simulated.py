"""The simulated transport against closed forms, its order rules, its faults, and exact bytes for every op."""

from collections.abc import Callable

import numpy as np
import pytest

from crosstraffic.bench.payload import check_receive, fill_send, poison
from crosstraffic.bench.simulated import SimulatedTransport, run_simulated
from crosstraffic.bench.simulated_truth import SimulatedTruth, Tier
from crosstraffic.bench.simulated_world import SimulatedWorld
from crosstraffic.bench.transport import exchange_for
from crosstraffic.patterns.matrix import ByteRule, Chain, Explicit, Ring
from crosstraffic.patterns.stream import OPS, Stream
from crosstraffic.patterns.wire import steps_by_tier, traffic

INTRA = Tier(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
INTER = Tier(latency_s=7e-6, bandwidth_bytes_per_s=3e8)


def truth(**changes: object) -> SimulatedTruth:
    values: dict[str, object] = {"ranks_per_node": 2, "intra": INTRA, "inter": INTER, **changes}
    return SimulatedTruth(**values)  # type: ignore[arg-type]


def stream_of(
    op: str, groups: tuple[tuple[int, ...], ...], size: int, name: str = "x", rule: ByteRule | None = None
) -> Stream:
    if rule is None and op == "all_to_all_v":
        num = len(groups[0])
        cells = tuple(tuple((i * 5 + j * 3) % 7 * size // 20 for j in range(num)) for i in range(num))
        rule = Explicit(bytes=(cells,))
        size = max(map(sum, cells))
    elif rule is None and op in ("send_recv", "kv_transfer"):
        rule = Ring(num_bytes=size)
    return Stream(
        name=name,
        pattern="x",
        op=op,  # type: ignore[arg-type]
        phase="decode",
        groups=groups,
        payload_bytes=size,
        calls_per_step=1,
        dtype="bfloat16",
        formula="",
        source="",
        rule=rule,
    )


def closed_form(world: SimulatedTruth, stream: Stream, group_index: int = 0) -> float:
    """Return latency + the largest of bytes / capacity, from the patterns alone."""
    group = stream.groups[group_index]
    nodes = tuple(rank // world.ranks_per_node for rank in range(max(group) + 1))
    intra, inter = steps_by_tier(stream.op, group, nodes)
    load = traffic(stream, nodes)
    loads = [load.bottleneck_bytes / world.intra.bandwidth_bytes_per_s]
    for per_node in (load.node_egress_bytes, load.node_ingress_bytes):
        loads += [num / world.inter.bandwidth_bytes_per_s for num in per_node.values()]
    return intra * world.intra.latency_s + inter * world.inter.latency_s + max(loads)


def time_calls(stream: Stream, num_calls: int = 3) -> Callable[[SimulatedTransport], list[float]]:
    def body(transport: SimulatedTransport) -> list[float]:
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
        times = []
        operation = None if channel is None or exchange is None else channel.prepare(exchange)
        for call in range(num_calls):
            if operation is not None and exchange is not None:
                fill_send(exchange, operation.send, stream_index=0, iteration=call)
                poison(operation.receive)
            transport.barrier()
            start_s = transport.now_s()
            if operation is not None and exchange is not None:
                operation.start()
                operation.wait()
                assert check_receive(exchange, operation.receive, stream_index=0, iteration=call) is None
            times.append(transport.now_s() - start_s)
        return times

    return body


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [0, 40, 120_000])
def test_alone_a_call_takes_the_closed_form_and_moves_the_right_bytes(op: str, num_ranks: int, size: int) -> None:
    stream = stream_of(op, (tuple(range(num_ranks)),), size // (4 * num_ranks) * 4 * num_ranks)
    known = truth()
    times = run_simulated(SimulatedWorld(known, num_ranks), time_calls(stream))
    expected = closed_form(known, stream)
    assert max(max(row) for row in times) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_a_host_limit_counts_each_byte_once_per_node() -> None:
    stream = stream_of("send_recv", ((0, 1, 2),), 1_000_000, rule=Chain(num_bytes=1_000_000))
    known = truth(host_bytes_per_s=1e8)  # node 0 has both messages, node 1 has one
    times = run_simulated(SimulatedWorld(known, 3), time_calls(stream, 1))
    assert max(row[0] for row in times) == pytest.approx(7e-6 + 2e6 / 1e8)


def test_an_edge_waits_only_for_its_two_ends() -> None:
    stream = stream_of("send_recv", ((0, 1, 2, 3),), 3000, rule=Chain(num_bytes=3000))

    def body(transport: SimulatedTransport) -> float:
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, 3000, edge=(0, 1))
        assert channel is not None
        assert exchange is not None
        operation = channel.prepare(exchange)
        fill_send(exchange, operation.send, stream_index=0, iteration=0)
        if transport.rank == 2:
            transport.sleep(1.0)
        start_s = transport.now_s()
        if transport.rank != 3:
            operation.start()
            operation.wait()
        assert transport.rank == 3 or check_receive(exchange, operation.receive, stream_index=0, iteration=0) is None
        return transport.now_s() - start_s

    times = run_simulated(SimulatedWorld(truth(), 4), body)
    assert times == pytest.approx([4e-6, 4e-6, 0, 0])


def together(
    world: SimulatedWorld, streams: list[Stream], starts_s: list[float], num_calls: int = 1
) -> list[list[float]]:
    """Start all streams at their times on every rank; return the ends as ``[rank][stream]``."""

    def body(transport: SimulatedTransport) -> list[float]:
        operations = {}
        for index, stream in enumerate(streams):
            channel = transport.open_channel(stream)
            exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
            if channel is not None and exchange is not None:
                operations[index] = channel.prepare(exchange)
                fill_send(exchange, operations[index].send, stream_index=index, iteration=0)
        transport.barrier()
        base_s = transport.now_s()
        for index in sorted(operations, key=lambda index: starts_s[index]):
            transport.sleep(base_s + starts_s[index] - transport.now_s())
            operations[index].start()
        ends = [0.0] * len(streams)
        waiting = dict(operations)
        while waiting:
            names = list(waiting)
            done = names[transport.wait_any([waiting[name] for name in names])]
            ends[done] = transport.now_s() - base_s
            operation = waiting.pop(done)
            if transport._world.move_bytes:
                found = check_receive(operation.exchange, operation.receive, stream_index=done, iteration=0)
                assert found is None
        return ends

    return run_simulated(world, body)


def test_two_streams_share_a_link_max_min() -> None:
    known = truth(intra=Tier(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    streams = [stream_of("send_recv", ((0, 1),), size, name) for size, name in ((1_000_000, "a"), (3_000_000, "b"))]
    ends = together(SimulatedWorld(known, 2), streams, [0.0, 0.0])
    assert ends == pytest.approx(np.tile([2e-3, 4e-3], (2, 1)))


def test_a_later_stream_slows_what_is_left_of_the_first() -> None:
    known = truth(intra=Tier(latency_s=0.0, bandwidth_bytes_per_s=1e9))
    streams = [stream_of("send_recv", ((0, 1),), size, name) for size, name in ((4_000_000, "a"), (1_000_000, "b"))]
    ends = together(SimulatedWorld(known, 2), streams, [0.0, 2e-3])
    assert ends == pytest.approx(np.tile([5e-3, 4e-3], (2, 1)))


def test_latency_loads_nothing() -> None:
    known = truth(intra=Tier(latency_s=1e-3, bandwidth_bytes_per_s=1e9))
    streams = [stream_of("all_reduce", ((0, 1),), 8, "a"), stream_of("send_recv", ((0, 1),), 1_000_000, "b")]
    ends = together(SimulatedWorld(known, 2), streams, [0.0, 0.0])
    assert ends[0][0] == pytest.approx(2e-3 + 8e-9, rel=1e-5)
    assert ends[0][1] == pytest.approx(2e-3, rel=1e-4)


def test_on_one_communicator_calls_run_one_after_the_other() -> None:
    streams = [stream_of("send_recv", ((0, 1),), size, name) for size, name in ((1_000_000, "a"), (1_000_000, "b"))]
    ends = together(SimulatedWorld(truth(), 2, one_communicator=True), streams, [0.0, 0.0])
    assert ends == pytest.approx(np.tile([1.001e-3, 2.002e-3], (2, 1)))


def test_two_calls_in_flight_on_one_stream_run_in_order() -> None:
    stream = stream_of("all_reduce", ((0, 1),), 1_000_000)

    def body(transport: SimulatedTransport) -> list[float]:
        channel = transport.open_channel(stream)
        assert channel is not None
        operations = []
        for size in (1_000_000, 8):
            exchange = exchange_for(stream, transport.rank, size)
            assert exchange is not None
            operations.append(channel.prepare(exchange))
        for operation in operations:
            operation.start()
        ends = []
        for operation in operations[::-1]:
            operation.wait()
            ends.append(transport.now_s())
        return ends

    first_s, second_s = 1e-3 + 2e-6, 8e-9 + 2e-6
    assert run_simulated(SimulatedWorld(truth(), 2, move_bytes=False), body)[0] == pytest.approx(
        [first_s + second_s, first_s + second_s]
    )


def test_groups_of_one_stream_are_independent() -> None:
    stream = stream_of("all_reduce", ((0, 1), (2, 3)), 100_000)

    def body(transport: SimulatedTransport) -> float:
        if transport.rank < 2:
            transport.sleep(1.0)
        return time_calls(stream, 1)(transport)[0]

    times = run_simulated(SimulatedWorld(truth(), 4), body)
    assert times == pytest.approx([1.02e-4] * 4)


@pytest.mark.parametrize("poll_s", [1e-7, 1e-5])
def test_polling_sees_the_end_within_one_look(poll_s: float) -> None:
    stream = stream_of("all_reduce", ((0, 1),), 100_000)

    def body(transport: SimulatedTransport) -> float:
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
        assert channel is not None
        assert exchange is not None
        operation = channel.prepare(exchange)
        operation.start()
        while not operation.test():
            pass
        assert operation.test()
        operation.wait()
        return transport.now_s()

    times = run_simulated(SimulatedWorld(truth(poll_s=poll_s), 2, move_bytes=False), body)
    assert all(1.02e-4 - 1e-12 <= end <= 1.02e-4 + poll_s + 1e-12 for end in times)


def test_noise_has_median_one_and_repeats() -> None:
    stream = stream_of("all_reduce", ((0, 1),), 10_000)
    known = truth(noise_sigma=0.2, seed=5)
    rows = [run_simulated(SimulatedWorld(known, 2, move_bytes=True), time_calls(stream, 2000)) for _ in range(2)]
    assert rows[0] == rows[1]
    logs = np.log(np.array(rows[0][0]) / closed_form(known, stream))
    assert abs(np.median(logs)) < 4 * 1.25 * 0.2 / np.sqrt(2000)
    assert np.std(logs) == pytest.approx(0.2, rel=0.1)
    other = run_simulated(SimulatedWorld(truth(noise_sigma=0.2, seed=6), 2), time_calls(stream, 20))
    assert other[0] != rows[0][0][:20]


def test_clocks_show_their_offset_and_drift() -> None:
    known = truth(clock_offset_s={1: 5e-3}, clock_drift={1: 1e-4})

    def body(transport: SimulatedTransport) -> tuple[float, float]:
        transport.barrier()
        before_s = transport.now_s()
        transport.sleep(0.0 if transport.rank else 10.0)
        transport.barrier()
        return before_s, transport.now_s()

    (start_s, end_s), (other_start_s, other_end_s) = run_simulated(SimulatedWorld(known, 2), body)
    assert other_start_s - start_s == pytest.approx(5e-3, abs=1e-8)
    assert other_end_s - end_s == pytest.approx(5e-3 + 1e-4 * end_s, abs=1e-9)


def test_a_straggler_starts_late_after_every_barrier() -> None:
    stream = stream_of("all_reduce", ((0, 1, 2),), 30_000)
    late_s = 3e-4

    def body(transport: SimulatedTransport) -> list[float]:
        channel = transport.open_channel(stream)
        exchange = exchange_for(stream, transport.rank, stream.payload_bytes)
        assert channel is not None
        assert exchange is not None
        operation = channel.prepare(exchange)
        starts = []
        for _ in range(5):
            transport.barrier()
            starts.append(transport.now_s())
            operation.start()
            operation.wait()
        return starts

    starts = np.array(run_simulated(SimulatedWorld(truth(straggler_s={2: late_s}), 3), body))
    assert starts[2] - starts[0] == pytest.approx(late_s)
    assert starts[1] == pytest.approx(starts[0])


def test_control_calls_carry_values() -> None:
    def body(transport: SimulatedTransport) -> tuple[object, ...]:
        word = transport.broadcast(b"go" if transport.rank == 0 else None)
        table = transport.gather(np.array([[transport.rank, 0.5]]))
        names = transport.gather_bytes(b"x" * transport.rank)
        if transport.rank == 0:
            transport.send_float(2, 1.5)
            transport.send_float(2, 2.5)
        heard = [transport.receive_float(0), transport.receive_float(0)] if transport.rank == 2 else []
        return word, None if table is None else table.tolist(), names, heard

    rows = run_simulated(SimulatedWorld(truth(), 3), body)
    assert rows[0] == (b"go", [[[0, 0.5]], [[1, 0.5]], [[2, 0.5]]], [b"", b"x", b"xx"], [])
    assert rows[1] == (b"go", None, None, [])
    assert rows[2] == (b"go", None, None, [1.5, 2.5])
