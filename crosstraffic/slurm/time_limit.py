"""Time limits as Slurm writes them, and how long before one a run is told to end."""

import operator
import re

LEAST_WARNING_S, MOST_WARNING_S = 15, 120
EARLY_S = 60  # Slurm may send the signal this much earlier than asked
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d{1,2}){0,2})", re.ASCII)


def parse_time(text: str) -> int | None:
    """Return the seconds of a time limit; None where it says that there is none (0).

    >>> [parse_time(text) for text in ("30", "90:00", "1:30:00", "2-12", "2-12:30", "2-12:00:00", "0")]
    [1800, 5400, 5400, 216000, 217800, 216000, None]

    Raises:
        ValueError: not such a time.

    Source: Slurm, sbatch(1) --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes, days-hours:minutes:seconds.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"not a time as Slurm writes it, 30, 1:30:00 or 2-12:00:00: {text!r}")
    parts = [int(part) for part in match["rest"].split(":")]
    if match["days"] is None:
        parts = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    units_s = (3600, 60, 1)
    return int(match["days"] or 0) * 86400 + sum(map(operator.mul, parts, units_s)) or None


def warning_s(time: str | None) -> int:
    """Return how many seconds before its time limit a job's ranks get SIGTERM: a fifth of it, from 15 to 120.

    >>> [warning_s(time) for time in ("1", "5", "1:00:00", None)]
    [15, 60, 120, 120]
    """
    limit_s = None if time is None else parse_time(time)
    return MOST_WARNING_S if limit_s is None else min(max(limit_s // 5, LEAST_WARNING_S), MOST_WARNING_S)
