"""Known: the cells that were measured, with what predicts all others; what every exporter takes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from crosstraffic.results.table import CELL, CURVE

Predict = Callable[[pd.DataFrame], pd.DataFrame]

# Which of several curves a planner gets that has room for one: the first of these, then whatever else there is.
PREFERRED: Mapping[str, Sequence[str]] = {
    "placement": ("consecutive",),
    "issue": ("graph", ""),
    "cadence": ("streaming", ""),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Known:
    """What is known of one system.

    ``cells`` has ``results.table.CELL`` and ``time_s`` (median of the repeats), one row a measured cell. ``predict``
    answers as ``costmodel.cells.model.predict_cells`` does.
    """

    system: str
    library: str
    cells: pd.DataFrame
    predict: Predict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """Cells with a time, measured or predicted, and how many have none, by reason."""

    rows: pd.DataFrame  # CELL, time_s, low_s, high_s, source, kind
    left_out: Mapping[str, int]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return one line for each reason for which cells were left out; the curve before a colon is not part of it."""
        counts: dict[str, int] = {}
        for why, count in self.left_out.items():
            reason = why.split(": ", 1)[-1]
            counts[reason] = counts.get(reason, 0) + count
        return tuple(f"{count} cells left out: {reason}" for reason, count in counts.items())


def median_cells(frame: pd.DataFrame) -> pd.DataFrame:
    """Reduce the rows of a table (``results.table.COLUMNS``) to one a cell: the median of its repeats."""
    return frame.groupby(list(CELL), sort=False)["time_s"].median().reset_index()


def price(known: Known, wanted: pd.DataFrame) -> Priced:
    """Give a time to each wanted cell (columns ``CELL``): the measured one exactly, else the predicted one.

    A cell whose prediction is not valid is left out and counted, also where it was measured: then the model says why
    its curve cannot be trusted.
    """
    asked = wanted[list(CELL)].drop_duplicates(ignore_index=True)
    if asked.empty:
        return Priced(rows=asked.assign(time_s=[], low_s=[], high_s=[], source=[], kind=[]), left_out={})
    answer = known.predict(asked)
    rows = asked.assign(**{name: answer[name] for name in ("time_s", "low_s", "high_s", "source", "kind")})
    measured = asked.merge(known.cells[[*CELL, "time_s"]], on=list(CELL), how="left", validate="one_to_one")["time_s"]
    was_measured = measured.notna().to_numpy()
    rows.loc[was_measured, "time_s"] = measured[was_measured]
    rows.loc[was_measured, "source"] = "measured"
    usable = answer["valid"].astype(bool) & (rows["time_s"] > 0)
    whys = answer.loc[~usable, "why"].fillna("its prediction is no time")
    counts = {str(why): int(count) for why, count in whys.value_counts(sort=False).items()}
    return Priced(rows=rows[usable].reset_index(drop=True), left_out=counts)


def choose(cells: pd.DataFrame, by: Sequence[str]) -> tuple[pd.DataFrame, int]:
    """Keep one curve for each value of the columns ``by``; return its cells, and how many were passed over.

    The curve kept has neighbours as its ranks, calls from a graph, back to back, as few groups at once and as many
    ranks a node as there are, in this order.
    """
    if cells.empty:
        return cells, 0
    ranked = cells.assign(
        **{
            f"_{name}": cells[name].map(lambda value, order=order: order.index(value) if value in order else len(order))
            for name, order in PREFERRED.items()
        },
        _spread=-cells["ranks_per_node"],
    )
    ordered = ranked.sort_values(
        [*(f"_{name}" for name in PREFERRED), "num_groups", "_spread", "parameters"], kind="stable"
    )
    first = ordered.drop_duplicates(list(by))[[*dict.fromkeys([*by, *CURVE])]]
    kept = cells.merge(first, on=list(first.columns), how="inner")
    return kept, len(cells) - len(kept)


def pick_kernel(cells: pd.DataFrame, asked: str | None, ops: Iterable[str], preferred: str = "nccl") -> str:
    """Return the kernel whose cells of ``ops`` are exported.

    Raises:
        ValueError: none has them, the asked one has not, or several have and none was asked for.
    """
    ops = tuple(ops)
    there = sorted({str(name) for name in cells.loc[cells["op"].isin(ops), "kernel"]})
    if not there:
        raise ValueError(f"no measured cells of {' or '.join(ops)}: measure at least one of them")
    if asked is not None:
        if asked not in there:
            raise ValueError(f"no cells of kernel {asked!r} for {', '.join(ops)}; measured: {', '.join(there)}")
        return asked
    plain = [name for name in there if not name.endswith("custom_all_reduce")]
    if preferred in there:
        return preferred
    if len(plain or there) == 1:
        return (plain or there)[0]
    raise ValueError(f"several kernels were measured: name one with --kernel: {', '.join(there)}")


def spread(num_ranks: int, gpus_per_node: int) -> dict[str, int]:
    """Return how a group of neighbouring ranks lies on full nodes, as columns of a cell.

    >>> spread(4, 8), spread(16, 8)
    ({'num_ranks': 4, 'num_nodes': 1, 'ranks_per_node': 4}, {'num_ranks': 16, 'num_nodes': 2, 'ranks_per_node': 8})
    """
    num_nodes = -(-num_ranks // gpus_per_node)
    return {"num_ranks": num_ranks, "num_nodes": num_nodes, "ranks_per_node": num_ranks // num_nodes}
