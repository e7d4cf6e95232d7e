"""Latency and bandwidth fitted to measured cells, for planners that take these two numbers instead of a table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from crosstraffic.costmodel.export.known import choose

Floats = npt.NDArray[np.float64]

# Dependent steps, and bytes that each rank sends as a multiple of the payload, of a ring (pairwise for all_to_all) of
# n ranks. Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
RING: Mapping[str, tuple[Callable[[Floats], Floats], Callable[[Floats], Floats]]] = {
    "all_reduce": (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda n: n - 1, lambda n: (n - 1) / n),
    "reduce_scatter": (lambda n: n - 1, lambda n: (n - 1) / n),
    "all_to_all": (lambda n: n - 1, lambda n: (n - 1) / n),
    "send_recv": (np.ones_like, np.ones_like),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """t = constant + steps x ``latency_s`` + bytes sent / ``bytes_per_s``, and how well it holds where measured."""

    latency_s: float
    bytes_per_s: float
    median_ape: float
    p90_ape: float
    num_cells: int
    ops: tuple[str, ...]
    min_bytes: int
    max_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.latency_s * 1e6:.3g} us a step and {self.bytes_per_s / 1e9:.4g} GB/s miss {self.num_cells} "
            f"measured cells of {', '.join(self.ops)} by {self.median_ape:.1%} (median), {self.p90_ape:.1%} (P90)"
        )


def ring_shape(cells: pd.DataFrame) -> tuple[Floats, Floats]:
    """Return the dependent steps and the bytes that one rank sends, of cells whose ops are all in ``RING``."""
    steps, sent = np.zeros(len(cells)), np.zeros(len(cells))
    for op, (count, share) in RING.items():
        rows = (cells["op"] == op).to_numpy()
        num_ranks = cells.loc[rows, "num_ranks"].to_numpy(float)
        steps[rows] = count(num_ranks)
        sent[rows] = share(num_ranks) * cells.loc[rows, "payload_bytes"].to_numpy(float)
    return steps, sent


def fit_line(cells: pd.DataFrame, *, constant_s: float = 0.0) -> Line:
    """Fit a line by least squares of relative errors, neither number negative; all ops are in ``RING``.

    ``constant_s`` is what the planner itself adds to each call.

    Raises:
        ValueError: fewer than two sizes, or times that do not grow with the size.

    >>> sizes = [1024, 2**20, 2**24]
    >>> cells = pd.DataFrame({"op": "send_recv", "num_ranks": 2, "payload_bytes": sizes,
    ...                       "time_s": [1e-5 + size / 1e9 for size in sizes]})
    >>> line = fit_line(cells)
    >>> round(line.latency_s, 9), round(line.bytes_per_s), round(line.p90_ape, 9)
    (1e-05, 1000000000, 0.0)
    """
    what = " and ".join(sorted(cells["op"].unique())) or "no op"
    if cells["payload_bytes"].nunique() < 2:
        raise ValueError(f"latency and bandwidth need {what} measured at two sizes at least")
    steps, sent = ring_shape(cells)
    time_s = cells["time_s"].to_numpy(float)
    matrix = np.column_stack([steps, sent / 1e9]) / time_s[:, None]
    (latency_s, s_per_gb), _ = nnls(matrix, 1 - constant_s / time_s)
    if s_per_gb <= 0:
        raise ValueError(f"times of {what} do not grow with the size: measure larger ones")
    return _judged(cells, steps, float(latency_s), float(1e9 / s_per_gb), constant_s)


def fit_constant_latency(cells: pd.DataFrame) -> Line:
    """Fit a line whose latency does not grow with the group, for a planner that has one for all.

    The bandwidth is that of ``fit_line``, as this latency would pull it off; the latency is then the one of the least
    absolute relative errors.

    Raises:
        ValueError: as ``fit_line``.
    """
    bytes_per_s = fit_line(cells).bytes_per_s
    _, sent = ring_shape(cells)
    time_s = cells["time_s"].to_numpy(float)
    left_s = np.maximum(time_s - sent / bytes_per_s, 0.0)
    order = np.argsort(left_s)
    weight = np.cumsum(1 / time_s[order])
    latency_s = float(left_s[order][np.searchsorted(weight, weight[-1] / 2)])
    return _judged(cells, np.ones(len(cells)), latency_s, bytes_per_s, 0.0)


def _judged(cells: pd.DataFrame, steps: Floats, latency_s: float, bytes_per_s: float, constant_s: float) -> Line:
    _, sent = ring_shape(cells)
    errors = np.abs((constant_s + steps * latency_s + sent / bytes_per_s) / cells["time_s"].to_numpy(float) - 1)
    return Line(
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        median_ape=float(np.median(errors)),
        p90_ape=float(np.quantile(errors, 0.9)),
        num_cells=len(cells),
        ops=tuple(sorted(cells["op"].unique())),
        min_bytes=int(cells["payload_bytes"].min()),
        max_bytes=int(cells["payload_bytes"].max()),
    )


def peak_bus_bytes_per_s(cells: pd.DataFrame) -> float:
    """Return the largest bus bandwidth (bytes that one rank sends / time) among cells.

    Raises:
        ValueError: no cells.
    """
    if cells.empty:
        raise ValueError("no cells to take a bandwidth from")
    _, sent = ring_shape(cells)
    return float((sent / cells["time_s"].to_numpy(float)).max())


def of_kernel(cells: pd.DataFrame, kernel: str) -> pd.DataFrame:
    """Return the cells of a kernel, and the send_recv of any other where it has none itself."""
    own = cells["kernel"] == kernel
    sends = cells["op"] == "send_recv"
    kept: pd.DataFrame = cells[own | sends] if not (own & sends).any() else cells[own]
    return kept


def tier_cells(cells: pd.DataFrame, kernel: str, *, across: bool) -> pd.DataFrame:
    """Return the cells that tell about links within a node, or between nodes: one curve for each op and group.

    Between nodes those with one rank on each node are taken where there are any: only they meet no other link.
    """
    mine = of_kernel(cells[cells["op"].isin(RING)], kernel)
    kept, _ = choose(mine, ("op", "num_ranks", "num_nodes", "ranks_per_node"))
    if not across:
        inside: pd.DataFrame = kept[(kept["num_nodes"] == 1) & (kept["placement"] == "consecutive")]
        return inside
    between: pd.DataFrame = kept[kept["num_nodes"] > 1]
    alone: pd.DataFrame = between[between["ranks_per_node"] == 1]
    return between[between["placement"] == "consecutive"] if alone.empty else alone
