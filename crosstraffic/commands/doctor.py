"""``crosstraffic doctor``: the preflight alone, on all ranks: where they run, what they see, what speaks against it."""

from typing import Annotated

import typer


def doctor(
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start on this machine.")] = None,
    transport: Annotated[str, typer.Option(help="auto, mpi or gloo.")] = "auto",
    start_limit: Annotated[float, typer.Option(help="Seconds to wait for ranks that do not come.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show where ranks run and what they see, and say what speaks against measuring with them; measures nothing.

    Starts its own ranks on this machine; under mpiexec, srun or torchrun it examines the ranks that are there.
    """
    import json

    from crosstraffic.bench.doctor import examine
    from crosstraffic.commands.doctor_table import doctor_text
    from crosstraffic.errors import EnvironmentRefused

    found = examine(ranks=ranks, transport=transport, start_limit_s=start_limit)
    if found is None:
        return
    print(json.dumps(found) if as_json else doctor_text(found), flush=True)
    for refusal in found["refusals"]:
        typer.echo(f"refused: {refusal}", err=True)
    if found["refusals"]:
        raise typer.Exit(EnvironmentRefused.exit_code)
