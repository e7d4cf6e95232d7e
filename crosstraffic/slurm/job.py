"""Job: what a measurement asks of Slurm, and its text. Pure: a value and a template in, the text of a batch script out.

No value can add a command: each field has a form that is checked, and what reaches the shell is quoted.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from crosstraffic.slurm.nodelist import expand
from crosstraffic.slurm.time_limit import parse_time, warning_s

TEMPLATE = Path(__file__).parent / "templates" / "job.sh.j2"
TRANSPORTS = ("auto", "mpi", "gloo", "nccl")
MAX_PROCESSORS = 2**24  # more than any machine has
COUNTS = ("num_nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node")
LEAST = {"num_nodes": 1, "ranks_per_node": 1, "gpus_per_node": 0, "cpus_per_rank": 1, "after": 1}
OPEN = frozenset({
    "account", "after", "constraint", "container", "cpus_per_rank", "exclude", "mounts", "nodelist", "partition",
    "reservation", "scenario", "time",
})  # fmt: skip
FLAGS = ("exclusive", "bisect")
TUPLES = ("arguments", "modules", "sources", "directives")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:/+@-]*", re.ASCII)
_PATH = re.compile(r"/[A-Za-z0-9_.,:/+@=-]*", re.ASCII)
_CONSTRAINT = re.compile(r"[A-Za-z0-9_\[(][A-Za-z0-9_.,:&|*()\[\]-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_DIRECTIVE = re.compile(r"--[a-z][a-z0-9-]*(?:=[A-Za-z0-9_.,:/@%+*()\[\]=-]+)?", re.ASCII)
# Directives that are fields of their own, or would make a script say something else than the job does.
OWN_DIRECTIVES = frozenset({
    "account", "array", "chdir", "constraint", "error", "exclude", "exclusive", "gpus-per-node", "job-name",
    "no-requeue", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "partition",
    "requeue", "reservation", "signal", "time", "wrap",
})  # fmt: skip


def _no_control(text: str) -> str | None:
    return None if text.isprintable() and text else "text of one line, without control characters"


def _like(pattern: re.Pattern[str], form: str) -> Callable[[str], str | None]:
    return lambda text: None if pattern.fullmatch(text) else form


def _nodes(text: str) -> str | None:
    try:
        expand(text)
    except ValueError as error:
        return str(error)
    return None


def _directive(text: str) -> str | None:
    if not _DIRECTIVE.fullmatch(text):
        return "one option of sbatch, as --mem=0 or --switches=1"
    name = text[2:].partition("=")[0]
    return f"an option that is not set elsewhere: --{name} has its own" if name in OWN_DIRECTIVES else None


def _time(text: str) -> str | None:
    try:
        parse_time(text)
    except ValueError:
        return "a time as Slurm writes it: 30, 1:30:00 or 2-12:00:00"
    return None


def _words(text: str) -> str | None:
    return _no_control(text) or ("text without a leading '-'" if text.startswith("-") else None)


_name = _like(_NAME, "letters, digits and _ . , : / + @ -, not starting with '-'")
FORMS: Mapping[str, Callable[[str], str | None]] = {
    "name": _name,
    "scenario": _words,
    "output": _like(_PATH, "an absolute path of letters, digits and _ . , : / + @ = - (Slurm expands % itself)"),
    "program": _words,
    "transport": lambda text: None if text in TRANSPORTS else f"one of {', '.join(TRANSPORTS)}",
    "mpi": _name,
    "time": _time,
    "account": _name,
    "partition": _name,
    "reservation": _name,
    "constraint": _like(_CONSTRAINT, "features, as a100&nvlink or [rack1|rack2]"),
    "nodelist": _nodes,
    "exclude": _nodes,
    "container": _words,
    "mounts": _words,
    "modules": _name,
    "sources": _words,
    "directives": _directive,
    "arguments": _no_control,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job: nodes and ranks, where it may run, how its environment is made, and what it measures.

    ``program`` is the command as it is called on a node; ``arguments`` are further words of ``crosstraffic run``.
    ``mpi`` is the plug-in of srun: none where ranks meet by themselves. ``sources`` are files that the shell reads
    first, ``modules`` are loaded, ``variables`` exported, ``directives`` written as #SBATCH lines as they are.
    ``after`` is the job that must have ended before. ``bisect``: when the run fails, its nodes are searched.

    Raises:
        ValueError: a field has not the form that it must have: which, the value, what is allowed.
    """

    scenario: str | None
    output: str
    num_nodes: int
    ranks_per_node: int
    transport: str = "auto"
    mpi: str = "none"
    program: str = "crosstraffic"
    name: str = "crosstraffic"
    arguments: tuple[str, ...] = ()
    gpus_per_node: int = 0
    cpus_per_rank: int | None = None
    exclusive: bool = True
    time: str | None = None
    account: str | None = None
    partition: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    container: str | None = None
    mounts: str | None = None
    modules: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    directives: tuple[str, ...] = ()
    after: int | None = None
    bisect: bool = False

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_texts()
        if self.num_ranks * (self.cpus_per_rank or 1) > MAX_PROCESSORS or self.gpus_per_node > MAX_PROCESSORS:
            asked = {name: getattr(self, name) for name in COUNTS if getattr(self, name)}
            raise ValueError(f"a job takes at most {MAX_PROCESSORS} processors: {asked}")
        if self.nodelist is not None and len(expand(self.nodelist)) < self.num_nodes:
            raise ValueError(f"the node list names {len(expand(self.nodelist))} nodes, the job needs {self.num_nodes}")
        if self.mounts is not None and self.container is None:
            raise ValueError(f"mounts belong to a container: {self.mounts!r}")

    def _check_texts(self) -> None:
        for name, check in FORMS.items():
            value = getattr(self, name)
            if name in TUPLES and not isinstance(value, tuple):
                raise ValueError(f"{name} must be a list: {value!r}")
            for text in value if isinstance(value, tuple) else (value,):
                if text is None and name in OPEN:
                    continue
                if (form := check(text) if isinstance(text, str) else "text") is not None:
                    raise ValueError(f"{name} must be {form}: {text!r}")
        if not isinstance(self.variables, tuple):
            raise ValueError(f"variables must be a list: {self.variables!r}")
        for pair in self.variables:
            if not isinstance(pair, tuple) or [type(text) for text in pair] != [str, str]:
                raise ValueError(f"variables must be pairs of a name and a value: {pair!r}")
            if not _VARIABLE.fullmatch(pair[0]) or not pair[1].isprintable():
                raise ValueError(f"variables must be NAME=VALUE of one line: {pair!r}")

    def _check_kinds(self) -> None:
        """A job may have been read from a file: a text in place of a number would reach the script as it is."""
        for name, least in LEAST.items():
            count = getattr(self, name)
            if (count is not None or name not in OPEN) and (type(count) is not int or count < least):
                raise ValueError(f"{name} must be a whole number from {least}: {count!r}")
        for name in FLAGS:
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be true or false: {getattr(self, name)!r}")

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node


