"""With CI=true a skipped test of MPI or Gloo fails the run; elsewhere it is a skip (tests/conftest.py)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MARKS = ("mpi", "gloo", "slurm", "lab")
SKIPS = {
    "decorator": "@pytest.mark.{mark}\n@pytest.mark.skip(reason='no ranks')\ndef test_it():\n    pass\n",
    "inside": "@pytest.mark.{mark}\ndef test_it():\n    pytest.skip('no ranks')\n",
    "module": "pytest.importorskip('no_such_module')\npytestmark = pytest.mark.{mark}\n\ndef test_it():\n    pass\n",
}
EXPECTED_FAILURE = "@pytest.mark.mpi\n@pytest.mark.xfail\ndef test_it():\n    assert False\n"


def run_pytest(folder: Path, ci: str) -> tuple[int, str]:
    """Run the tests of a folder beside a copy of conftest.py; return the exit code and the output."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore", "-rsfE"]
    command += ["--import-mode=importlib", "--continue-on-collection-errors", str(folder)]
    environment = {**os.environ, "CI": ci}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a test module for every way to skip such a test."""
    for mark in MARKS:
        for way, text in SKIPS.items():
            (tmp_path / f"test_{mark}_{way}.py").write_text(
                f"import pytest\n\n{text.format(mark=mark)}", encoding="utf-8"
            )
    return tmp_path


def test_every_skip_fails_in_ci(folder: Path) -> None:
    returncode, output = run_pytest(folder, ci="true")
    assert returncode == 1
    assert "4 failed, 8 errors" in output
    for mark in MARKS:
        assert output.count(f"skipped although marked {mark}, and CI=true") >= 3


def test_no_skip_fails_elsewhere(folder: Path) -> None:
    (folder / "test_passes.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    returncode, output = run_pytest(folder, ci="")
    assert returncode == 0
    assert "1 passed, 12 skipped" in output


def test_others_may_be_skipped_in_ci(tmp_path: Path) -> None:
    text = SKIPS["inside"].format(mark="gpu").replace("test_it", "test_gpu") + "\n" + EXPECTED_FAILURE
    (tmp_path / "test_others.py").write_text(f"import pytest\n\n{text}", encoding="utf-8")
    returncode, output = run_pytest(tmp_path, ci="true")
    assert returncode == 0
    assert "1 skipped, 1 xfailed" in output
