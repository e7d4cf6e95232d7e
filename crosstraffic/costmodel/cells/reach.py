"""How a cell is reached from measured curves: at a size, beyond the sizes, from other groups, from other layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crosstraffic.costmodel.cells.curves import CellCurve, Key, describe
from crosstraffic.costmodel.cells.experts import Floats, between, log_time, traffic_factor, trend
from crosstraffic.results.table import CURVE

PLACE = {name: index for index, name in enumerate(CURVE)}
OP, RANKS, NODES, PER_NODE = (PLACE[name] for name in ("op", "num_ranks", "num_nodes", "ranks_per_node"))
SPARSE_OCTAVES = 2.5  # a gap from which on a curve with more sizes tells what lies in it
PCIE_BYTES_PER_S = 64e9  # 16 lanes of PCIe 5.0, one direction; Source: PCI Express Base Specification 5.0
SHARED = 2  # sizes that two curves must have in common before one is scaled to the other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reached:
    """Log times, what had to be extrapolated, and how far from what is known, in octaves."""

    log_time: Floats
    kind: str  # size (and beyond: range), group, layout
    beyond: Floats  # octaves outside the sizes of the curve
    gap: Floats  # octaves between the neighbouring sizes
    apart: float  # octaves between this group or layout and the nearest measured one
    copied: bool = False  # from one group only, without a trend
    may_cross: bool = False  # more ranks than measured, on a node whose links are no faster than PCIe


class Curves:
    """Curves by key, with their arrays and families; made once for many predictions."""

    def __init__(self, curves: Sequence[CellCurve]) -> None:
        self.arrays: dict[Key, tuple[Floats, Floats]] = {
            curve.key: (np.array(curve.payload_bytes, dtype=np.float64), np.array(curve.time_s)) for curve in curves
        }
        self._index()

    def _index(self) -> None:
        self.families: dict[Key, list[Key]] = {}
        for key in self.arrays:
            self.families.setdefault(family_of(key), []).append(key)

    @classmethod
    def of(cls, arrays: Mapping[Key, tuple[Floats, Floats]]) -> "Curves":
        """Make curves of sizes and times by key; for hold-outs."""
        made = cls(())
        made.arrays.update(arrays)
        made._index()
        return made


def family_of(key: Key) -> Key:
    """Return what curves of other groups and layouts share with this one."""
    return tuple(value for index, value in enumerate(key) if index not in (RANKS, NODES, PER_NODE))


def reach(curves: Curves, key: Key, wanted: Floats) -> Reached | str:
    """Reach the ``wanted`` sizes [bytes] of a curve, or say why they cannot be."""
    if key in curves.arrays:
        return _own(curves, key, wanted)
    family = curves.families.get(family_of(key), [])
    if not family:
        return f"no measured curve is like {describe(key)} in all but its group"
    same = [other for other in family if other[NODES] == key[NODES]]
    if same:
        return _group(curves, key, same, wanted)
    most = max(int(other[NODES]) for other in family)
    if int(key[NODES]) > 1 and most == 1:
        return f"a new tier: {describe(key)}, but nothing like it was measured across nodes"
    if int(key[NODES]) == 1:
        return f"a new tier: {describe(key)}, but nothing like it was measured within one node"
    across = [other for other in family if int(other[NODES]) > 1]
    return _layout(curves, key, across, wanted)


def outside(sizes: Floats, wanted: Floats) -> tuple[Floats, Floats]:
    """Return octaves beyond the sizes, and octaves between the neighbouring sizes."""
    x, asked = np.log2(np.maximum(sizes, 1.0)), np.log2(np.maximum(wanted, 1.0))
    beyond: Floats = np.maximum(np.maximum(asked - x[-1], x[0] - asked), 0.0)
    above = np.clip(np.searchsorted(x, asked), 1, len(x) - 1)
    gap: Floats = x[above] - x[above - 1]
    return beyond, gap


def _own(curves: Curves, key: Key, wanted: Floats) -> Reached:
    sizes, times = curves.arrays[key]
    beyond, gap = outside(sizes, wanted)
    answer = log_time(sizes, times, wanted)
    far = (gap > SPARSE_OCTAVES) | (beyond > 0)
    if far.any():
        denser = _denser(curves, key)
        if denser is not None:
            told = curves.arrays[denser]
            ratio = np.log(times) - log_time(*told, sizes)
            x, asked = np.log2(np.maximum(sizes, 1.0)), np.log2(np.maximum(wanted, 1.0))
            moved = log_time(*told, wanted) + np.interp(asked, x, ratio)
            sibling_beyond, sibling_gap = outside(told[0], wanted)
            use = far & ((sibling_gap < 0.5 * gap) | (beyond > 0)) & (sibling_beyond == 0)
            answer = np.where(use, moved, answer)
    return Reached(log_time=answer, kind="size", beyond=beyond, gap=gap, apart=0.0)


def _denser(curves: Curves, key: Key) -> Key | None:
    """Return the nearest curve of the family that covers twice as many sizes or more octaves, if there is one."""
    sizes = curves.arrays[key][0]
    best: tuple[float, Key] | None = None
    for other in curves.families[family_of(key)]:
        theirs = curves.arrays[other][0]
        shared = int(((sizes >= theirs[0]) & (sizes <= theirs[-1])).sum())
        more = len(theirs) >= 2 * len(sizes) or theirs[-1] > sizes[-1] or theirs[0] < sizes[0]
        if other != key and more and shared >= SHARED:
            score = _apart(key, other)
            if best is None or score < best[0]:
                best = (score, other)
    return None if best is None else best[1]


def _apart(key: Key, other: Key) -> float:
    total = sum(abs(np.log2(int(key[place]) / int(other[place]))) for place in (RANKS, NODES, PER_NODE))
    tier = 8.0 if (int(key[NODES]) > 1) != (int(other[NODES]) > 1) else 0.0
    return float(total) + tier


def _group(curves: Curves, key: Key, same: Sequence[Key], wanted: Floats) -> Reached:
    """From one group a copy at equal bytes of a rank; from two or more a line between them or their trend beyond."""
    ranks = int(key[RANKS])
    nearest = sorted(same, key=lambda other: (_apart(key, other), other[RANKS]))
    below = [other for other in nearest if int(other[RANKS]) < ranks]
    above = [other for other in nearest if int(other[RANKS]) > ranks]
    first, copied = nearest[0], False
    one_sided = above if above else below
    if below and above:
        low, high = below[0], above[0]
        counts = (int(low[RANKS]), int(high[RANKS]), ranks)
        answer = between(curves.arrays[low], curves.arrays[high], counts, wanted)
    elif len(one_sided) > 1 and one_sided[0][RANKS] != one_sided[1][RANKS]:
        counts = (int(one_sided[0][RANKS]), int(one_sided[1][RANKS]), ranks)
        answer = trend(curves.arrays[one_sided[0]], curves.arrays[one_sided[1]], counts, wanted)
    else:
        copied = True
        theirs = traffic_factor(str(key[OP]), ranks) / traffic_factor(str(key[OP]), int(first[RANKS]))
        answer = log_time(*curves.arrays[first], wanted * theirs)
    beyond, gap = outside(curves.arrays[first][0], wanted)
    apart = max(abs(float(np.log2(ranks / int(first[RANKS])))), 0.5)
    kind = "group" if int(key[NODES]) == 1 else "layout"  # more ranks on the same nodes share their network ports
    may_cross = kind == "group" and not above and _fastest(curves, same) < PCIE_BYTES_PER_S
    return Reached(log_time=answer, kind=kind, beyond=beyond, gap=gap, apart=apart, copied=copied, may_cross=may_cross)


def _fastest(curves: Curves, keys: Sequence[Key]) -> float:
    """Return the highest rate [bytes/s] at which a rank of these curves sends."""
    rates = []
    for key in keys:
        sizes, times = curves.arrays[key]
        rates.append(float((sizes / times).max()) * traffic_factor(str(key[OP]), int(key[RANKS])))
    return max(rates)


def _layout(curves: Curves, key: Key, across: Sequence[Key], wanted: Floats) -> Reached:
    nearest = min(across, key=lambda other: _apart(key, other))
    factor = traffic_factor(str(key[OP]), int(key[RANKS])) / traffic_factor(str(key[OP]), int(nearest[RANKS]))
    answer = log_time(*curves.arrays[nearest], wanted * factor)
    beyond, gap = outside(curves.arrays[nearest][0], wanted)
    return Reached(log_time=answer, kind="layout", beyond=beyond, gap=gap, apart=max(_apart(key, nearest), 1.0))
