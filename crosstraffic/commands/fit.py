"""``crosstraffic fit``: from run folders to model.json."""

from pathlib import Path
from typing import Annotated

import typer


def fit(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, of the same ranks and nodes.")],
    output: Annotated[Path | None, typer.Option(help="File to write; default: model.json in the first DIR.")] = None,
) -> None:
    """Fit a cost model to measured runs and write it down."""
    from rich.console import Console
    from rich.table import Table

    from crosstraffic.commands.errors import planning
    from crosstraffic.costmodel.fit import fit_runs
    from crosstraffic.costmodel.model import save
    from crosstraffic.errors import UsageError
    from crosstraffic.results.store import load_run
    from crosstraffic.units import format_rate, format_seconds

    runs = [load_run(folder) for folder in folders]
    with planning(f"fit {' '.join(map(str, folders))}"):
        model = fit_runs(runs)
    try:
        path = save(model, folders[0] / "model.json" if output is None else output)
    except OSError as error:
        raise UsageError(f"cannot write the model: {error}") from error
    table = Table(title="Fitted links")
    for heading in ("cadence", "what", "value", "points"):
        table.add_column(heading, justify="right" if heading in ("value", "points") else "left")
    for cadence, solo in model.solo.items():
        for tier, latency_s in solo.latency_s.items():
            table.add_row(cadence, f"latency of a step, {tier}", format_seconds(latency_s), "")
        for name, link in solo.links.items():
            rate = format_rate(link.bandwidth_bytes_per_s) if link.measured else "not determined"
            table.add_row(cadence, f"bandwidth, {name}", rate, str(link.num_points))
        table.add_row(cadence, "formula misses (median)", f"{solo.formula_error_log:.1%}", "")
    talk = Console(stderr=True, highlight=False)
    talk.print(table)
    for note in model.notes:
        talk.print(f"note: {note}", markup=False)
    print(path)
