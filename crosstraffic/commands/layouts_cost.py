"""What ``crosstraffic layouts --cost`` adds: layouts ranked by the predicted time of a step, and where it goes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from crosstraffic.costmodel.export.known import Known
    from crosstraffic.costmodel.layout_cost import LayoutCost
    from crosstraffic.patterns.layouts import Found
    from crosstraffic.patterns.model import ModelShape

COST_RANKING = (
    "every call has a predicted time",
    "rounds in which the cache serves the batch",
    "predicted time of a step's communication",
)
NUM_SHARES = 3


def load_known(path: "Path") -> "Known":
    """Read a fitted model and return what it knows of cells.

    Raises:
        ValueError: it has none.
        UsageError: not a model.
    """
    from crosstraffic.costmodel.export.source import known_of_model
    from crosstraffic.costmodel.model import load

    return known_of_model(load(path / "model.json" if path.is_dir() else path), None)


def priced(
    found: "Found", known: "Known", shape: "ModelShape", phase: str, kernel: str | None
) -> "tuple[Found, tuple[LayoutCost, ...]]":
    """Price what was found and return it in the order of its cost.

    Raises:
        ValueError: no curve is of ``kernel``.
    """
    from dataclasses import replace

    from crosstraffic.costmodel.layout_cost import price_layouts, rank

    costs = price_layouts(found.candidates, known.cells, known.predict, shape, phase, kernel)
    ranked = rank(found.candidates, costs)
    return replace(found, candidates=tuple(one for one, _ in ranked)), tuple(one for _, one in ranked)


def cost_data(cost: "LayoutCost") -> dict[str, Any]:
    """Return the fields that a cost adds to a layout's row of JSON."""
    from dataclasses import asdict

    fields = asdict(cost)
    streams = fields.pop("streams")
    return {**fields, "cost_streams": streams, "cost_patterns": cost.patterns}


def print_costs(asked: "Mapping[str, Any]", found: "Found", costs: "Sequence[LayoutCost]", top: int) -> None:
    """Print the cheapest layouts, where their time goes, and what could not be priced."""
    from rich.console import Console
    from rich.table import Table

    from crosstraffic.units import format_seconds

    console = Console(highlight=False, markup=False)
    has_memory = asked["gpu_memory_bytes"] is not None
    console.print(
        f"{asked['model']} on {asked['num_gpus']} GPUs, {asked['phase']} of {asked['batch']} requests of "
        f"{asked['context']} tokens, as {asked['framework']} does it: predicted communication of a step",
        style="bold",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("layout", overflow="fold")
    for name in ("time", "90 % interval", "in a row", *(("rounds",) if has_memory else ())):
        table.add_column(name, justify="right")
    table.add_column("where it goes", overflow="fold")
    for candidate, cost in list(zip(found.candidates, costs, strict=True))[:top]:
        interval, times = "-", ("-", "-")
        if cost.time_s is not None and cost.sum_s is not None:
            times = (format_seconds(cost.time_s), format_seconds(cost.sum_s))
        if cost.low_s is not None and cost.high_s is not None:
            interval = f"{format_seconds(cost.low_s)} .. {format_seconds(cost.high_s)}"
        rounds = str(int(candidate.rounds)) if candidate.memory.max_requests else "-"
        shares = ", ".join(f"{one.name} {one.share:.0%}" for one in cost.streams[:NUM_SHARES])
        where = shares or ("nothing crosses" if cost.valid else f"not valid: {cost.why}")
        row = (str(candidate.layout), times[0], interval, times[1], *((rounds,) if has_memory else ()), where)
        table.add_row(*row)
    console.print(table)
    console.print()
    num_valid = sum(cost.valid for cost in costs)
    kernels = sorted({kernel for cost in costs for stream in cost.streams for kernel in stream.kernels})
    console.print(
        f"{len(costs)} layouts, {num_valid} of them with a time for each call"
        + (f"; kernels: {', '.join(kernels)}." if kernels else ".")
    )
    console.print(
        "time: on the critical path (lanes at once, passes of a pipeline one behind the other); in a row: the sum of "
        "all calls. Streams alone: what they slow down each other is not in it, nor is any computation."
    )
    console.print(f"ranked by: {', then '.join(COST_RANKING)}.")
