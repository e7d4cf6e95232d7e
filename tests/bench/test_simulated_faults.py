"""Simulated ranks that fail, wait for ever, disagree or are interrupted: each ends the run and is named."""

import gc
import signal
import threading
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from crosstraffic.bench.payload import check_receive, fill_send
from crosstraffic.bench.simulated import SimulatedOperation, SimulatedTransport, run_simulated
from crosstraffic.bench.simulated_calls import Delivery
from crosstraffic.bench.simulated_truth import SimulatedTruth, Tier
from crosstraffic.bench.simulated_world import SimulatedWorld
from crosstraffic.bench.transport import exchange_for
from crosstraffic.errors import RunFailed
from crosstraffic.patterns.stream import Op, Stream

TIER = Tier(latency_s=1e-6, bandwidth_bytes_per_s=1e9)
TRUTH = SimulatedTruth(ranks_per_node=2, intra=TIER, inter=TIER)


def stream_of(op: Op, num_ranks: int, size: int, name: str = "x") -> Stream:
    return Stream(
        name=name,
        pattern="x",
        op=op,
        phase="decode",
        groups=(tuple(range(num_ranks)),),
        payload_bytes=size,
        calls_per_step=1,
        dtype="bfloat16",
        formula="",
        source="",
    )


def prepared(transport: SimulatedTransport, stream: Stream, size: int | None = None) -> SimulatedOperation:
    channel = transport.open_channel(stream)
    exchange = exchange_for(stream, transport.rank, stream.payload_bytes if size is None else size)
    assert channel is not None
    assert exchange is not None
    return channel.prepare(exchange)


def test_a_standstill_names_every_rank_and_what_it_waits_in() -> None:
    stream = stream_of("all_reduce", 4, 16)

    def body(transport: SimulatedTransport) -> None:
        operation = prepared(transport, stream)
        if transport.rank == 0:
            operation.start()
            operation.wait()
        elif transport.rank == 1:
            transport.receive_float(3)
        elif transport.rank == 2:
            transport.barrier()

    with pytest.raises(RunFailed) as caught:
        run_simulated(SimulatedWorld(TRUTH, 4), body)
    text = str(caught.value)
    assert "rank 0: waits in wait of x (all_reduce, group (0, 1, 2, 3)), call 0; not started by ranks 1, 2, 3" in text
    assert "rank 1: waits in receive_float from rank 3" in text
    assert "rank 2: waits in barrier (control call 0); not there: ranks 0, 1, 3" in text
    assert "rank 3: has returned" in text


def test_the_first_failure_is_raised_with_its_rank() -> None:
    ended = []

    def body(transport: SimulatedTransport) -> None:
        try:
            transport.barrier()
            if transport.rank == 1:
                raise ValueError("broken")
            transport.barrier()
        finally:
            ended.append(transport.rank)

    with pytest.raises(ValueError, match="broken") as caught:
        run_simulated(SimulatedWorld(TRUTH, 3), body)
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    assert sorted(ended) == [0, 1, 2]


def open_different_streams(transport: SimulatedTransport) -> None:
    transport.open_channel(stream_of("all_reduce", 2, 16, name=f"s{transport.rank}"))


def start_in_different_orders(transport: SimulatedTransport) -> None:
    stream = stream_of("all_reduce", 2, 16)
    channel = transport.open_channel(stream)
    exchange = exchange_for(stream, transport.rank, 16)
    assert channel is not None
    assert exchange is not None
    operations = [channel.prepare(exchange), channel.prepare(exchange)]
    for index in (0, 1) if transport.rank else (1, 0):
        operations[index].start()
    for operation in operations:
        operation.wait()


def prepare_different_sizes(transport: SimulatedTransport) -> None:
    prepared(transport, stream_of("all_reduce", 2, 16), size=16 + 4 * transport.rank)


def make_different_control_calls(transport: SimulatedTransport) -> None:
    if transport.rank:
        transport.barrier()
    else:
        transport.gather(np.zeros(1))


def spin_on_the_clock(transport: SimulatedTransport) -> None:
    while transport.now_s() < 1.0:
        pass


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (open_different_streams, "ranks open different streams as number 0: rank 1 s1, an earlier one s0"),
        (start_in_different_orders, "ranks start different calls as number 0: rank 1 its operation 0, rank 0 its oper"),
        (prepare_different_sizes, "ranks prepared different calls: 20 bytes on rank 1, 16"),
        (make_different_control_calls, "different control calls as number 0: rank 1 barrier, rank 0 gather"),
        (spin_on_the_clock, "rank 0 read its clock 1000000 times in a row; use sleep"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_disagree_are_told(body: Callable[[SimulatedTransport], None], message: str) -> None:
    with pytest.raises(RunFailed, match=message.replace("(", r"\(")):
        run_simulated(SimulatedWorld(TRUTH, 2), body)


def test_wrong_use_of_an_operation_is_refused() -> None:
    stream = stream_of("all_reduce", 1, 16)

    def body(transport: SimulatedTransport) -> None:
        operation = prepared(transport, stream)
        with pytest.raises(RuntimeError, match="never started"):
            operation.wait()
        with pytest.raises(RuntimeError, match="none of them started"):
            transport.wait_any([operation])
        operation.start()
        with pytest.raises(RuntimeError, match="started again before it was complete"):
            operation.start()
        operation.wait()
        operation.start()

    run_simulated(SimulatedWorld(TRUTH, 1), body)


def test_a_spoiled_delivery_is_found_by_the_check() -> None:
    stream = stream_of("all_to_all", 3, 300)

    def spoil(delivery: Delivery) -> None:
        if delivery.call == 1:
            delivery.receives[2][205] ^= 1

    def body(transport: SimulatedTransport) -> list[tuple[int | None, int] | None]:
        operation = prepared(transport, stream)
        found: list[tuple[int | None, int] | None] = []
        for call in range(3):
            fill_send(operation.exchange, operation.send, stream_index=0, iteration=call)
            operation.start()
            operation.wait()
            wrong = check_receive(operation.exchange, operation.receive, stream_index=0, iteration=call)
            found.append(None if wrong is None else (wrong[0], wrong[1].offset_bytes))
        return found

    rows = run_simulated(SimulatedWorld(TRUTH, 3, tamper=spoil), body)
    assert rows == [[None] * 3, [None] * 3, [None, (2, 5), None]]


def test_buffers_that_nobody_holds_are_freed() -> None:
    stream = stream_of("all_reduce", 2, 4000)

    def body(transport: SimulatedTransport) -> bool:
        operation = prepared(transport, stream)
        operation.start()
        operation.wait()
        transport.barrier()
        gone = weakref.ref(operation)
        gc.disable()
        try:
            del operation
            return gone() is None
        finally:
            gc.enable()

    assert run_simulated(SimulatedWorld(TRUTH, 2), body) == [True, True]


def test_ctrl_c_ends_all_ranks() -> None:
    ended = []

    def body(transport: SimulatedTransport) -> None:
        try:
            while True:
                transport.barrier()
        finally:
            ended.append(transport.rank)

    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_simulated(SimulatedWorld(TRUTH, 3), body)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1, 2]
