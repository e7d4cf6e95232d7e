"""What suite links found, for a terminal and as JSON types."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstraffic.results.links import Floats, Links
from crosstraffic.results.links_verdict import Verdict
from crosstraffic.units import format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

ABSENT = "–"
MAX_MATRIX = 16  # end points up to which a matrix is shown whole


def verdict_lines(links: Links, found: Verdict) -> list[str]:
    """Return the verdict in words, what is wrong first."""
    words = {
        "healthy": "links are healthy",
        "slow": "links are not healthy",
        "incomplete": "links were not all measured",
    }
    lines = [f"{words[found.verdict]}: {links.num_end_points} end points"]
    if found.reference_bytes_per_s is not None:
        lines[0] += f", reference {format_rate(found.reference_bytes_per_s)}"
    if found.reference_latency_s is not None:
        lines[0] += f", {format_seconds(found.reference_latency_s)}"
    lines += [f"- {finding.text}" for finding in found.findings]
    return lines + ([f"note: {found.note}"] if found.note else [])


def links_tables(links: Links, found: Verdict) -> "Iterator[Table]":
    """Yield the tables of a terminal: matrices of up to 16 end points, else one row for each end point named."""
    if links.num_end_points <= MAX_MATRIX:
        yield _matrix("bandwidth, row to column", links.names, links.rate.best, format_rate)
        clock = "8 bytes, row to column" if links.clock == "synchronised" else "8 bytes, by the receiver's own clock"
        yield _matrix(f"latency, {clock}", links.names, links.best_latency_s, format_seconds)
    yield _per_end_point(links, found)


def _matrix(title: str, names: tuple[str, ...], values: Floats, written: Callable[[float], str]) -> "Table":
    from rich.text import Text

    table = _table(title)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for place, row in enumerate(values):
        cells = ["" if place == other else _cell(value, written) for other, value in enumerate(row)]
        table.add_row(Text(names[place]), *map(Text, cells))
    return table


def _per_end_point(links: Links, found: Verdict) -> "Table":
    from rich.text import Text

    named = {name for finding in found.findings for name in finding.nodes}
    is_short = links.num_end_points > MAX_MATRIX
    table = _table("end points named above" if is_short else "each end point")
    table.add_column("", no_wrap=True)
    for title in (
        "sends at best",
        "gets at best",
        f"gets from {links.num_peers} at once",
        f"sends to {links.num_peers} at once",
    ):
        table.add_column(title, justify="right")
    for place, name in enumerate(links.names):
        if is_short and name not in named:
            continue
        ways = _most(links.rate.best[place]), _most(links.rate.best[:, place])
        fans = links.incast.best[place], links.outcast.best[place]
        table.add_row(Text(name), *(Text(_cell(value, format_rate)) for value in (*ways, *fans)))
    return table


def _table(title: str) -> "Table":
    from rich.box import SIMPLE
    from rich.table import Table

    return Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))


def _most(values: Floats) -> float:
    measured = values[~np.isnan(values)]
    return float(measured.max()) if len(measured) else np.nan


def _cell(value: float, written: Callable[[float], str]) -> str:
    return ABSENT if np.isnan(value) else written(float(value))


def _number(value: float | None) -> float | None:
    return None if value is None or np.isnan(value) else float(value)


def links_data(links: Links, found: Verdict) -> dict[str, Any]:
    """Return links and verdict as JSON types; what was not measured is null."""

    def rows(matrix: Floats) -> list[list[float | None]]:
        return [[_number(value) for value in row] for row in matrix]

    return {
        "nodes": list(links.names),
        "bytes_per_s": rows(links.rate.best),
        "duplex_bytes_per_s": rows(links.duplex.best),
        "latency_s": rows(links.best_latency_s),
        "latency_clock": links.clock,
        "clock_error_s": links.clock_error_s,
        "incast_bytes_per_s": [_number(value) for value in links.incast.best],
        "outcast_bytes_per_s": [_number(value) for value in links.outcast.best],
        "num_peers": links.num_peers,
        "reference_bytes_per_s": found.reference_bytes_per_s,
        "reference_latency_s": found.reference_latency_s,
        "verdict": found.verdict,
        "note": found.note,
        "findings": [
            {
                "kind": finding.kind,
                "nodes": list(finding.nodes),
                "bytes_per_s": _number(finding.bytes_per_s),
                "reference_bytes_per_s": _number(finding.reference_bytes_per_s),
                "text": finding.text,
            }
            for finding in found.findings
        ],
    }
