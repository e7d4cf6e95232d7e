"""Tests marked ``lab`` are skipped, each with the reason, where no lab can be made."""

import os
import shutil

import pytest

from crosstraffic.slurm.lab import cluster
from crosstraffic.slurm.lab.processes import running


def why_no_lab() -> str | None:
    """Say why a lab cannot be made here now; None where it can, or where one of ours is up."""
    missing = [program for program in cluster.PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0:
        return "a lab needs root"
    if missing:
        return f"a lab needs {', '.join(missing)}"
    if cluster.find() is None and running(cluster.DAEMONS):
        return "a Slurm runs on this machine already"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lab") is not None and (why := why_no_lab()) is not None:
        pytest.skip(why)
