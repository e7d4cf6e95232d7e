"""A rank program: call after call with a heartbeat, until it is asked to stop; TEST_FAULT makes one rank misbehave.

TEST_FAULT is ``RANK:KIND``; kinds: exit (code 5), raise, silent (never says anything), sleep (in call 30), refuse.
"""

import os
import struct
import sys
import time
from pathlib import Path

from program_operations import fill, stream_of

from crosstraffic.bench.heartbeat import Heart, State
from crosstraffic.bench.open import open_transport
from crosstraffic.bench.ranks import identify
from crosstraffic.bench.transport import exchange_for

FAULT_CALL = 30


def main() -> None:
    run_dir = Path(sys.argv[1])
    identity = identify(os.environ)
    assert identity is not None
    faulty, _, kind = os.environ.get("TEST_FAULT", "-1:none").partition(":")
    is_faulty = int(faulty) == identity.rank
    if is_faulty and kind == "silent":
        time.sleep(600)
    with Heart.in_folder(run_dir, identity.rank) as heart:
        if kind == "refuse":
            print("this machine will not do", flush=True)
            heart.state(State.FAILED)
            os._exit(3)
        transport = open_transport(os.environ["TEST_TRANSPORT"], identity)
        stream = stream_of("tp.test", "all_reduce", (tuple(range(transport.world_size)),), 4096)
        channel, exchange = transport.open_channel(stream), exchange_for(stream, transport.rank, 4096)
        assert channel is not None
        assert exchange is not None
        operation = channel.prepare(exchange)
        fill(stream, exchange, operation, 0)
        call, going = 0, True
        try:
            while going:
                if transport.rank == 0:
                    heart.progress(call // 10, 1000, 1.5)
                heart.call(0, 0, call)
                if is_faulty and call == FAULT_CALL:
                    misbehave(kind)
                operation.start()
                operation.wait()
                call += 1
                decision = struct.pack("?", not heart.should_stop()) if transport.rank == 0 else None
                (going,) = struct.unpack("?", transport.broadcast(decision))
                time.sleep(0.005)
        except Exception as error:
            heart.state(State.FAILED)
            print(f"rank {identity.rank} lost: {error}", flush=True)
            os._exit(1)
        heart.state(State.FINISHED)
        transport.close()
    print("all ok", flush=True)


def misbehave(kind: str) -> None:
    if kind == "exit":
        os._exit(5)
    if kind == "raise":
        raise ValueError("wrong on purpose")
    if kind == "sleep":
        time.sleep(600)


if __name__ == "__main__":
    main()
