"""The run folder: run.json, records.jsonl (append-only), samples/ (raw). Writing on one rank, reading anywhere."""

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import ValidationError

from crosstraffic.errors import EnvironmentRefused, UsageError
from crosstraffic.patterns.step import Step, step_from_dict
from crosstraffic.patterns.stream import Stream, stream_from_dict
from crosstraffic.results.record import Place, Record
from crosstraffic.results.run_info import RunInfo

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_WITHOUT_NUMBERS = ("timeout", "oom", "skipped")
_KEY = ("point", "kind", "stream", "repeat", "payload_bytes", "cadence", "mode", "baseline_of")


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees the old one or the new one."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with _replacing(scratch, path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _replacing(scratch: Path, path: Path) -> Iterator[BufferedWriter]:
    """Write a scratch file that then takes the place of ``path``; on a full disk it leaves nothing behind."""
    try:
        with scratch.open("wb") as file:
            yield file
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


OF_A_JOB = ("job.json", "job.sh", "slurm-*.out")  # what a Slurm job lays into its run folder before the run


def is_empty(folder: Path) -> bool:
    """Tell whether a folder holds nothing but what a Slurm job laid there."""
    return all(any(map(path.match, OF_A_JOB)) for path in folder.iterdir())


def _lock(descriptor: int) -> bool:
    """Lock a file for one writer, until it is closed or its process ends; False where the file system has no locks.

    Raises:
        OSError: somebody else holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def _writer(folder: Path) -> str:
    try:
        first = next(place for place in read_run_info(folder).placement if place.rank == 0)
    except (UsageError, StopIteration):
        return ""
    return f": its rank 0 is process {first.pid} on {first.host}"


class RunFolder:
    """A run folder open for writing; use it as a context manager. One writer: rank 0.

    ``is_locked`` tells whether a second writer is kept out; a file system without locks cannot.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self.run_id = run_id
        records = path / "records.jsonl"
        self._records = records.open("ab", buffering=0)
        try:
            self.is_locked = _lock(self._records.fileno())
        except OSError:
            self._records.close()
            raise EnvironmentRefused(f"run folder {path} is being written by another run{_writer(path)}") from None
        torn = records.stat().st_size > 0 and records.read_bytes()[-1:] != b"\n"
        if torn:  # the line of a run that was killed stays a line of its own
            self._records.write(b"\n")

    @classmethod
    def create(cls, path: Path | str, run_id: str) -> Self:
        """Make the folder, or take up the one of this very run.

        Raises:
            UsageError: the path is a file, holds other things, or belongs to another run.
            EnvironmentRefused: another run writes into it.
        """
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"output must be a folder: {folder} is a file")
        if folder.exists() and not is_empty(folder):
            if not (folder / "run.json").is_file():
                raise UsageError(f"output folder is not empty and holds no run: {folder}; choose another")
            found = read_run_info(folder).run_id
            if found != run_id:
                raise UsageError(f"output folder {folder} belongs to run {found}, not {run_id}; choose another")
        try:
            (folder / "samples").mkdir(parents=True, exist_ok=True)
            return cls(folder, run_id)
        except OSError as error:
            raise UsageError(f"cannot write output folder {folder}: {error.strerror or error}") from error

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open an existing run folder to add to it (resume).

        Raises:
            UsageError: no run folder there.
        """
        info = read_run_info(path)
        return cls.create(path, info.run_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close records.jsonl; what was appended is already in the file."""
        self._records.close()

    def write_run(self, run: Mapping[str, Any] | RunInfo) -> RunInfo:
        """Check and write run.json in one step: a reader sees the old one or the new one.

        Raises:
            ValueError: not a valid run, or of another run id.
        """
        info = run if isinstance(run, RunInfo) else RunInfo.model_validate(dict(run))
        if info.run_id != self.run_id:
            raise ValueError(f"run_id must be that of the folder: {info.run_id}, folder {self.run_id}")
        write_atomic(self.path / "run.json", (info.model_dump_json(indent=2) + "\n").encode())
        return info

    def append(self, record: Record) -> None:
        """Add one record: one line, one write call."""
        line = (record.model_dump_json() + "\n").encode()
        written = self._records.write(line)
        if written != len(line):
            raise OSError(f"{self.path / 'records.jsonl'}: wrote {written} of {len(line)} bytes")

    def write_samples(self, name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> str:
        """Write raw samples to samples/NAME.npz; return that path, relative to the folder."""
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"a samples name is letters, digits, '.', '_' and '-': {name!r}")
        target = self.path / "samples" / f"{name}.npz"
        scratch = target.with_name(f".{name}.{os.getpid()}.npz")
        with _replacing(scratch, target) as file:
            np.savez(file, allow_pickle=False, **arrays)
        return f"samples/{name}.npz"

    def write_text(self, name: str, text: str) -> Path:
        """Write a text file (report.html, model.json) into the folder in one step; return its path."""
        if not _SAFE_NAME.fullmatch(name):
            raise ValueError(f"a file name is letters, digits, '.', '_' and '-': {name!r}")
        write_atomic(self.path / name, text.encode())
        return self.path / name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run folder as read: ``run`` is run.json as JSON types, ``info`` the same as a checked value."""

    path: Path
    run: Mapping[str, Any]
    info: RunInfo
    streams: tuple[Stream, ...]
    steps: tuple[Step, ...]
    placement: tuple[Place, ...]
    frame: pd.DataFrame

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node of each rank, in rank order."""
        return tuple(place.node for place in sorted(self.placement, key=lambda place: place.rank))

    def stream(self, name: str) -> Stream:
        """Return a stream by name.

        Raises:
            ValueError: no such stream in this run.
        """
        for stream in self.streams:
            if stream.name == name:
                return stream
        raise ValueError(f"no stream {name!r} in this run; it has: {', '.join(s.name for s in self.streams)}")


