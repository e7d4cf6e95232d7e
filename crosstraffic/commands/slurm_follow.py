"""``crosstraffic slurm status``, ``collect``, ``resume`` and ``bisect``: what follows a job that was submitted."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from crosstraffic.slurm.follow import Followed
    from crosstraffic.slurm.submit import Submitted

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Run folder, or the folder of a sweep.")]
INTERRUPTED = 130  # as a shell says it


def status(
    folder: Folder,
    wait: Annotated[bool, typer.Option("--wait", help="Until the job is over or blocked.")] = False,
    every: Annotated[
        float | None, typer.Option("--every", help="Seconds between looks of --wait; default: 1, growing to 15.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what Slurm says of a job, and how much it has measured.

    Exit code 0 while it waits or runs and when it is complete, 1 when it is over and not complete, 3 when it waits for
    nodes that are out of service.
    """
    import json
    from dataclasses import asdict

    from crosstraffic.errors import UsageError
    from crosstraffic.slurm.finding import read_finding
    from crosstraffic.slurm.follow import exit_code, follow
    from crosstraffic.slurm.submit import find

    if every is not None and not (wait and 0.1 <= every <= 3600):
        raise UsageError(f"--every goes with --wait and takes 0.1 to 3600 seconds: {every:g}")
    jobs = find(folder)
    found = _wait(jobs, every) if wait else [follow(job) for job in jobs]
    rows = []
    for one in found:
        if as_json:
            submitted = one.submitted
            rows.append({
                "job_id": submitted.ids[-1], "folder": str(submitted.folder), "num_nodes": submitted.job.num_nodes,
                **asdict(one.state), "run": asdict(one.run) | {"why": one.why}, "is_complete": one.run.is_complete,
                "bisect": read_finding(submitted.folder),
            })  # fmt: skip
        else:
            print("\n".join(_told(one)))
    if as_json:
        print(json.dumps(rows))
    raise typer.Exit(exit_code(found))


