"""The parts a report page is made of, as values; the template only lays them out."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from markupsafe import Markup
from matplotlib.figure import Figure

from crosstraffic.results.figures import to_svg
from crosstraffic.units import format_bytes, format_rate, format_seconds

ABSENT = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table; numbers stand at the right."""

    title: str
    is_number: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table as text, ready to be escaped and shown."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    is_open: bool = False
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure with what a reader who cannot see it needs, and its table."""

    svg: Markup
    alt: str
    title: str | None = None
    caption: str | None = None
    table: PageTable | None = None
    size: str = "medium"  # small, medium or large: how many stand side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the page; ``missing`` says why there is nothing to show."""

    key: str
    title: str
    intro: str = ""
    legend: tuple[tuple[str, str, str], ...] = ()  # (kind of mark, colour, text)
    pictures: tuple[Picture, ...] = ()
    tables: tuple[PageTable, ...] = ()
    missing: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One headline number. ``tone`` is plain, good or bad."""

    label: str
    value: str
    note: str
    tone: str = "plain"


def picture(figure: Figure, **fields: Any) -> Picture:
    """Turn a figure into a picture of the page."""
    prefix = f"f{hashlib.sha256(fields['alt'].encode()).hexdigest()[:8]}-"
    return Picture(svg=Markup(to_svg(figure, prefix)), **fields)  # noqa: S704 - matplotlib escapes the text it draws


def cell(name: str, value: Any) -> str:
    """Write one value by the unit that its name ends on; a dash where it is absent.

    >>> cell("time_median_s", 2e-6), cell("payload_bytes", 4096), cell("slowdown", 1.234), cell("why", None)
    ('2 µs', '4 KiB', '1.23', '–')
    >>> cell("busbw_bytes_per_s", 2e9), cell("mix", ("a", "b")), cell("num_samples", 12), cell("median_ape", 0.051)
    ('2 GB/s', 'a + b', '12', '5.1 %')
    """
    if isinstance(value, (tuple, list)):
        return " + ".join(str(part) for part in value) or ABSENT
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={part}" for key, part in value.items()) or ABSENT
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return ABSENT
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if name.endswith("_bytes_per_s"):
            return format_rate(float(value))
        if name.endswith("_bytes"):
            return format_bytes(float(value))
        if name.endswith("_s"):
            return format_seconds(float(value))
        if name.endswith(("_fraction", "_share", "_ape", "_90")):
            return f"{100 * float(value):.3g} %"
        if name.endswith("slowdown"):
            return f"{float(value):.2f}"
        if isinstance(value, float):
            return f"{value:.3g}"
    return str(value)


def frame_table(frame: pd.DataFrame, title: str, names: Mapping[str, str] | None = None, **fields: Any) -> PageTable:
    """Turn a frame into a table; ``names`` picks its columns and gives their titles."""
    shown = dict(names) if names is not None else {str(name): str(name) for name in frame.columns}
    rows = tuple(tuple(cell(name, row[name]) for name in shown) for row in frame.to_dict("records"))
    numeric = ("_s", "_bytes", "_fraction", "_share", "_ape", "_90", "slowdown", "repeat", "rank")
    columns = tuple(
        Column(title=text, is_number=name.startswith("num_") or name.endswith(numeric)) for name, text in shown.items()
    )
    return PageTable(title=title, columns=columns, rows=rows, **fields)


def text_table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]], **fields: Any) -> PageTable:
    """Make a table of texts."""
    columns = tuple(Column(title=name, is_number=False) for name in head)
    return PageTable(title=title, columns=columns, rows=tuple(tuple(str(v) for v in row) for row in rows), **fields)
