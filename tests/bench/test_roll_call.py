"""The roll call: everyone is heard, who is missing is not waited for without end, strangers are left aside."""

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from crosstraffic.bench import roll_call
from crosstraffic.bench.roll_call import attend, lead
from crosstraffic.errors import EnvironmentRefused


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(params=["file", "tcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path / 'call'}" if request.param == "file" else f"tcp://127.0.0.1:{free_port()}"


def said_by(rank: int) -> bytes:
    return json.dumps({"rank": rank, "long": "x" * 100_000}).encode()


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def decide(heard: list[bytes]) -> Callable[[Sequence[bytes]], bytes]:
    def answer(said: Sequence[bytes]) -> bytes:
        heard.extend(said)
        return b"go"

    return answer


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_all_ranks_are_heard_and_get_one_answer(place: str, num_ranks: int) -> None:
    answers: list[bytes] = []
    threads = [
        in_background(lambda rank=rank: answers.append(attend(place, rank, said_by(rank), 20)))  # type: ignore[misc]
        for rank in range(1, num_ranks)
    ]
    heard: list[bytes] = []
    assert lead(place, num_ranks, said_by(0), 20, decide(heard)) == b"go"
    for thread in threads:
        thread.join(20)
    assert heard[0] == said_by(0)
    assert sorted(json.loads(text)["rank"] for text in heard) == list(range(num_ranks))
    assert answers == [b"go"] * (num_ranks - 1)


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(place: str) -> None:
    heard: list[bytes] = []
    begun_s = time.monotonic()
    thread = in_background(lambda: attend(place, 2, said_by(2), 20))
    lead(place, 3, said_by(0), 1.0, decide(heard))
    thread.join(20)
    assert [json.loads(text)["rank"] for text in heard] == [0, 2]
    assert time.monotonic() - begun_s >= 1.0


def test_no_answer_is_told(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "ANSWER_WITHIN_S", 0.2)
    with pytest.raises(EnvironmentRefused, match="rank 1 got no answer from rank 0 at"):
        attend(place, 1, said_by(1), 0.3)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        roll_call._HEAD.pack(b"ctroll01", 2**31),
        roll_call._HEAD.pack(b"ctroll01", 5) + b"a",
        roll_call._HEAD.pack(b"ctroll01", 5) + b"{not!",
    ],
    ids=["silence", "another protocol", "too long", "cut off", "no JSON"],
)
def test_a_stranger_is_left_aside(words: bytes) -> None:
    port = free_port()
    heard: list[bytes] = []
    leader = in_background(lambda: lead(f"tcp://127.0.0.1:{port}", 2, said_by(0), 20, decide(heard)))
    for _ in range(200):
        try:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(words)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    assert attend(f"tcp://127.0.0.1:{port}", 1, said_by(1), 20) == b"go"
    leader.join(20)
    assert heard == [said_by(0), said_by(1)]


def test_the_port_is_free_again_afterwards() -> None:
    port = free_port()
    place = f"tcp://127.0.0.1:{port}"
    thread = in_background(lambda: attend(place, 1, said_by(1), 20))
    lead(place, 2, said_by(0), 20, decide([]))
    thread.join(20)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_that_is_taken_is_told() -> None:
    with (
        socket.create_server(("", 0)) as server,
        pytest.raises(EnvironmentRefused, match=r"cannot listen on port \d+.*MASTER_PORT"),
    ):
        lead(f"tcp://127.0.0.1:{server.getsockname()[1]}", 2, said_by(0), 1, decide([]))
