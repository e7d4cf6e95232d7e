"""A world of simulated ranks: one thread each, one running at a time, and virtual time that jumps from event to event.

A rank that runs may be ahead of the world's time: what it starts is entered as an event at its own time. It hands
over only where what it asks for is not known yet. So runs are exact, repeatable, and switch threads seldom.
"""

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from crosstraffic.bench.fluid import Fluid
from crosstraffic.bench.simulated_calls import Call, Delivery, Group, Part, Shape, deliver
from crosstraffic.bench.simulated_truth import SimulatedTruth
from crosstraffic.bench.transport import Exchange
from crosstraffic.errors import RunFailed
from crosstraffic.patterns.stream import Stream

_MAX_CLOCK_READS = 1_000_000  # in a row, with nothing between them


def _its_turn() -> str:
    return "its turn"


class Stopped(RunFailed):
    """Another rank has failed, or the run was interrupted; this rank ends too."""


@dataclass(slots=True, eq=False)
class Rank:
    """One rank: its time, which may be ahead of the world's, and the lock it sleeps on."""

    number: int
    clock_rate: float
    clock_offset_s: float
    delay_s: float
    time_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_blocked: bool = True
    has_returned: bool = False
    why: Callable[[], str] = _its_turn
    num_rounds: int = 0
    num_channels: int = 0
    num_clock_reads: int = 0
    queues: dict[int, deque[Call]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Round:
    kind: str
    values: list[object]
    came: set[int] = field(default_factory=set)
    last_s: float = 0.0
    taken: int = 0


class SimulatedWorld:
    """Ranks, fabric and virtual time of one simulated run.

    ``move_bytes=False`` leaves the buffers alone (for runs that look at times only). ``one_communicator`` puts all
    streams on one communicator, where calls that share a rank run one after the other. ``tamper`` sees every
    completed call after its bytes have moved.
    """

    def __init__(
        self,
        truth: SimulatedTruth,
        num_ranks: int,
        *,
        move_bytes: bool = True,
        one_communicator: bool = False,
        tamper: Callable[[Delivery], None] | None = None,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1: {num_ranks}")
        self.truth = truth
        self.num_ranks = num_ranks
        self.move_bytes = move_bytes
        self.one_communicator = one_communicator
        self.tamper = tamper
        self.time_s = 0.0
        self.ranks = [
            Rank(
                number=rank,
                clock_rate=1 + truth.clock_drift.get(rank, 0.0),
                clock_offset_s=truth.clock_offset_s.get(rank, 0.0),
                delay_s=truth.straggler_s.get(rank, 0.0),
            )
            for rank in range(num_ranks)
        ]
        for rank in self.ranks:
            rank.lock.acquire()
        self.is_stopping = False
        self._ready: deque[Rank] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._fluid = Fluid()
        self._rounds: dict[int, _Round] = {}
        self._channels: list[tuple[Stream, tuple[Group, ...]]] = []
        self._mail: dict[tuple[int, int], deque[tuple[float, float]]] = {}
        self._listeners: dict[tuple[int, int], Rank] = {}
        self._last_mail_s: dict[tuple[int, int], float] = {}
        self._ping_noise = np.random.default_rng([truth.seed, 0])

    # Turns ----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise where the run is over.

        Raises:
            Stopped: another rank failed, or the run was interrupted.
        """
        if self.is_stopping:
            raise Stopped("the simulated run has ended")

    def block(self, rank: Rank, why: Callable[[], str]) -> None:
        """Let other ranks run until this one is woken.

        Raises:
            Stopped: the run ended meanwhile.
            RunFailed: every rank waits, and nothing is under way that could wake one.
        """
        rank.is_blocked = True
        rank.why = why
        following = self.next_rank()
        if following is not rank:
            following.lock.release()
            rank.lock.acquire()
            self.check()
        rank.why = _its_turn  # the last one may hold buffers

    def wake(self, rank: Rank) -> None:
        """Put a blocked rank in line to run."""
        if rank.is_blocked:
            rank.is_blocked = False
            self._ready.append(rank)

    def next_rank(self) -> Rank:
        """Return the rank to run next; move time on until there is one.

        Raises:
            RunFailed: there is none, and no event that could make one ready.
        """
        ready, events, fluid = self._ready, self._events, self._fluid
        while not ready:
            if events and events[0][0] <= self.time_s:
                heapq.heappop(events)[2]()
                continue
            ends_s = fluid.next_s()
            if ends_s is not None and (not events or ends_s <= events[0][0]):
                self.time_s = ends_s
                for call in fluid.advance(ends_s):
                    self._end(call)  # type: ignore[arg-type]
            elif events:
                self.time_s = events[0][0]
                fluid.advance(self.time_s)
            else:
                raise RunFailed(self._standstill())
        return ready.popleft()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something when the world's time has come to ``time_s``."""
        heapq.heappush(self._events, (time_s, next(self._order), action))

    def catch_up(self, rank: Rank, why: Callable[[], str]) -> None:
        """Block a rank until the world's time has come to its own."""
        if rank.time_s > self.time_s:
            self.at(rank.time_s, lambda: self.wake(rank))
            self.block(rank, why)

    def _standstill(self) -> str:
        lines = [
            f"  rank {rank.number}: {'has returned' if rank.has_returned else 'waits in ' + rank.why()}"
            for rank in self.ranks
        ]
        return "every rank waits, and nothing is under way that could end it:\n" + "\n".join(lines)

    # Control --------------------------------------------------------------------------------------------------------

    def meet(self, rank: Rank, kind: str, value: object) -> list[object]:
        """Come to the next control call of all ranks; return every rank's value.

        Raises:
            RunFailed: the ranks' control calls differ in kind.
        """
        self.check()
        rank.num_clock_reads = 0
        number = rank.num_rounds
        rank.num_rounds += 1
        meeting = self._rounds.setdefault(number, _Round(kind=kind, values=[None] * self.num_ranks))
        if meeting.kind != kind:
            raise RunFailed(
                f"ranks make different control calls as number {number}: rank {rank.number} {kind}, "
                f"rank {min(meeting.came)} {meeting.kind}"
            )
        meeting.came.add(rank.number)
        meeting.values[rank.number] = value
        meeting.last_s = max(meeting.last_s, rank.time_s)
        if len(meeting.came) == self.num_ranks:
            for other in self.ranks:
                if other is not rank:
                    self.wake(other)
        else:
            self.block(rank, lambda: f"{kind} (control call {number}); not there: {self._absent(meeting)}")
        meeting.taken += 1
        if meeting.taken == self.num_ranks:
            del self._rounds[number]
        latency_s = self.truth.control_latency_s if self.num_ranks > 1 else 0.0
        rank.time_s = meeting.last_s + latency_s + rank.delay_s
        return meeting.values

    def _absent(self, meeting: _Round) -> str:
        return _ranks([rank.number for rank in self.ranks if rank.number not in meeting.came])

    def post(self, rank: Rank, peer: int, value: float) -> None:
        """Send a number."""
        self.check()
        rank.num_clock_reads = 0
        key = (rank.number, peer)
        direction = 0 if peer > rank.number else 1
        travel_s = self.truth.control_latency_s + self.truth.ping_extra_s[direction]
        jitter_s = self.truth.ping_jitter_s[direction]
        if jitter_s > 0:
            travel_s += float(self._ping_noise.exponential(jitter_s))
        arrival_s = max(rank.time_s + travel_s, self._last_mail_s.get(key, 0.0))
        self._last_mail_s[key] = arrival_s
        self._mail.setdefault(key, deque()).append((arrival_s, value))
        listener = self._listeners.pop(key, None)
        if listener is not None:
            self.wake(listener)

    def fetch(self, rank: Rank, peer: int) -> float:
        """Receive a number."""
        self.check()
        rank.num_clock_reads = 0
        key = (peer, rank.number)
        box = self._mail.setdefault(key, deque())
        if not box:
            self._listeners[key] = rank
            self.block(rank, lambda: f"receive_float from rank {peer}")
        arrival_s, value = box.popleft()
        rank.time_s = max(rank.time_s, arrival_s)
        return value

    def read_clock(self, rank: Rank) -> float:
        """Return a rank's time on its own clock.

        Raises:
            RunFailed: the rank does nothing but read its clock; virtual time would stand still for ever.
        """
        rank.num_clock_reads += 1
        if self.is_stopping or rank.num_clock_reads > _MAX_CLOCK_READS:
            self.check()
            raise RunFailed(f"rank {rank.number} read its clock {_MAX_CLOCK_READS} times in a row; use sleep")
        return rank.time_s * rank.clock_rate + rank.clock_offset_s

    # Calls ----------------------------------------------------------------------------------------------------------

    def open(self, rank: Rank, stream: Stream) -> tuple[int, tuple[Group, ...]]:
        """Return the communicator and the groups of the next stream that a rank opens.

        Raises:
            RunFailed: the ranks open different streams.
        """
        self.check()
        number = rank.num_channels
        rank.num_channels += 1
        communicator_id = 0 if self.one_communicator else number
        if number == len(self._channels):
            groups = tuple(
                Group(
                    stream=stream,
                    index=index,
                    communicator_id=communicator_id,
                    noise=np.random.default_rng([self.truth.seed, 1, number, index]),
                    next_call=[0] * len(group),
                )
                for index, group in enumerate(stream.groups)
            )
            self._channels.append((stream, groups))
        opened, groups = self._channels[number]
        if (opened.name, opened.op, opened.groups) != (stream.name, stream.op, stream.groups):
            raise RunFailed(
                f"ranks open different streams as number {number}: rank {rank.number} {stream.name}, "
                f"an earlier one {opened.name}"
            )
        return communicator_id, groups

    def prepare(self, group: Group, place: int, exchange: Exchange) -> Shape:
        """Enter a prepared call; begin what waited for it."""
        self.check()
        shape = group.prepare(self.truth, place, exchange)
        if shape.footprint is not None:
            for call in [call for call in group.calls.values() if call.shape is shape]:
                self._begin(call)
        return shape

    def start(self, rank: Rank, group: Group, shape: Shape, part: Part, start_number: int) -> Call:
        """Start a rank's part of a call at the rank's own time.

        Raises:
            RunFailed: the members of a collective start different calls.
        """
        self.check()
        rank.num_clock_reads = 0
        call = group.join(shape, part, start_number)
        call.starts_s = max(call.starts_s, rank.time_s)
        rank.queues.setdefault(group.communicator_id, deque()).append(call)
        self._begin(call)
        return call

    def _begin(self, call: Call) -> None:
        """Begin a call if all that take part have started it, and it is the oldest on its communicator on each."""
        shape, group = call.shape, call.group
        if call.has_begun or shape.footprint is None or len(call.parts) < len(shape.members):
            return
        members = [self.ranks[group.ranks[member]] for member in shape.members]
        for rank in members:
            if rank.queues[group.communicator_id][0] is not call:
                return
        call.has_begun = True
        call.factor = group.factor(self.truth.noise_sigma)
        self.at(max(self.time_s, call.starts_s) + shape.latency_s * call.factor, lambda: self._transfer(call))

    def _transfer(self, call: Call) -> None:
        need = call.shape.footprint
        if need is None or need.alone_s == 0:
            self._end(call)
        else:
            self._fluid.add(call, need, call.factor)

    def _end(self, call: Call) -> None:
        group, shape = call.group, call.shape
        call.done_s = self.time_s
        group.leave(call)
        if self.move_bytes:
            self._move(call)
        call.parts.clear()  # they hold buffers
        followers: list[Call] = []
        for member in shape.members:
            queue = self.ranks[group.ranks[member]].queues[group.communicator_id]
            queue.popleft()
            if queue:
                followers.append(queue[0])
        for number in call.waiting:
            self.wake(self.ranks[number])
        for follower in followers:
            self._begin(follower)

    def _move(self, call: Call) -> None:
        parts = [part for _, part in sorted(call.parts.items())]
        deliver(parts)
        if self.tamper is not None:
            self.tamper(
                Delivery(
                    stream=call.group.stream.name,
                    group=call.group.ranks,
                    call=call.number,
                    exchanges=tuple(part.exchange for part in parts),
                    sends=tuple(part.send for part in parts),
                    receives=tuple(part.receive for part in parts),
                )
            )

    def describe_call(self, call: Call) -> str:
        """Say what a rank waits for."""
        group, shape = call.group, call.shape
        text = f"{group.stream.name} ({group.stream.op}, group {group.ranks}), call {call.number}"
        if shape.missing:
            return f"{text}; not prepared by {_ranks([group.ranks[member] for member in shape.missing])}"
        absent = [group.ranks[member] for member in shape.members if member not in call.parts]
        if absent:
            return f"{text}; not started by {_ranks(absent)}"
        return f"{text}; started by all, behind another call on its communicator"


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:16])) + (f" and {len(numbers) - 16} more" if len(numbers) > 16 else "")
    return f"rank{'s' if len(numbers) != 1 else ''} {shown}"
