"""What happens after a run: fit, validate, report, and a summary on the screen."""

import json
import sys
from collections.abc import Mapping
from typing import Any

from crosstraffic.bench.request import Finished


def finish(finished: Finished, *, report: bool, as_json: bool) -> int:
    """Print what was found and where it is; return the exit code of the whole run."""
    from rich.console import Console

    from crosstraffic.commands.report import make_report
    from crosstraffic.results.links import is_links, links_of
    from crosstraffic.results.links_summary import links_data, links_tables, verdict_lines
    from crosstraffic.results.links_verdict import verdict
    from crosstraffic.results.store import load_run
    from crosstraffic.results.summary import steps_table, summary_data, summary_table

    folder = finished.folder
    run = load_run(folder)
    made = make_report(run, refit=True) if report and len(run.frame) else None
    links = links_of(run) if is_links(run) else None
    judged = None if links is None else verdict(links)
    if as_json:
        extra = {} if links is None or judged is None else {"links": links_data(links, judged)}
        print(json.dumps(summary_data(run) | extra))
    elif links is not None and judged is not None:
        console = Console(highlight=False)
        for line in verdict_lines(links, judged):
            console.print(line, markup=False, soft_wrap=True)
        for table in links_tables(links, judged):
            console.print(table)
    else:
        Console().print(summary_table(run))
        if len(run.frame[run.frame["kind"] == "step"]):
            Console().print(steps_table(run, None if made is None else made.predictions))
    talk = Console(stderr=True, highlight=False)
    if made is not None:
        for line in (*made.remarks, *model_error(made.validation), f"report: {made.path}"):
            talk.print(line, markup=False, soft_wrap=True)
    for note in run.info.notes:
        talk.print(f"note: {note}", markup=False, soft_wrap=True)
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
    is_healthy = judged is None or judged.verdict == "healthy"
    return 0 if run.info.status == "complete" and wrong.empty and is_healthy else 1


def model_error(validation: Mapping[str, Any] | None) -> list[str]:
    """Say how wrong the cost model is on what it did not see, beside the repeat noise (medians)."""
    if validation is None:
        return []
    named = {"sizes": "sizes left out", "triples": "mixes of three", "steps": "whole steps"}
    parts = []
    for kind, words in named.items():
        error = validation.get("kinds", {}).get(kind, {}).get("models", {}).get("ours", {}).get("median_ape")
        if error is not None:
            parts.append(f"{error:.1%} on {words}")
    noise = validation.get("noise", {}).get("median_ape")
    if not parts:
        return []
    beside = "" if noise is None else f"; two visits of one point differ by {noise:.1%}"
    return [f"the fitted model, where it did not look, is off by (median) {', '.join(parts)}{beside}"]
