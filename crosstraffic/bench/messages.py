"""What guards tell each other, and how it is checked: a message comes from the network, so it may hold anything."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstraffic.bench.failures import End
from crosstraffic.bench.heartbeat import Beat, State

MAX_LINES, MAX_LETTERS = 12, 2000  # of what a rank printed last


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """How a guard names itself. ``key`` tells its launch from others, ``facts`` are versions that must agree."""

    key: str
    rank: int
    world_size: int
    host: str
    pid: int
    facts: Mapping[str, str]


def hello_to_dict(hello: Hello) -> dict[str, Any]:
    """Return the message of a hello."""
    return {name: getattr(hello, name) for name in ("key", "rank", "world_size", "host", "pid", "facts")}


def read_hello(message: Mapping[str, Any]) -> Hello:
    """Read a hello.

    Raises:
        ValueError: it is none.
    """
    facts = message.get("facts")
    if not isinstance(facts, dict):
        raise ValueError(f"facts must be an object: {facts!r}")
    return Hello(
        key=_text(message.get("key")),
        rank=_count(message.get("rank")),
        world_size=_count(message.get("world_size")),
        host=_text(message.get("host")),
        pid=_count(message.get("pid")),
        facts={_text(name): _text(value) for name, value in facts.items()},
    )


def beat_message(beat: Beat, process_state: str, now_s: float) -> dict[str, Any]:
    """Return the message of a beat; ``now_s`` is the time at which it is sent: clocks of nodes differ, ages do not."""
    age_s = round(now_s - beat.beat_s, 6)
    return {"beat": [beat.pid, int(beat.state), beat.point, beat.stream, beat.call, age_s, process_state]}


def read_beat(rank: int, words: object, now_s: float) -> tuple[Beat, str]:
    """Return a beat in the time of the reader, and the letter of ps of its process ("" where it is gone).

    Raises:
        ValueError: it is none.
    """
    if not isinstance(words, list) or len(words) != 7:
        raise ValueError(f"a beat has 7 fields: {words!r}")
    pid, state, point, stream, call, age_s, process_state = words
    if isinstance(age_s, bool) or not isinstance(age_s, int | float) or not math.isfinite(age_s):
        raise ValueError(f"an age is a finite number of seconds: {age_s!r}")
    beat = Beat(
        rank=rank,
        pid=_count(pid),
        start_ticks=0,
        state=State(_count(state)),
        point=None if point is None else _count(point),
        stream=None if stream is None else _count(stream),
        call=None if call is None else _count(call),
        beat_s=now_s - age_s,
        points_done=0,
        points_total=0,
        seconds_left=None,
    )
    return beat, _text(process_state)[:1]


def read_end(words: object, at_ns: int) -> End:
    """Return how a process ended: ``[exit code, name of the signal]``, one of them or both null.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(words, list) or len(words) != 2:
        raise ValueError(f"an end has 2 fields: {words!r}")
    code, signal = words
    return End(
        exit_code=None if code is None else _count(code),
        signal=None if signal is None else _text(signal),
        at_ns=at_ns,
    )


def read_lines(words: object) -> tuple[str, ...]:
    """Return what a rank printed last, cut to what a person reads.

    Raises:
        ValueError: no list of texts.
    """
    if not isinstance(words, list):
        raise ValueError(f"lines must be a list: {words!r}")
    return tuple(_text(line)[:MAX_LETTERS] for line in words[-MAX_LINES:])


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"must be a whole number, not negative: {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text: {value!r}")
    return value
