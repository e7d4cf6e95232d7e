"""``crosstraffic report``: one self-contained page for each run folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

    from crosstraffic.costmodel.model import Model
    from crosstraffic.results.store import Run


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write; default DIR/report.html. One folder only.")
    ] = None,
) -> None:
    """Write report.html: what a run found, in pictures and tables, in one file that needs no network."""
    from rich.console import Console

    from crosstraffic.errors import UsageError
    from crosstraffic.results.store import load_run

    if output is not None and len(folders) > 1:
        raise UsageError(f"--output takes one run folder: {len(folders)} given")
    talk = Console(stderr=True)
    for run in [load_run(folder) for folder in folders]:
        made = make_report(run, output)
        for remark in made.remarks:
            talk.print(remark, style="yellow", markup=False, highlight=False)
        print(made.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A page that was written, what to tell a person of it, and what the cost model said, if it could be fitted."""

    path: Path
    remarks: tuple[str, ...]
    predictions: "pd.DataFrame | None"
    validation: Mapping[str, Any] | None


def make_report(run: "Run", output: Path | None = None, *, refit: bool = False) -> Reported:
    """Write a run's page with what the cost model says of it.

    The folder's model.json is used, or made where there is none; ``refit`` makes it anew. What cannot be fitted or
    validated is left out of the page, with a remark. A run of suite links has nothing to fit.
    """
    from crosstraffic.costmodel.predict import curves, predict_records
    from crosstraffic.costmodel.validate import validate_runs
    from crosstraffic.errors import UsageError
    from crosstraffic.results.links import is_links
    from crosstraffic.results.report import render
    from crosstraffic.results.store import write_atomic

    remarks = []
    model = predictions = lines = validation = None
    try:
        if not is_links(run):
            model = _model(run, refit=refit)
            predictions, lines = predict_records(model, run), curves(model, run)
            validation = validate_runs([run])
    except (ValueError, UsageError) as error:
        what = "fitted" if model is None else "validated"
        remarks.append(f"{run.path}: the cost model could not be {what}: {error}")
    if model is not None and run.info.run_id not in model.run_ids:
        remarks.append(f"{run.path / 'model.json'} was fitted to other runs: {', '.join(model.run_ids)}")
    as_json = None if model is None else model.model_dump(mode="json")
    path = output if output is not None else run.path / "report.html"
    try:
        write_atomic(path, render(run, as_json, predictions, validation, lines).encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    return Reported(path=path, remarks=tuple(remarks), predictions=predictions, validation=validation)


def _model(run: "Run", *, refit: bool) -> "Model":
    from crosstraffic.costmodel.fit import fit_runs
    from crosstraffic.costmodel.model import load, save

    path = run.path / "model.json"
    if path.exists() and not refit:
        return load(path)
    model = fit_runs([run])
    save(model, path)
    return model
