"""Guards that run in this process, without ranks: two launches at once, second ranks 0, stops, strangers."""

import contextlib
import json
import os
import random
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from crosstraffic.bench import follower, leader
from crosstraffic.bench.child import Child
from crosstraffic.bench.control import (
    NUM_PORTS,
    Meeting,
)
from crosstraffic.bench.follower import Follower
from crosstraffic.bench.heartbeat import Heart, shared_memory
from crosstraffic.bench.leader import Leader
from crosstraffic.bench.messages import Hello, hello_to_dict
from crosstraffic.errors import EnvironmentRefused

WITHIN_S = 20.0


@pytest.fixture
def place() -> Meeting:
    first = random.randrange(10000, 19984)
    return Meeting(host="localhost", ports=tuple(range(first, first + NUM_PORTS)), key=f"test {first}")


class Idle(Child):
    """A rank without a process, for guards that run in this one."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2**22 + 1, shared_memory(), tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        self.heart = Heart(self._memory)
        self.was_killed = False

    def reap(self) -> bool:
        return False

    def kill(self) -> None:
        self.was_killed = True


class Guards:
    """Guards that are served in turn, in this process."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.roles: list[Leader | Follower] = []
        self.children: list[Idle] = []

    def add(self, place: Meeting, rank: int, num_ranks: int = 2) -> Leader | Follower:
        child, hello = Idle(rank), hello_of(place, rank, num_ranks)
        role: Leader | Follower
        if rank == 0:
            with open_pipe() as folder_fd:
                role = Leader(hello, place, child, self.selector, folder_fd)
        else:
            role = Follower(hello, place, child, self.selector)
        self.roles.append(role)
        self.children.append(child)
        return role

    def serve(self, until: Callable[[], bool]) -> None:
        end_s = time.monotonic() + WITHIN_S
        while not until():
            assert time.monotonic() < end_s, "it did not happen"
            for key, _ in self.selector.select(0.02):
                key.data()
            for role, child in zip(self.roles, self.children, strict=True):
                if role.code is None:
                    if role.is_ready:
                        for message in child.news():
                            role.say(message)
                    role.tick(time.monotonic())

    def close(self) -> None:
        for role in self.roles:
            role.close()
        self.selector.close()


@contextlib.contextmanager
def open_pipe() -> Iterator[int]:
    """Where a rank 0 would say its folder; this one says nothing."""
    with tempfile.TemporaryFile() as file:
        yield os.dup(file.fileno())


def hello_of(place: Meeting, rank: int, num_ranks: int = 2) -> Hello:
    return Hello(key=place.key, rank=rank, world_size=num_ranks, host="n0", pid=100 + rank, facts={"crosstraffic": "1"})


@pytest.fixture
def guards() -> Iterator[Guards]:
    found = Guards()
    yield found
    found.close()


def test_two_launches_on_the_same_ports_do_not_mix(guards: Guards, place: Meeting) -> None:
    other = Meeting(host=place.host, ports=place.ports, key="another launch")
    first = guards.add(place, 0)
    second = guards.add(other, 0)
    mine, yours = guards.add(place, 1), guards.add(other, 1)
    guards.serve(lambda: mine.is_ready and yours.is_ready)
    assert isinstance(first, Leader)
    assert isinstance(second, Leader)
    assert [set(role._supervisor.ranks) for role in (first, second)] == [{0, 1}, {0, 1}]
    assert [role.code for role in guards.roles] == [None] * 4


def test_a_second_rank_0_is_refused(guards: Guards, place: Meeting) -> None:
    first = guards.add(place, 0)
    found: list[BaseException] = []

    def second() -> None:
        try:
            Guards().add(place, 0)
        except EnvironmentRefused as error:
            found.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    guards.serve(lambda: first.code is not None and not thread.is_alive())
    assert "another process of this launch is rank 0 already" in str(found[0])
    assert first.code == 3


