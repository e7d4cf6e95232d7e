"""What each rank is doing, in a small mapped memory that another process reads: one writer, no message, no lock.

It is twelve 8-byte fields in the machine's byte order (``_LAYOUT``); writer and reader share a machine. Ranks that are
started here write ``RUN/ranks/rank-N.beat``; a rank that a launcher started shares memory with its guard. Saying which
call begins costs about 0.5 µs, looking whether to stop less.
"""

import math
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from crosstraffic.bench.processes import read_process

MAGIC = 0x43545242_00000001  # the last digits are the version of the layout
_LAYOUT = struct.Struct("=qqqqqqqdqqdq")
_PID_OFFSET = 8  # behind the magic number
_CALL_OFFSET = 4 * 8  # point, stream, call, time of the beat
_TIME_OFFSET = 7 * 8
_PROGRESS_OFFSET = 8 * 8  # points done, points in all, seconds left
_STATE_OFFSET = 3 * 8
_STOP_OFFSET = 11 * 8  # the only field that the reader writes
_NONE = -1  # in the file only: values that are read back are None
_pack_call = struct.Struct("=qqqd").pack_into
_pack_progress = struct.Struct("=qqd").pack_into
_pack_state = struct.Struct("=q").pack_into
_pack_time = struct.Struct("=d").pack_into
_unpack_flag = struct.Struct("=q").unpack_from


class State(IntEnum):
    """How far a rank has come."""

    STARTING = 0
    MEASURING = 1
    FINISHED = 2
    FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank said last. ``beat_s`` is a time of ``time.monotonic``; ``call`` counts within the point."""

    rank: int
    pid: int
    start_ticks: int
    state: State
    point: int | None
    stream: int | None
    call: int | None
    beat_s: float
    points_done: int
    points_total: int
    seconds_left: float | None


def ranks_folder(run_dir: Path) -> Path:
    """Return where the ranks of a run keep what they say about themselves while it runs."""
    return run_dir / "ranks"


class Heart:
    """The writer, one per rank; a context manager that leaves the state ``failed`` behind when an error passes."""

    def __init__(self, memory: mmap.mmap, *, stop: bool = False) -> None:
        """Write the first beat of this process into a mapped memory; ``stop``: it was asked to end already."""
        process = read_process(os.getpid())
        ticks = 0 if process is None else process.start_ticks
        first = (MAGIC, os.getpid(), ticks, State.STARTING, _NONE, _NONE, _NONE, time.monotonic(), 0, 0, math.nan, 0)
        packed = _LAYOUT.pack(*first)
        memory[_PID_OFFSET:_STOP_OFFSET] = packed[_PID_OFFSET:_STOP_OFFSET]  # a reader may ask to stop at any moment
        memory[:_PID_OFFSET] = packed[:_PID_OFFSET]  # the last: what lies there is a beat now
        if stop:
            ask_to_stop(memory)
        self._map = memory
        self.on_progress: Callable[[int, int, float], None] | None = None  # told too, where a person looks

    @classmethod
    def in_folder(cls, run_dir: Path, rank: int) -> Self:
        """Write into the run folder, where the watchdog of ranks that were started here looks."""
        folder = ranks_folder(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path, draft = folder / f"rank-{rank}.beat", folder / f"rank-{rank}.beat.new"
        draft.write_bytes(bytes(_LAYOUT.size))
        with draft.open("r+b") as file:
            heart = cls(mmap.mmap(file.fileno(), _LAYOUT.size))
        draft.replace(path)  # a reader never sees half a file
        if stop_requested(run_dir):  # asked before there was a beat to write it into
            ask_to_stop(heart._map)
        return heart

    def call(self, point: int, stream: int, call: int) -> None:
        """Say that a call is about to start."""
        _pack_call(self._map, _CALL_OFFSET, point, stream, call, time.monotonic())

    def progress(self, done: int, total: int, seconds_left: float | None = None) -> None:
        """Say how far the run has come, and that it is measuring."""
        left = math.nan if seconds_left is None else seconds_left
        _pack_progress(self._map, _PROGRESS_OFFSET, done, total, left)
        if self.on_progress is not None:
            self.on_progress(done, total, left)
        self.state(State.MEASURING)

    def state(self, state: State) -> None:
        """Say how far this rank has come: ``finished`` once its work is done, ``failed`` when its log says why."""
        _pack_state(self._map, _STATE_OFFSET, state)
        _pack_time(self._map, _TIME_OFFSET, time.monotonic())

    def should_stop(self) -> bool:
        """Tell whether the ranks were asked to end in order; rank 0 asks and tells the others: none leaves alone."""
        return bool(_unpack_flag(self._map, _STOP_OFFSET)[0])

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.state(State.FAILED)
        self.close()


def shared_memory() -> mmap.mmap:
    """Return memory for a heart that a process shares with the children that it forks."""
    return mmap.mmap(-1, _LAYOUT.size)


def ask_to_stop(memory: mmap.mmap) -> None:
    """Ask the rank that writes here to end in order."""
    _pack_state(memory, _STOP_OFFSET, 1)


def beat_in(memory: bytes | mmap.mmap, rank: int) -> Beat | None:
    """Return what a rank said last; None where it has not said anything yet.

    Raises:
        ValueError: what lies there is no heartbeat of this version.
    """
    magic, pid, ticks, state, point, stream, call, beat_s, done, total, left, _ = _LAYOUT.unpack(memory[: _LAYOUT.size])
    if magic == 0:
        return None
    if magic != MAGIC:
        raise ValueError("not a heartbeat of this version")
    return Beat(
        rank=rank,
        pid=pid,
        start_ticks=ticks,
        state=State.MEASURING if state == State.STARTING and point != _NONE else State(state),
        point=None if point == _NONE else point,
        stream=None if stream == _NONE else stream,
        call=None if call == _NONE else call,
        beat_s=beat_s,
        points_done=done,
        points_total=total,
        seconds_left=None if math.isnan(left) else left,
    )


def read_beats(run_dir: Path) -> list[Beat]:
    """Return what every rank said last, in order of rank; ranks that said nothing yet are absent."""
    beats = []
    for path in ranks_folder(run_dir).glob("rank-*.beat"):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            continue
        if len(data) != _LAYOUT.size:
            continue
        try:
            beat = beat_in(data, int(path.stem.removeprefix("rank-")))
        except ValueError as error:
            raise ValueError(f"{path} is {error}") from error
        if beat is None:  # a heart writes before its file has this name
            raise ValueError(f"{path} is not a heartbeat: it is empty")
        beats.append(beat)
    return sorted(beats, key=lambda beat: beat.rank)


def request_stop(run_dir: Path) -> None:
    """Ask the ranks to end in order: those that are there, and those that come later."""
    ranks_folder(run_dir).mkdir(parents=True, exist_ok=True)
    _stop_path(run_dir).touch()
    for path in ranks_folder(run_dir).glob("rank-*.beat"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), _LAYOUT.size) as memory:
            ask_to_stop(memory)


def stop_requested(run_dir: Path) -> bool:
    """Tell whether the ranks of a run were asked to end; a rank asks its heart, which is a hundred times faster."""
    return _stop_path(run_dir).exists()


def _stop_path(run_dir: Path) -> Path:
    return ranks_folder(run_dir) / "stop"
