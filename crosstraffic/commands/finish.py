"""What happens after a run: fit, validate, report, and a summary on the screen."""

import json
import sys

from crosstraffic.bench.conduct import Finished


def finish(finished: Finished, *, report: bool, as_json: bool) -> int:
    """Print what was found and where it is; return the exit code of the whole run."""
    from rich.console import Console

    from crosstraffic.commands.report import write_report
    from crosstraffic.results.store import load_run
    from crosstraffic.results.summary import steps_table, summary_data, summary_table

    folder = finished.folder
    run = load_run(folder)
    lines: list[str] = []
    if report and len(run.frame):
        lines = write_report(run)
    if as_json:
        print(json.dumps(summary_data(run)))
    else:
        Console().print(summary_table(run))
        if len(run.frame[run.frame["kind"] == "step"]):
            Console().print(steps_table(run))
    talk = Console(stderr=True, highlight=False)
    for line in lines:
        talk.print(line)
    wrong = run.frame[run.frame["status"] == "wrong_data"]
    for _, row in wrong.iterrows():
        print(f"error: {row['why']}", file=sys.stderr)
    for late in run.info.late_ranks:
        talk.print(f"rank {late.rank} comes {late.late_s * 1e3:.3g} ms late in {late.share:.0%} of the points")
    if finished.error is not None:
        print(f"error: {finished.error}", file=sys.stderr)
        print(f"kept: {len(run.frame)} records in {folder}", file=sys.stderr)
        return finished.error.exit_code
    if run.info.status != "complete":
        print(f"{run.info.status}: {run.info.why}; finish it with --output {folder} --resume", file=sys.stderr)
    return 0 if run.info.status == "complete" and wrong.empty else 1
