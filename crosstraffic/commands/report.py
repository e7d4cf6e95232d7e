"""``crosstraffic report``: one self-contained page for each run folder."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    output: Annotated[
        Path | None, typer.Option("--output", help="File to write; default DIR/report.html. One folder only.")
    ] = None,
) -> None:
    """Write report.html: what the run found, in pictures and tables, in one file that needs no network."""
    from rich.console import Console

    from crosstraffic.errors import UsageError
    from crosstraffic.results.report import write_report

    if output is not None and len(folders) > 1:
        raise UsageError(f"--output takes one run folder: {len(folders)} given")
    talk = Console(stderr=True)
    for folder in folders:
        path, remarks = write_report(folder, output)
        for remark in remarks:
            talk.print(remark, style="yellow", markup=False, highlight=False)
        print(path)
