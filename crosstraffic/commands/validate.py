"""``crosstraffic validate``: how wrong the model is on what it did not see."""

from pathlib import Path
from typing import Annotated

import typer


def validate(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, of the same ranks and nodes.")],
    hold_out: Annotated[str, typer.Option(help="sizes, pairs, triples, steps or all.")] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print held-out errors of the model and of its baselines, beside the repeat noise."""
    import json
    from typing import cast

    from rich.console import Console
    from rich.table import Table

    from crosstraffic.commands.errors import planning
    from crosstraffic.costmodel.validate import HoldOut, validate_runs
    from crosstraffic.results.store import load_run

    runs = [load_run(folder) for folder in folders]
    with planning(f"validate {' '.join(map(str, folders))}"):
        found = validate_runs(runs, cast("HoldOut", hold_out))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    noise = found["noise"]
    repeat = "not measured (no repeated visits)"
    if noise["median_ape"] is not None:
        repeat = f"median {noise['median_ape']:.1%}, P90 {noise['p90_ape']:.1%}"
    table = Table(title="Absolute error of predictions", caption=f"repeat noise: {repeat}")
    for heading in ("hold-out", "model", "median", "P90", "90 % interval holds", "points"):
        table.add_column(heading, justify="left" if heading in ("hold-out", "model") else "right")
    for kind, block in found.get("kinds", {found["hold_out"]: found}).items():
        label = f"{kind} (fitted)" if block["in_sample"] else kind
        for name, row in block["models"].items():
            holds = "" if row["coverage_90"] is None else f"{row['coverage_90']:.0%}"
            table.add_row(
                label, name, f"{row['median_ape']:.1%}", f"{row['p90_ape']:.1%}", holds, str(row["num_points"])
            )
            label = ""
        table.add_section()
    console = Console(width=80) if not Console().is_terminal else Console()
    console.print(table)
