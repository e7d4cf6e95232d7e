"""In continuous integration a skipped test of MPI, Gloo or Slurm is a failure: it would prove nothing in silence."""

import os
import re
from collections.abc import Generator

import pytest

NEVER_SKIPPED_IN_CI = ("mpi", "gloo", "slurm", "lab")


def _in_ci() -> bool:
    return os.environ.get("CI") == "true"


def _fail(report: pytest.TestReport | pytest.CollectReport, mark: str) -> None:
    report.outcome = "failed"
    report.longrepr = f"skipped although marked {mark}, and CI=true: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of one marked test into a failure (an expected failure is not a skip)."""
    report = yield
    mark = next((name for name in NEVER_SKIPPED_IN_CI if item.get_closest_marker(name)), None)
    if _in_ci() and mark and report.skipped and not hasattr(report, "wasxfail"):
        _fail(report, mark)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole module (``pytest.importorskip`` at its top) into a failure where it holds such tests."""
    report = yield
    if _in_ci() and report.skipped and collector.path.is_file():
        marks = re.findall(r"\bmark\.(\w+)", collector.path.read_text(encoding="utf-8"))
        mark = next((name for name in NEVER_SKIPPED_IN_CI if name in marks), None)
        if mark:
            _fail(report, mark)
    return report
