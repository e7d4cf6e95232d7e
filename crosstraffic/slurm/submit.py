"""Submit: hand a job to Slurm, and keep beside its run folder what was handed over."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from crosstraffic.errors import EnvironmentRefused, UsageError
from crosstraffic.slurm.job import TEMPLATE, Job, render

JOB_FILE = "job.json"
_JOB_ID = re.compile(r"(\d+)(?:;[\w.-]+)?", re.ASCII)
# Plug-ins of srun that start MPI ranks. MPICH and Intel MPI speak PMI2; Open MPI since 5.0 speaks PMIx only.
MPI_PLUGINS = ("pmix", "pmi2")
PMI2_LIBRARIES = ("mpich", "impi-rt")  # as packages beside this one
ASK_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job that Slurm took: its numbers in order of submission (the first, then those that resumed it), and when."""

    job: Job
    ids: tuple[int, ...]
    times_s: tuple[float, ...]
    template: str | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.job.output)


def find_program(name: str) -> str:
    """Return the path of a program of Slurm.

    Raises:
        EnvironmentRefused: it is not installed.
    """
    path = shutil.which(name)
    if path is None:
        raise EnvironmentRefused(f"{name} is not here: submit on a login node of a Slurm cluster")
    return path


def ask(command: Sequence[str], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of Slurm and return what it said.

    Raises:
        EnvironmentRefused: it is not installed, or does not answer.
    """
    path = find_program(command[0])
    try:
        return subprocess.run(  # noqa: S603
            [path, *command[1:]], input=stdin, capture_output=True, text=True, check=False, timeout=ASK_WITHIN_S
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentRefused(f"{command[0]} did not answer within {ASK_WITHIN_S:g} s") from error


def is_installed(distribution: str) -> bool:
    """Tell whether a package is installed."""
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def mpi_plugin() -> str:
    """Return the plug-in of srun that starts MPI ranks here: what the installed MPI speaks, if srun offers it.

    Raises:
        EnvironmentRefused: srun offers none, or does not find its cluster.
    """
    said = ask(("srun", "--mpi=list"))
    if said.returncode:
        raise EnvironmentRefused(f"srun does not list its MPI plug-ins: {_last_line(said.stderr or said.stdout)}")
    offered = re.findall(r"[A-Za-z0-9_]+", said.stdout + said.stderr)
    speaks_pmi2 = any(is_installed(name) for name in PMI2_LIBRARIES)
    for plugin in MPI_PLUGINS[::-1] if speaks_pmi2 else MPI_PLUGINS:
        if plugin in offered:
            return plugin
    raise EnvironmentRefused(
        f"srun offers no MPI plug-in of {', '.join(MPI_PLUGINS)}: {' '.join(offered)}; name one with --mpi, "
        "or take --transport gloo"
    )


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def submit(job: Job, template: Path | None = None, *, earlier: Submitted | None = None) -> Submitted:
    """Submit a job; ``earlier`` is the same job's first submission when this one resumes it.

    Raises:
        UsageError: the folder holds another run, or cannot be written.
        EnvironmentRefused: Slurm refuses the job, in its own words.
    """
    folder = Path(job.output)
    if earlier is None and folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"output: {folder} is not empty; take another folder, or crosstraffic slurm resume {folder}")
    text = render(job, template or TEMPLATE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.sh").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"output: cannot write {folder}: {error.strerror}") from error
    said = ask(("sbatch", "--parsable"), stdin=text)
    match = _JOB_ID.fullmatch(said.stdout.strip())
    if said.returncode or match is None:
        if earlier is None:
            shutil.rmtree(folder)
        raise EnvironmentRefused(f"sbatch refused the job: {(said.stderr or said.stdout).strip()}")
    submitted = Submitted(
        job=job,
        ids=(*(earlier.ids if earlier else ()), int(match.group(1))),
        times_s=(*(earlier.times_s if earlier else ()), time.time()),
        template=None if template is None else str(template.absolute()),
    )
    path = folder / JOB_FILE
    path.with_suffix(".new").write_text(json.dumps(submitted_to_dict(submitted), indent=2) + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)
    return submitted


def submitted_to_dict(submitted: Submitted) -> dict[str, Any]:
    """Turn it into JSON types."""
    return asdict(submitted)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def submitted_from_dict(data: Mapping[str, Any]) -> Submitted:
    """Read back what ``submitted_to_dict`` wrote.

    Raises:
        ValueError: a field is missing or wrong.
    """
    try:
        job = Job(**{name: _tuples(value) for name, value in data["job"].items()})
        return Submitted(job=job, **{name: _tuples(value) for name, value in data.items() if name != "job"})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a submitted job: {error}") from error


def find(folder: Path) -> tuple[Submitted, ...]:
    """Return the jobs of a folder: its own, or those of the folders in it (a sweep), in order of nodes.

    Raises:
        UsageError: there is none, or a file cannot be read.
    """
    paths = [folder / JOB_FILE] if (folder / JOB_FILE).is_file() else sorted(folder.glob(f"*/{JOB_FILE}"))
    found: list[Submitted] = []
    for path in paths:
        try:
            found.append(submitted_from_dict(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: {error}") from error
    if not found:
        raise UsageError(f"{folder} holds no {JOB_FILE}: not a folder of crosstraffic slurm submit")
    return tuple(sorted(found, key=lambda one: one.job.num_nodes))
