"""``crosstraffic run``: measure a scenario, then fit, validate and report what was found."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from crosstraffic.bench.guarded import Launched


def run(
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario file (.toml) or a built-in one; default: one that fits the ranks.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="A suite made for the ranks: links (every pair of nodes, both directions).")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start on this machine.")] = None,
    transport: Annotated[str, typer.Option(help="auto, mpi, gloo or simulated.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Run folder; default: runs/SCENARIO-TIME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Measure only what --output still misses.")] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds that measuring may take.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the order and of the routing.")] = None,
    model: Annotated[str | None, typer.Option(help="Catalogue name or config.json instead.")] = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Fit, validate and write report.html.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Measure each stream of a scenario alone and together, and report.

    Starts its own ranks on this machine; under mpiexec, srun or torchrun it uses the ranks that are there.
    """
    launched = _launched(transport)
    if isinstance(launched, int):
        raise typer.Exit(launched)
    from crosstraffic.bench.conduct import conduct
    from crosstraffic.bench.request import Request

    request = Request(
        scenario=scenario,
        suite=suite,
        ranks=ranks,
        transport=transport,
        output=output,
        resume=resume,
        budget_s=budget,
        seed=seed,
        model=model,
        command=("crosstraffic", *sys.argv[1:]),
    )
    finished = conduct(request, launched)
    if finished is None:
        return
    from crosstraffic.commands.finish import finish

    raise typer.Exit(finish(finished, report=report, as_json=as_json))


def _launched(transport: str) -> "Launched | int | None":
    """Fork a guard off where a launcher started this process: its exit code, or in the rank what ties it to it."""
    from crosstraffic.bench.guarded import fork_rank
    from crosstraffic.bench.ranks import identify
    from crosstraffic.errors import UsageError

    if transport == "simulated":  # has no ranks
        return None
    try:
        identity = identify(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return None if identity is None else fork_rank(os.environ, identity)