def read_run_info(folder: Path | str) -> RunInfo:
    """Read and check run.json.

    Raises:
        UsageError: not there, not JSON, or not a run of this schema version.
    """
    path = Path(folder) / "run.json"
    try:
        return RunInfo.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"not a run folder (no run.json): {folder}") from None
    except ValidationError as error:
        raise UsageError(f"{path} is not a run of schema version 1: {_first_error(error)}") from error


def read_records(folder: Path | str) -> tuple[list[Record], int]:
    """Return the records and how many lines were torn (cut off by a kill) and left out.

    Left out too: a record without numbers (timeout, oom, skipped) whose point was measured later; one of an attempt
    that other processes disturbed, where a later attempt took its place; one that is not ok (wrong data, say), where
    the run was resumed and the point measured again. Within one attempt wrong data is never hidden.

    Raises:
        UsageError: a whole line is JSON but not a record.
    """
    path = Path(folder) / "records.jsonl"
    if not path.exists():
        return [], 0
    records: dict[tuple[Any, ...], Record] = {}
    lines: dict[tuple[Any, ...], int] = {}
    resumed_at = _resumed_at(folder)
    num_torn = 0
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            num_torn += 1
            continue
        try:
            record = Record.model_validate(data)
        except ValidationError as error:
            raise UsageError(f"{path}, line {number}: not a record: {_first_error(error)}") from error
        key = tuple(getattr(record, name) for name in _KEY)
        earlier = records.get(key)
        again = earlier is not None and record.num_disturbed > earlier.num_disturbed
        resumed = earlier is not None and any(lines[key] <= at < number for at in resumed_at)
        failed = earlier is not None and (earlier.status in _WITHOUT_NUMBERS or (resumed and earlier.status != "ok"))
        if again or failed:
            del records[key]
        elif earlier is not None:
            key = (*key, number)
        records[key], lines[key] = record, number
    return list(records.values()), num_torn


def num_lines(folder: Path | str) -> int:
    """Return how many lines records.jsonl has, a torn last one counted."""
    path = Path(folder) / "records.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def _resumed_at(folder: Path | str) -> tuple[int, ...]:
    """Return after which lines of records.jsonl the run was resumed; none where there is no run.json to tell."""
    return read_run_info(folder).resumed_at if (Path(folder) / "run.json").is_file() else ()


def load(folder: Path | str) -> pd.DataFrame:
    """Return one row a record, columns named as in records.jsonl; ``mix`` is a tuple of names.

    ``frame.attrs`` holds ``run_id`` and ``num_torn_lines``.

    Raises:
        UsageError: not a run folder, or a file in it is not what it should be.
    """
    info = read_run_info(folder)
    return _frame(folder, info)


def _frame(folder: Path | str, info: RunInfo) -> pd.DataFrame:
    records, num_torn = read_records(folder)
    columns = list(Record.model_fields)
    frame = pd.DataFrame([record.model_dump() for record in records], columns=columns)
    for name, field in Record.model_fields.items():
        if field.annotation in (float, float | None):
            frame[name] = frame[name].astype("float64")
        elif field.annotation in (int, int | None):
            frame[name] = frame[name].astype("Int64")
    frame.attrs = {"run_id": info.run_id, "num_torn_lines": num_torn}
    return frame


def load_run(folder: Path | str) -> Run:
    """Read a whole run folder, except its raw samples.

    Raises:
        UsageError: not a run folder, or a file in it is not what it should be.
    """
    info = read_run_info(folder)
    try:
        streams = tuple(stream_from_dict(data) for data in info.streams)
        steps = tuple(step_from_dict(data) for data in info.steps)
    except ValueError as error:
        raise UsageError(f"{Path(folder) / 'run.json'}: {error}") from error
    known = {stream.name for stream in streams}
    lost = {name for step in steps for name in step.streams if info.aliases.get(name, name) not in known}
    if lost:
        raise UsageError(
            f"{Path(folder) / 'run.json'}: steps name streams that are not there: {', '.join(sorted(lost))}"
        )
    frame = _frame(folder, info)
    of_streams = frame[frame["kind"].isin(["alone", "together"]) & (frame["stream"] != "*")]
    strangers = {name for name in of_streams["stream"] if info.aliases.get(name, name) not in known}
    if strangers:
        raise UsageError(
            f"{Path(folder) / 'records.jsonl'}: records of streams that run.json does not know: "
            f"{', '.join(sorted(strangers))}"
        )
    return Run(
        path=Path(folder),
        run=info.model_dump(mode="json"),
        info=info,
        streams=streams,
        steps=steps,
        placement=info.placement,
        frame=frame,
    )


def load_samples(folder: Path | str, record: Record | Mapping[str, Any] | pd.Series) -> dict[str, npt.NDArray[Any]]:
    """Return the raw arrays of a record (or of its row in the frame) by name.

    Raises:
        UsageError: the record has no samples, or they are not in the folder.
    """
    name = record.samples if isinstance(record, Record) else record["samples"]
    if not isinstance(name, str):
        raise UsageError("this record keeps no raw samples")
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise UsageError(f"samples lie outside the run folder: {name}")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read samples {path}: {error}") from error
