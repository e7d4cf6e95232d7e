"""Lines between guards, on this machine: where they meet, what is heard, strangers, garbage, two launches at once."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstraffic.bench import control
from crosstraffic.bench.control import (
    MAX_LINE,
    NUM_PORTS,
    Line,
    Meeting,
    accept,
    addresses,
    connect,
    is_here,
    listen,
    meeting,
)
from crosstraffic.bench.messages import hello_to_dict, read_hello
from crosstraffic.bench.ranks import RankIdentity

WITHIN_S = 20.0


def identity(launcher: str) -> RankIdentity:
    return RankIdentity(rank=1, world_size=2, local_rank=0, launcher=launcher, meeting_point=None)


SRUN = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[07-09],m1"}
TORCHRUN = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "r1"}


def test_srun_meets_at_the_first_node_of_the_step() -> None:
    place = meeting(SRUN, identity("srun"))
    assert place is not None
    assert (place.host, place.key, len(place.ports)) == ("gpu07", "slurm 77.3", NUM_PORTS)
    assert place.ports == meeting(SRUN, identity("srun")).ports  # type: ignore[union-attr]


def test_torchrun_meets_at_its_master() -> None:
    place = meeting(TORCHRUN, identity("torchrun"))
    assert place is not None
    assert (place.host, place.key) == ("head", "torchrun head:29500 r1")
    assert 29500 not in place.ports


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [
        ("mpiexec", {"PMI_RANK": "1"}),
        ("srun", {**SRUN, "SLURM_JOB_ID": "x"}),
        ("srun", {**SRUN, "SLURM_JOB_ID": "²"}),
        ("srun", {**SRUN, "SLURM_JOB_ID": "9" * 5000}),
        ("srun", {**SRUN, "SLURM_STEP_NODELIST": ""}),
        ("torchrun", {**TORCHRUN, "MASTER_PORT": ""}),
        ("torchrun", {**TORCHRUN, "MASTER_PORT": "-1"}),
    ],
)
def test_without_an_address_there_is_no_place(launcher: str, environment: dict[str, str]) -> None:
    assert meeting(environment, identity(launcher)) is None


@pytest.mark.parametrize("job", [1, 2**31, 4_294_901_759])
def test_ports_are_no_system_ports_and_none_of_torch(job: int) -> None:
    place = meeting({**SRUN, "SLURM_JOB_ID": str(job)}, identity("srun"))
    assert place is not None
    assert min(place.ports) >= 10000
    assert max(place.ports) < 20000


def test_steps_of_a_job_have_ports_of_their_own() -> None:
    places = [meeting({**SRUN, "SLURM_STEP_ID": str(step)}, identity("srun")) for step in range(5)]
    ports = [port for place in places if place is not None for port in place.ports]
    assert len(set(ports)) == 5 * NUM_PORTS


@pytest.fixture
def place() -> Meeting:
    first = random.randrange(10000, 19984)
    return Meeting(host="localhost", ports=tuple(range(first, first + NUM_PORTS)), key=f"test {first}")


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    """A line and the raw socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = socket.create_connection(server.getsockname())
        line = Line(server.accept()[0])
    yield line, raw
    line.close()
    raw.close()


def heard(line: Line, num: int = 1) -> list[dict[str, Any]]:
    """Listen until so many messages have come, or the line is closed."""
    found: list[dict[str, Any]] = []
    until = time.monotonic() + WITHIN_S
    while len(found) < num and line.is_open:
        assert time.monotonic() < until
        found += line.hear()
    return found


def test_what_is_said_is_heard(place: Meeting) -> None:
    listener = listen(place)
    assert listener is not None
    with listener:
        here = connect(place, 0)
        assert here is not None
        there = accept(listener)
        assert there is not None
        messages = [{"a": 1}, {"b": "ü\n"}, {}]
        for message in messages:
            here.say(message)
        assert heard(there, 3) == messages
        there.say({"ok": True})
        assert here.next_message(WITHIN_S) == {"ok": True}
        here.close()
        assert heard(there) == []
        assert not there.is_open
        there.close()


def test_a_message_that_comes_in_pieces_is_one(ends: tuple[Line, socket.socket]) -> None:
    line, raw = ends
    text = json.dumps({"last": ["x" * 50_000]}).encode() + b'\n{"a": 1}\n{"cut'
    for index in range(0, len(text), 9999):
        raw.sendall(text[index : index + 9999])
    first, second = heard(line, 2)
    assert len(first["last"][0]) == 50_000
    assert second == {"a": 1}
    assert line.is_open


