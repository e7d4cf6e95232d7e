"""``crosstraffic slurm``: measure as a job of Slurm: submit; what follows a job is in ``slurm_follow``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crosstraffic.commands.slurm_follow import bisect, collect, resume, status

if TYPE_CHECKING:
    from crosstraffic.slurm.submit import Submitted

slurm = typer.Typer(no_args_is_help=True, help="Measure as a job of Slurm: submit, status, collect, resume, bisect.")
START_UP_S = 30  # from the start of a job to the first measurement, on many nodes
WHERE, HOW = "Where it may run", "Environment of the job"


@slurm.command()
def submit(
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario file (.toml) or a built-in one; default: one that fits the ranks.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option("--suite", help="A suite made for the nodes: links (every pair, both directions).")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes of the job.")] = None,
    sweep_nodes: Annotated[
        str | None, typer.Option("--sweep-nodes", help="One job for each number of nodes, one after another: 1,2,4,8.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", help="Default: the GPUs of a node, or 1.")
    ] = None,
    transport: Annotated[str, typer.Option("--transport", help="auto, mpi, gloo or nccl.")] = "auto",
    mpi: Annotated[
        str | None, typer.Option("--mpi", help="Plug-in of srun; default: what srun offers for mpi, else none.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Run folder, seen by all nodes.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", help="Seconds that measuring may take.")] = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", rich_help_panel=WHERE)] = 0,
    cpus_per_rank: Annotated[int | None, typer.Option("--cpus-per-rank", rich_help_panel=WHERE)] = None,
    exclusive: Annotated[
        bool, typer.Option("--exclusive/--shared", help="Whole nodes, or shared ones.", rich_help_panel=WHERE)
    ] = True,
    time: Annotated[str | None, typer.Option("--time", help="Limit, as 30 or 1:00:00.", rich_help_panel=WHERE)] = None,
    account: Annotated[str | None, typer.Option("--account", rich_help_panel=WHERE)] = None,
    partition: Annotated[str | None, typer.Option("--partition", rich_help_panel=WHERE)] = None,
    reservation: Annotated[str | None, typer.Option("--reservation", rich_help_panel=WHERE)] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", rich_help_panel=WHERE)] = None,
    nodelist: Annotated[str | None, typer.Option("--nodelist", rich_help_panel=WHERE)] = None,
    exclude: Annotated[str | None, typer.Option("--exclude", rich_help_panel=WHERE)] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", help="A further option of sbatch, as --sbatch=--mem=0.", rich_help_panel=WHERE),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the job.", rich_help_panel=HOW)] = "crosstraffic",
    program: Annotated[
        str, typer.Option("--program", help="The command as nodes call it.", rich_help_panel=HOW)
    ] = "crosstraffic",
    module: Annotated[list[str] | None, typer.Option("--module", help="Loaded first.", rich_help_panel=HOW)] = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", help="File that the shell reads first.", rich_help_panel=HOW)
    ] = None,
    env: Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE to export.", rich_help_panel=HOW)] = None,
    container: Annotated[str | None, typer.Option("--container", help="Image, for pyxis.", rich_help_panel=HOW)] = None,
    mounts: Annotated[
        str | None, typer.Option("--mounts", help="Its mounts: /a:/b,/c:/c.", rich_help_panel=HOW)
    ] = None,
    template: Annotated[
        Path | None, typer.Option("--template", help="A site's own batch script (Jinja2).", rich_help_panel=HOW)
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="If the run fails, search its nodes for the bad node or pair.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Fit, validate and write report.html in the job.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script, submit nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Submit a measurement; print the number of the job and its run folder."""
    import json
    import math
    from dataclasses import replace
    from datetime import UTC, datetime

    from crosstraffic.bench.scenario import default_scenario, read_scenario
    from crosstraffic.commands.errors import planning
    from crosstraffic.slurm import submit as slurm_submit
    from crosstraffic.slurm.job import TEMPLATE, Job, render

    with planning("slurm submit"):
        sizes = _sizes(nodes, sweep_nodes)
        is_file = scenario is not None and Path(scenario).suffix == ".toml"
        file = None if scenario is None else read_scenario(scenario)
        if suite is not None:
            from crosstraffic.bench.suites import check_suite

            check_suite(suite)
        if budget is not None and not 0 < budget < math.inf:
            raise ValueError(f"--budget must be more than 0 seconds, and finite: {budget:g}")
        if output is None:
            stem = suite or (Path(scenario).stem if scenario else "default")
            output = Path("runs") / f"{stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        kind = transport if transport != "auto" or not gpus_per_node else "nccl"
        kind = "mpi" if kind == "auto" else kind
        whole = Job(
            scenario=str(Path(str(scenario)).resolve()) if is_file else scenario,
            output=str(output.absolute()),
            num_nodes=sizes[-1],
            ranks_per_node=(gpus_per_node or 1) if ranks_per_node is None else ranks_per_node,
            transport=kind,
            mpi="none" if mpi is None else mpi,
            program=program,
            name=name,
            arguments=(
                *(() if suite is None else ("--suite", suite)),
                *(() if budget is None else ("--budget", f"{budget:g}")),
                *(() if report else ("--no-report",)),
            ),
            gpus_per_node=gpus_per_node,
            cpus_per_rank=cpus_per_rank,
            exclusive=exclusive,
            time=time,
            account=account,
            partition=partition,
            reservation=reservation,
            constraint=constraint,
            nodelist=nodelist,
            exclude=exclude,
            container=container,
            mounts=mounts,
            modules=tuple(module or ()),
            sources=tuple(source or ()),
            variables=tuple(_variable(text) for text in env or ()),
            directives=tuple(sbatch or ()),
            bisect=bisect,
        )
        if mpi is None and kind == "mpi":  # asked last: it needs Slurm, what is wrong above does not
            whole = replace(whole, mpi=slurm_submit.mpi_plugin())
        jobs = [whole]
        if sweep_nodes is not None:
            jobs = [replace(whole, num_nodes=size, output=f"{whole.output}/nodes-{size:04d}") for size in sizes]
        texts = [render(job, template or TEMPLATE) for job in jobs]
    _check_transport(kind, is_only_printed=dry_run)
    if suite is None or budget is not None:  # how long a suite takes follows from its nodes
        _warn_of_limit(time, budget or (file or default_scenario(whole.num_ranks)).measure.budget_s)
    if dry_run:
        print("\n".join(texts), end="")
        return
    done: list[Submitted] = []
    for job in jobs:
        after = done[-1].ids[-1] if done else None
        done.append(slurm_submit.submit(replace(job, after=after), template))
        if not as_json:
            print(f"{done[-1].ids[-1]} {done[-1].folder}")
    if as_json:
        print(json.dumps([{"job_id": one.ids[-1], "folder": str(one.folder)} for one in done]))


