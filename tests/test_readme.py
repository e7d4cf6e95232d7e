"""The README's commands run.

Blocks fenced as ``console`` or ``bash`` are read for lines that start with ``$ crosstraffic`` or ``$ make``; a line
that ends in a backslash goes on in the next one. The crosstraffic lines are run in order, in one temporary folder, as a
shell runs them. Two things differ from what a reader does:

- ``crosstraffic run`` gets ``--budget 20`` in place of its own or of the default, so that the test ends soon;
- a block right after the comment ``<!-- not run -->`` is skipped (it needs a cluster, say).

A ``make`` target must exist in the Makefile; it is not run.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
NOT_RUN = "<!-- not run -->"
BUDGET_S = 20
FENCE = re.compile(r"(?P<before>[^\n]*)\n\s*```(?:console|bash)[^\n]*\n(?P<body>.*?)\n\s*```", re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a Markdown text that a reader is told to type, in order."""
    for block in FENCE.finditer("\n\n" + re.sub(r"\n\s*\n(?=\s*```)", "\n", text)):
        if block["before"].strip() == NOT_RUN:
            continue
        for line in block["body"].replace("\\\n", " ").splitlines():
            match = re.match(r"\s*\$ ((?:crosstraffic|make)\b.*)", line)
            if match:
                yield re.sub(r"\s+", " ", match[1]).strip()


def shortened(command: str) -> str:
    """Give a ``crosstraffic run`` a short budget; leave any other command as it is.

    >>> shortened("crosstraffic run --ranks 2 --budget 100 --output runs/a")
    'crosstraffic run --budget 20 --ranks 2 --output runs/a'
    >>> shortened("crosstraffic report runs/a")
    'crosstraffic report runs/a'
    """
    if not re.match(r"crosstraffic run\b", command):
        return command
    return re.sub(r" --budget[= ]\S+", "", command).replace(
        "crosstraffic run", f"crosstraffic run --budget {BUDGET_S}", 1
    )


def make_targets(makefile: str) -> frozenset[str]:
    """Return the targets of a Makefile that a person calls by name."""
    return frozenset(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))


def problems(text: str, makefile: str, folder: Path) -> list[str]:
    """Run a Markdown text's commands in a folder; return what went wrong, one entry a command."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = []
    for command in commands(text):
        program, *words = command.split()
        if program == "make":
            asked = [word for word in words if re.fullmatch(r"[a-z][a-z-]*", word)]
            found += [f"{command}: no target {word}" for word in asked if word not in make_targets(makefile)]
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", shortened(command)],
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        if done.returncode != 0:
            found.append(f"{command}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_readme_commands_run(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    readme, makefile = ((REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    assert problems(readme, makefile, tmp_path) == []


SAMPLE = """# Sample

```console
$ make run
$ crosstraffic traffic llama \\
    --layout tp=2
name   bytes
```

<!-- not run -->

```bash
$ crosstraffic slurm submit
```

```python
$ crosstraffic no
```

- in a list

  ```bash
  $ crosstraffic explain busbw   # a word
  ```
"""


def test_commands_are_found() -> None:
    assert list(commands(SAMPLE)) == [
        "make run",
        "crosstraffic traffic llama --layout tp=2",
        "crosstraffic explain busbw # a word",
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("crosstraffic no-such-command", "exit code 2"),
        ("crosstraffic --no-such-option | cat", "exit code 2"),
        ("make no-such-target", "no target no-such-target"),
    ],
)
def test_a_broken_command_is_found(tmp_path: Path, command: str, words: str) -> None:
    text = f"Try\n\n```console\n$ crosstraffic --version\n$ {command}\n$ make run ARGS=x\n```\n"
    (problem,) = problems(text, (REPOSITORY / "Makefile").read_text(encoding="utf-8"), tmp_path)
    assert problem.startswith(command)
    assert words in problem


def test_commands_share_a_folder(tmp_path: Path) -> None:
    text = "```bash\n$ crosstraffic --version > one\n```\n\n```bash\n$ crosstraffic --version | cmp - one\n```\n"
    assert problems(text, "", tmp_path) == []
