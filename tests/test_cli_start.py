"""The command line starts light: help and version import nothing heavy, and bad use is exit code 2."""

import json
import re
import subprocess
import sys

import pytest

from crosstraffic import __version__

HEAVY = (
    "numpy",
    "scipy",
    "pandas",
    "pyarrow",
    "matplotlib",
    "seaborn",
    "pydantic",
    "jinja2",
    "torch",
    "mpi4py",
    "cupy",
)
DEVICES = ("torch", "mpi4py", "cupy")

PROGRAM = """
import sys
from crosstraffic.cli import main
sys.argv = ["crosstraffic", *sys.argv[1:]]
try:
    main()
finally:
    print("loaded:", *sorted({name.split(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def start(*arguments: str) -> tuple[subprocess.CompletedProcess[str], frozenset[str]]:
    """Run the command line; return what it did and the top-level names of all modules that it loaded."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (loaded,) = re.findall(r"^loaded: (.*)$", done.stderr, re.MULTILINE)
    return done, frozenset(loaded.split())


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ()], ids=["help", "version", "nothing"])
def test_start_is_light(arguments: tuple[str, ...]) -> None:
    _, loaded = start(*arguments)
    assert "typer" in loaded
    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "line",
    [
        "traffic Llama-3.1-8B --layout tp=2 --phase decode --batch 8 --context 512 --json",
        "groups --world 4 --layout tp=2,pp=2 --json",
    ],
    ids=["traffic", "groups"],
)
def test_planning_loads_no_transport(line: str) -> None:
    done, loaded = start(*line.split())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert loaded.isdisjoint(DEVICES)


def test_help_names_the_program() -> None:
    done, _ = start("--help")
    assert done.returncode == 0
    assert "Measure the traffic" in done.stdout


def test_version() -> None:
    done, _ = start("--version")
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize("arguments", [("no-such-command",), ("--no-such-option",)], ids=["command", "option"])
def test_bad_use_is_two(arguments: tuple[str, ...]) -> None:
    done, _ = start(*arguments)
    assert done.returncode == 2
    assert "no-such" in done.stderr
    assert done.stdout == ""