def _check_transport(name: str, *, is_only_printed: bool) -> None:
    """Refuse a transport that ranks could not open; a script that is only printed may be for a later version."""
    from crosstraffic.errors import UsageError

    if name in ("mpi", "gloo"):  # spares an import
        return
    from crosstraffic.bench.open import TRANSPORTS

    if name in TRANSPORTS:
        return
    told = f"this version has no transport {name}: ranks would refuse to start"
    if not is_only_printed:
        raise UsageError(f"{told}; take gloo or mpi")
    typer.echo(f"warning: {told}", err=True)


def _warn_of_limit(limit: str | None, budget_s: float) -> None:
    """Say so if a run cannot spend its budget before it is told to end."""
    from crosstraffic.slurm.time_limit import parse_time, warning_s

    limit_s = None if limit is None else parse_time(limit)
    if limit_s is None or budget_s + START_UP_S + warning_s(limit) <= limit_s:
        return
    typer.echo(
        f"warning: --time {limit} is {limit_s} s, of which the last {warning_s(limit)} s are for ending in order; "
        f"measuring may take {budget_s:g} s (its budget), starting about {START_UP_S} s: "
        "the run may end incomplete, slurm resume measures the rest",
        err=True,
    )


def _sizes(nodes: int | None, sweep: str | None) -> list[int]:
    if (nodes is None) == (sweep is None):
        raise ValueError("give --nodes N, or --sweep-nodes 1,2,4")
    if sweep is None:
        return [nodes or 0]
    parts = [part.strip() for part in sweep.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts) or len({*parts}) < len(parts):
        raise ValueError(f"--sweep-nodes takes different numbers of nodes, as 1,2,4: {sweep!r}")
    return sorted(map(int, parts))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--env takes NAME=VALUE: {text!r}")
    return name, value


slurm.command()(status)
slurm.command()(collect)
slurm.command()(resume)
slurm.command()(bisect)
