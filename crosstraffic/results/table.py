"""Table: measured cells without samples, one row a cell, whoever measured them; what importers give and models take.

A *curve* is everything that defines a cell but its size; a *cell* is a curve and a size. Columns: ``COLUMNS``.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

Statistic = Literal["median", "mean", "minimum", "unknown"]

CURVE: dict[str, Any] = {
    "op": "",  # all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send_recv, kv_transfer, ep_dispatch ...
    "kernel": "",  # what does it: nccl, mpi, gloo, vllm_custom_all_reduce, deepep_ll, ...
    "dtype": "",
    "num_ranks": 0,  # of the group
    "num_nodes": 1,  # that the group lies on
    "ranks_per_node": 0,  # of the group, on one node
    "placement": "consecutive",  # or strided: neighbours of the group are not neighbours on the node
    "num_groups": 1,  # like groups that call at the same time
    "issue": "",  # eager or graph; empty where there is no such thing
    "cadence": "",  # isolated, streaming; empty where the source does not say
    "parameters": "",  # what else defines it, as "hidden=7168,top_k=8", sorted by name
}
CELL = (*CURVE, "payload_bytes")
COLUMNS = (*CELL, "time_s", "low_s", "high_s", "repeat")  # low and high: 95 % interval of the time, NaN if not known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Cells of one system.

    ``frame`` has ``COLUMNS``; ``payload_bytes`` follows nccl-tests' convention of each op, and is what one rank sends
    in total for ``ep_dispatch`` and ``ep_combine``. ``unread`` counts the rows that could not be read, by reason.
    """

    system: str
    library: str  # with its version, as the source says it
    source: str  # path
    kind: str  # the format it came in
    statistic: Statistic
    frame: pd.DataFrame
    unread: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def make_frame(**columns: Any) -> pd.DataFrame:
    """Make a frame with all ``COLUMNS`` from those that are known; the others take their default.

    >>> make_frame(op=["all_reduce"], num_ranks=[8], payload_bytes=[1024], time_s=[1e-5])["ranks_per_node"].tolist()
    [8]

    Raises:
        ValueError: an unknown column, or a needed one (op, num_ranks, payload_bytes, time_s) is missing.
    """
    unknown = sorted(set(columns) - set(COLUMNS))
    missing = [name for name in ("op", "num_ranks", "payload_bytes", "time_s") if name not in columns]
    if unknown or missing:
        raise ValueError(f"columns of a table: unknown {unknown}, missing {missing}; there are {', '.join(COLUMNS)}")
    frame = pd.DataFrame(columns)
    for name, default in CURVE.items():
        if name not in frame:
            frame[name] = default
    unset = frame["ranks_per_node"] == 0
    frame.loc[unset, "ranks_per_node"] = frame.loc[unset, "num_ranks"] // frame.loc[unset, "num_nodes"]
    for name in ("low_s", "high_s"):
        if name not in frame:
            frame[name] = np.nan
    if "repeat" not in frame:
        frame["repeat"] = frame.groupby(list(CELL), sort=False).cumcount()
    whole = ("num_ranks", "num_nodes", "ranks_per_node", "num_groups", "payload_bytes", "repeat")
    return frame.astype(dict.fromkeys(whole, "int64") | {"time_s": "float64"})[list(COLUMNS)]


def bad_rows(frame: pd.DataFrame) -> dict[str, int]:
    """Count the rows that no model may be fitted to, by reason; none is changed or dropped.

    >>> bad_rows(make_frame(op=["x"] * 2, num_ranks=[2, 2], payload_bytes=[8, 8], time_s=[-1.0, 1.0]))
    {'time is not positive': 1}
    """
    checks = {
        "time is not positive": ~(frame["time_s"] > 0) & frame["time_s"].notna(),
        "time is missing": frame["time_s"].isna(),
        "time is not finite": np.isinf(frame["time_s"]),
        "size is negative": frame["payload_bytes"] < 0,
        "group of fewer than one rank": frame["num_ranks"] < 1,
        "more nodes than ranks": frame["num_nodes"] > frame["num_ranks"],
    }
    return {why: int(rows.sum()) for why, rows in checks.items() if rows.any()}


def name_of(path: Path) -> str:
    """Name a table by where it lies: the last three parts of its path without the suffix."""
    return "/".join(path.with_suffix("").parts[-3:])
