"""What an exporter gives: files with their content, and what the planner's format has no room for. And its writer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from crosstraffic.errors import UsageError
from crosstraffic.results.store import write_atomic

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
PROVENANCE = "crosstraffic.json"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Export:
    """Files by relative path, ``/`` between folders.

    ``values`` says of each written value whether it was measured: columns file, key, value, source, kind, low, high
    (in the unit of value), for formats that have no column for it. ``remarks`` are for a person.
    """

    files: Mapping[str, bytes]
    remarks: tuple[str, ...] = ()
    values: tuple[Mapping[str, object], ...] = ()


def check_name(what: str, name: str) -> str:
    """Return a name that may be part of a path.

    >>> check_name("system", "h100_sxm-2.1")
    'h100_sxm-2.1'

    Raises:
        ValueError: other letters than A-Z a-z 0-9 _ . -, or dots only, or two of them in a row.
    """
    if not _NAME.fullmatch(name) or ".." in name or name == ".":
        raise ValueError(f"{what} may have letters, digits, _, . and - and no '..': {name!r}")
    return name


def write_export(folder: Path, files: Mapping[str, bytes], *, force: bool = False) -> list[Path]:
    """Write files into a new or empty folder, each in one step; return their paths.

    Raises:
        ValueError: a path that ``check_name`` refuses a part of.
        UsageError: the folder is a file, holds other things (``force`` writes into it all the same), or cannot be
            written.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"output must be a folder: {folder} is a file")
    if folder.exists() and not force and any(folder.iterdir()):
        raise UsageError(f"output folder is not empty: {folder}; choose another, or write into it with --force")
    paths = [folder.joinpath(*(check_name("path", part) for part in name.split("/"))) for name in files]
    try:
        for path, content in zip(paths, files.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}") from error
    return paths


def parquet(frame: pd.DataFrame) -> bytes:
    """Return a frame as parquet, without its index."""
    content: bytes = frame.to_parquet(None, index=False)
    return content