def test_a_rank_that_hears_of_the_end_kills_its_process(guards: Guards, place: Meeting) -> None:
    first, second = guards.add(place, 0, 3), guards.add(place, 1, 3)
    third = guards.add(place, 2, 3)
    guards.serve(lambda: second.is_ready and third.is_ready)
    guards.children[2].signal = "SIGKILL"
    guards.serve(lambda: first.code is not None)
    guards.serve(lambda: guards.children[1].was_killed)
    assert first.code == 1
    first.close()
    guards.serve(lambda: second.code is not None and third.code is not None)
    assert (second.code, third.code) == (1, 1)


def test_a_request_to_stop_before_the_line_is_up_is_passed_on(guards: Guards, place: Meeting) -> None:
    second = guards.add(place, 1)
    second.asked_to_stop("SIGTERM")
    first = guards.add(place, 0)
    guards.serve(lambda: second.is_ready and guards.children[1].heart.should_stop())
    assert first.code is None


def test_strangers_do_no_harm(guards: Guards, place: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "HELLO_WITHIN_S", 0.2)
    first = guards.add(place, 0)
    silent = socket.create_connection(("127.0.0.1", place.ports[0]))
    told = [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"key": "other", "rank": Infinity}\n',
        b'{"kill": 0}\n{"go": true}\n',
        json.dumps({**hello_to_dict(hello_of(place, 1)), "key": "another"}).encode() + b"\n",
    ]
    strangers = [socket.create_connection(("127.0.0.1", place.ports[0])) for _ in told]
    for stranger, data in zip(strangers, told, strict=True):
        stranger.sendall(data)
    everyone = [silent, *strangers]
    guards.serve(lambda: all(is_closed(stranger) for stranger in everyone))
    assert first.code is None
    second = guards.add(place, 1)
    guards.serve(lambda: second.is_ready)
    for stranger in everyone:
        stranger.close()


def is_closed(connection: socket.socket) -> bool:
    """Tell whether the other end has closed a connection; takes what came before."""
    connection.setblocking(False)
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_stranger_on_the_port_of_rank_0_is_left(
    guards: Guards, place: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts and says nothing, or garbage: the guard goes on to the next port, and keeps no socket of it."""
    monkeypatch.setattr(follower, "ORPHAN_S", 0.3)
    monkeypatch.setattr(leader, "ANSWER_WITHIN_S", 0.1)
    with socket.create_server(("", place.ports[0])):
        second = guards.add(place, 1)
        time.sleep(0.1)
        first = guards.add(place, 0)
        guards.serve(lambda: second.is_ready)
        assert first.code is None
        assert len(guards.selector.get_map()) == 3  # the listener, and both ends of one line


def test_too_few_files_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(leader.resource, "setrlimit", lambda kind, limits: asked.append(limits))
    monkeypatch.setattr(leader.resource, "getrlimit", lambda kind: (1024, 4096))
    leader._allow_descriptors(100)
    assert asked == []
    leader._allow_descriptors(4000)
    assert asked == [(4000, 4096)]
    with pytest.raises(EnvironmentRefused, match="5000 files open, the limit is 4096"):
        leader._allow_descriptors(5000)


def test_a_rank_that_ended_where_nobody_listens_says_so_itself(
    guards: Guards, place: Meeting, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follower, "ALONE_S", 0.1)
    second = guards.add(place, 1)
    guards.children[0].exit_code = 2
    guards.children[0]._log.write(b"error: no such scenario\n")
    guards.serve(lambda: second.code is not None)
    assert second.code == 2
    assert "nobody of this run answers at localhost" in (told := capfd.readouterr().err)
    assert "| error: no such scenario" in told


def test_a_host_without_an_address_is_named(
    guards: Guards, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follower, "MEET_WITHIN_S", 0.1)
    second = guards.add(Meeting(host="no-such-host.invalid", ports=(1,), key=""), 1)
    guards.serve(lambda: second.code is not None)
    assert second.code == 3
    assert "the name no-such-host.invalid, where rank 0 should be, does not resolve" in capfd.readouterr().err