def _wait(jobs: "Sequence[Submitted]", every_s: float | None) -> "Sequence[Followed]":
    from crosstraffic.slurm.follow import follow
    from crosstraffic.slurm.wait import wait

    seen: dict[int, tuple[str, str]] = {}

    def show(found: "Sequence[Followed]") -> None:
        for one in found:
            now = (one.state.state, one.run.status)
            if seen.get(one.submitted.ids[-1]) != now and not one.is_settled:
                typer.echo(_told(one)[0], err=True)
            seen[one.submitted.ids[-1]] = now

    try:
        return wait(
            lambda: [follow(job) for job in jobs],
            every_s=every_s,
            on_look=show,
            on_refusal=lambda refusal: typer.echo(f"{refusal}; asking again", err=True),
        )
    except KeyboardInterrupt:
        typer.echo("not waiting any more: the job goes on", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _told(one: "Followed") -> list[str]:
    """Say in lines how a job is; the first is the whole of it where all is well."""
    job, state, run = one.submitted.job, one.state, one.run
    reason = f" ({state.reason})" if state.reason else ""
    lines = [f"{one.submitted.ids[-1]}  {job.num_nodes} nodes  {state.state}{reason}  {run.status}: {_measured(one)}"]
    lines += [f"    {line}" for line in (one.why or "").splitlines()]
    if state.blocked:
        lines.append("    it cannot start until somebody puts these nodes back into service:")
        lines += [f"    {node}: {why}" for node, why in state.blocked.items()]
    return lines + _finding(one.submitted)


def _measured(one: "Followed") -> str:
    run = one.run
    bad = f", {run.num_bad} with wrong data" if run.num_bad else ""
    return f"{run.num_done} of {run.num_points} points{bad}" if run.num_points else "nothing measured yet"


def _finding(submitted: "Submitted") -> list[str]:
    from crosstraffic.slurm.finding import read_finding, told

    data = read_finding(submitted.folder)
    return [] if data is None else [f"    {line}" for line in told(data)]


def collect(
    folder: Folder,
    table: Annotated[
        Path | None, typer.Option("--table", help="Write the records of all runs as one table: .csv or .parquet.")
    ] = None,
) -> None:
    """Check that every planned point was measured and passed its checks; exit 1 where not."""
    from crosstraffic.errors import UsageError
    from crosstraffic.slurm.follow import follow, progress
    from crosstraffic.slurm.submit import find

    if table is not None and table.suffix not in (".csv", ".parquet"):
        raise UsageError(f"--table must end in .csv or .parquet: {str(table)!r}")
    found, missing = find(folder), 0
    for submitted in found:
        done = progress(submitted)  # a folder that is complete needs no Slurm
        if done.is_complete:
            print(f"complete: {submitted.folder}: {done.num_done} points, all checked")
            continue
        missing += 1
        one = follow(submitted)
        why = f": {one.why}" if one.why else ""
        print(f"incomplete: {submitted.folder}: {_measured(one)}; job {submitted.ids[-1]} is {one.state.state}{why}")
        for line in _finding(submitted):
            print(line)
    if table is not None:
        _write_table(found, table)
    if missing:
        typer.echo(f"crosstraffic slurm resume {folder} submits what is missing", err=True)
        raise typer.Exit(1)


def _write_table(found: "tuple[Submitted, ...]", table: Path) -> None:
    import pandas as pd

    from crosstraffic.errors import UsageError
    from crosstraffic.results.store import load

    frames = [
        load(one.folder).assign(num_nodes=one.job.num_nodes, folder=str(one.folder))
        for one in found
        if (one.folder / "run.json").is_file()
    ]
    if not frames:
        raise UsageError("no run has measured anything yet: there is no table to write")
    whole = pd.concat(frames, ignore_index=True)
    try:
        whole.to_csv(table, index=False) if table.suffix == ".csv" else whole.to_parquet(table)
    except OSError as error:
        raise UsageError(f"cannot write {table}: {error.strerror}") from error
    typer.echo(f"{len(whole)} records of {len(frames)} runs: {table}", err=True)


def resume(folder: Folder) -> None:
    """Submit again what is not complete; only missing points are measured."""
    from dataclasses import replace

    from crosstraffic.errors import UsageError
    from crosstraffic.slurm import submit as slurm_submit
    from crosstraffic.slurm.follow import follow

    missing = []
    for one in map(follow, slurm_submit.find(folder)):
        if one.run.is_complete:
            typer.echo(f"complete: {one.submitted.folder}", err=True)
        elif not one.state.is_over:  # refused before anything is submitted
            raise UsageError(f"job {one.submitted.ids[-1]} is {one.state.state}: it can be resumed once it has ended")
        else:
            missing.append(one.submitted)
    last: int | None = None
    for submitted in missing:
        job = replace(submitted.job, after=last)
        if (submitted.folder / "run.json").is_file() and "--resume" not in job.arguments:
            job = replace(job, arguments=(*job.arguments, "--resume"))
        template = None if submitted.template is None else Path(submitted.template)
        done = slurm_submit.submit(job, template, earlier=submitted)
        last = done.ids[-1]
        print(f"{last} {done.folder}")


def bisect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Run folder of the job that failed.")],
    limit: Annotated[float, typer.Option("--limit", help="Seconds after which a test has failed.")] = 40.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search the nodes of this allocation for the node or the pair that makes a run fail.

    Sets of nodes are tested with a short run each, disjoint sets at once. Exit code 0 if all nodes pass together, 1 if
    a test failed or could not be made.
    """
    import json
    import os

    from crosstraffic.errors import UsageError
    from crosstraffic.slurm.finding import Trial, read_finding, told, write_finding
    from crosstraffic.slurm.nodelist import compress
    from crosstraffic.slurm.probe import allocation, search
    from crosstraffic.slurm.submit import find

    if not 5 <= limit <= 3600:
        raise UsageError(f"--limit must be 5 to 3600 seconds: {limit:g}")
    job_id, nodes = allocation(os.environ)
    jobs = find(folder)
    if len(jobs) > 1:
        raise UsageError(f"{folder} is the folder of a sweep: bisect takes the folder of one of its runs")
    job = jobs[0].job
    if job.ranks_per_node == 1 and len(nodes) == 1:
        raise UsageError("a test needs two ranks: this allocation has one node, the job one rank a node")

    def show(trial: Trial) -> None:
        outcome = "passed" if trial.passed else f"failed: {trial.why}"
        typer.echo(f"test {trial.number}, {compress(trial.nodes)}: {outcome}", err=True)

    finding, trials = search(job, job_id, nodes, limit_s=limit, on_trial=show)
    path = write_finding(jobs[0].folder, job_id, nodes, finding, trials)
    data = read_finding(jobs[0].folder)
    assert data is not None
    print(json.dumps(data) if as_json else "\n".join(told(data)))
    typer.echo(f"each test: {path}", err=True)
    raise typer.Exit(int(finding.came_back or finding.stopped is not None))