def test_a_message_in_pieces_is_waited_for(ends: tuple[Line, socket.socket]) -> None:
    line, raw = ends
    raw.sendall(b'{"a"')
    later = threading.Timer(0.2, raw.sendall, args=(b": 1}\n",))
    later.start()
    assert line.next_message(WITHIN_S) == {"a": 1}
    later.join()


def test_no_message_within_the_time_is_an_empty_one(ends: tuple[Line, socket.socket]) -> None:
    line, raw = ends
    assert line.next_message(0.05) == {}
    assert line.is_open
    raw.sendall(b"{}\n")
    assert heard(line) == [{}]


GARBAGE = {
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "a list": b"[1]\n",
    "a number": b"5\n",
    "no text": b"\xff\xfe\x00\n",
    "nested too deep": b"[" * 60_000 + b"\n",
    "a huge number": b'{"rank": ' + b"9" * 10_000 + b"}\n",
    "a line without end": b"x" * (2 * MAX_LINE + 2),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_closes_the_line(ends: tuple[Line, socket.socket], data: bytes) -> None:
    line, raw = ends
    sender = threading.Thread(target=send_quietly, args=(raw, data))
    sender.start()
    assert heard(line) == []
    assert not line.is_open
    line.say({"a": 1})  # says nothing more, and raises nothing
    line.close()
    sender.join()


def send_quietly(raw: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        raw.sendall(data)


@given(st.binary(max_size=300))
def test_no_bytes_raise(data: bytes) -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    line = Line.__new__(Line)
    line._socket, line._rest, line.is_open = here, b"", True
    with here, there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        while line.is_open:
            assert all(isinstance(message, dict) for message in line.hear())


def test_a_reset_connection_is_a_closed_line(ends: tuple[Line, socket.socket]) -> None:
    line, raw = ends
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raw.close()
    assert heard(line) == []
    assert not line.is_open


def test_a_peer_that_does_not_read_is_given_up(ends: tuple[Line, socket.socket]) -> None:
    line, _ = ends
    line._socket.settimeout(0.1)
    until = time.monotonic() + WITHIN_S
    while line.is_open:
        assert time.monotonic() < until, "it waits for ever"
        line.say({"x": "y" * 60_000})


def test_a_listener_without_a_caller_does_not_wait(place: Meeting) -> None:
    """Between becoming readable and being asked, whoever called may be gone."""
    listener = listen(place)
    assert listener is not None
    with listener:
        listener.setblocking(False)
        assert accept(listener) is None


def test_a_taken_port_is_left_out(place: Meeting) -> None:
    with socket.create_server(("", place.ports[0])):
        listener = listen(place)
        assert listener is not None
        assert listener.getsockname()[1] == place.ports[1]
        listener.close()


def test_when_all_ports_are_taken_there_is_no_listener(place: Meeting) -> None:
    with contextlib.ExitStack() as stack:
        for port in place.ports:
            stack.enter_context(socket.create_server(("", port)))
        assert listen(place) is None


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6_and_ipv4_reach_the_listener(place: Meeting) -> None:
    listener = listen(place)
    assert listener is not None
    with listener:
        for host in ("::1", "127.0.0.1"):
            line = connect(Meeting(host=host, ports=place.ports, key=""), 0)
            assert line is not None, host
            line.close()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "..", "a" * 70 + ".x", "a b"])
def test_a_name_that_does_not_resolve_is_no_crash(host: str) -> None:
    assert addresses(host) == ()
    assert not is_here(host)
    assert connect(Meeting(host=host, ports=(1,), key=""), 0) is None


def test_this_machine_is_here() -> None:
    assert is_here("localhost")
    assert is_here("127.0.0.1")
    assert not is_here("192.0.2.1")  # for documentation: no machine has it


def test_a_name_is_looked_up_again_until_it_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError("not yet"), [(2, 1, 6, "", ("192.0.2.7", 0))], AssertionError("asked again")]

    def look_up(*_: object, **__: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(control.socket, "getaddrinfo", look_up)
    assert addresses("late.test") == ()
    assert addresses("late.test") == addresses("late.test") == ("192.0.2.7",)


HELLO = {"key": "k", "rank": 1, "world_size": 2, "host": "n", "pid": 5, "facts": {"Python": "3"}}


def test_a_hello_is_read_as_it_was_said() -> None:
    assert hello_to_dict(read_hello(HELLO)) == HELLO


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": "1"}, {"rank": True}, {"rank": -1}, {"rank": float("inf")}, {"rank": None}, {"world_size": 2.0},
        {"host": 5}, {"key": None}, {"facts": None}, {"facts": {"Python": 3}}, {"facts": [["Python", "3"]]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_hello_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        read_hello({**HELLO, **changes})
