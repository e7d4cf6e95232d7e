"""Slowdowns by pattern: how much the streams of one parallelism were slowed beside those of another one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from crosstraffic.patterns.workload import PHASES
from crosstraffic.results.store import Run
from crosstraffic.results.tables import pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdowns:
    """Slowdowns seen in steady pairs: median, least and largest, of how many."""

    median: float
    low: float
    high: float
    num_pairs: int


def pattern_slowdowns(run: Run) -> Mapping[tuple[str, str], Slowdowns]:
    """Return slowdowns by (pattern that was slowed, pattern beside it), of the good steady pairs of a run.

    A stream that was measured under another one's name counts for both patterns.
    """
    patterns: dict[str, set[str]] = {stream.name: {stream.pattern} for stream in run.streams}
    for alias, name in run.info.aliases.items():
        if name in patterns:
            phase, _, rest = alias.partition(".")
            patterns[name].add((rest if phase in PHASES else alias).partition(".")[0])
    seen: dict[tuple[str, str], list[float]] = {}
    for slowed, beside, slowdown in _pairs(run):
        for first in patterns.get(slowed, ()):
            for second in patterns.get(beside, ()):
                seen.setdefault((first, second), []).append(slowdown)
    return {
        key: Slowdowns(median=float(np.median(values)), low=min(values), high=max(values), num_pairs=len(values))
        for key, values in sorted(seen.items())
    }


def _pairs(run: Run) -> Iterator[tuple[str, str, float]]:
    found = pairs(run, "steady").dropna(subset=["slowdown"])
    for row in found.to_dict("records"):
        yield str(row["stream"]), str(row["other"]), float(row["slowdown"])