def srun_words(job: Job) -> tuple[str, ...]:
    """Return the words of the one srun step."""
    words = [f"--mpi={job.mpi}", f"--nodes={job.num_nodes}", f"--ntasks={job.num_ranks}"]
    words += [f"--ntasks-per-node={job.ranks_per_node}", "--kill-on-bad-exit=1", "--wait=60"]
    if job.cpus_per_rank is not None:
        words.append(f"--cpus-per-task={job.cpus_per_rank}")
    if job.container is not None:
        words.append(f"--container-image={job.container}")
    if job.mounts is not None:
        words.append(f"--container-mounts={job.mounts}")
    return tuple(words)


def run_words(job: Job) -> tuple[str, ...]:
    """Return the words that each rank runs."""
    words = [job.program, "run", *([] if job.scenario is None else [job.scenario])]
    words += ["--output", job.output]
    if job.transport != "auto":
        words += ["--transport", job.transport]
    return (*words, *job.arguments)


def render(job: Job, template: Path = TEMPLATE) -> str:
    """Return the text of the batch script; ``template`` may be a site's own (Jinja2, with ``job``, ``srun``, ``run``).

    Raises:
        ValueError: the template cannot be read, or uses what there is not.
    """
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import SandboxedEnvironment

    environment = SandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["quote"] = shlex.quote
    try:
        text = template.read_text(encoding="utf-8")
        return environment.from_string(text).render(
            job=job, srun=srun_words(job), run=run_words(job), warning_s=warning_s(job.time)
        )
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise ValueError(f"template {template}: {error}") from error
