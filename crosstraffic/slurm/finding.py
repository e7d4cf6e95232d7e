"""What a bisection found, as a file beside the run and in words."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstraffic.errors import UsageError
from crosstraffic.slurm.bisect import Culprit, Finding
from crosstraffic.slurm.nodelist import compress

FILE = "bisect.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One test of one set of nodes: step ``number`` (its folder has that name), outcome, and why it failed."""

    number: int
    round: int
    nodes: tuple[str, ...]
    exit_code: int | None
    wall_s: float
    why: str | None = None

    @property
    def passed(self) -> bool:
        """Tell whether the probe ran to its end, with right data."""
        return self.exit_code == 0


def write_finding(folder: Path, job_id: int, nodes: Sequence[str], finding: Finding, trials: Sequence[Trial]) -> Path:
    """Write bisect.json into a run folder in one step; return its path.

    Raises:
        UsageError: it cannot be written.
    """
    data = {
        "schema_version": 1,
        "job_id": job_id,
        "nodes": list(nodes),
        **asdict(finding),
        "culprits": [{"kind": culprit.kind, **asdict(culprit)} for culprit in finding.culprits],
        "tests": [{**asdict(trial), "passed": trial.passed} for trial in trials],
    }
    path = folder / FILE
    try:
        path.with_suffix(".new").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".new").replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    return path


def read_finding(folder: Path) -> dict[str, Any] | None:
    """Return what bisect.json of a run folder says; None where there is none.

    Raises:
        UsageError: it is not such a file.
    """
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    if not isinstance(data, dict) or data.get("schema_version") != 1:
        raise UsageError(f"{path} is not a finding of schema version 1")
    return data


def told(data: Mapping[str, Any]) -> list[str]:
    """Say in lines what a finding says.

    Raises:
        UsageError: a field is missing.
    """
    try:
        finding = Finding(
            culprits=tuple(Culprit(nodes=tuple(one["nodes"]), is_sure=one["is_sure"]) for one in data["culprits"]),
            num_tests=data["num_tests"],
            num_rounds=data["num_rounds"],
            stopped=data["stopped"],
            suspects=tuple(data["suspects"]),
        )
        passed = any(test["passed"] for test in data["tests"])
        why = {frozenset(test["nodes"]): test["why"] for test in data["tests"] if not test["passed"]}
        lines = [f"bisect of job {data['job_id']}: {finding.num_tests} tests in {finding.num_rounds} rounds"]
    except (KeyError, TypeError) as error:
        raise UsageError(f"not a finding of schema version 1: {error}") from error
    if not finding.came_back:
        lines.append("the failure did not come back" if finding.num_tests else "nothing was tested")
    for culprit in finding.culprits:
        reason = why.get(frozenset(culprit.nodes))
        lines.append(_words(culprit) + (f" ({reason})" if reason else ""))
    if finding.suspects:
        lines.append(f"somewhere among {compress(finding.suspects)}")
    if finding.stopped:
        lines.append(f"the search stopped early: {finding.stopped}")
    if finding.came_back and not passed:
        lines.append("no test passed: the cause may be no node, look at the output of a test")
    return lines


def _words(culprit: Culprit) -> str:
    if culprit.kind == "node":
        return f"node {culprit.nodes[0]} fails, with others or alone"
    one, two = culprit.nodes
    if culprit.is_sure:
        return f"the pair {one} and {two} fails; each passes with other nodes"
    return f"the pair {one} and {two} fails, or one of the two: there was no other node to tell"
