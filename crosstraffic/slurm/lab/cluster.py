"""A lab: a Slurm cluster of network namespaces on this machine, brought up and taken down whole."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from crosstraffic.errors import EnvironmentRefused, UsageError
from crosstraffic.slurm.lab import files, network
from crosstraffic.slurm.lab.processes import Started, end, is_alive, running, start, start_ticks
from crosstraffic.slurm.lab.spec import LabSpec, spec_from_dict, spec_to_dict

FOLDER = Path("/run/crosstraffic-lab")
HOSTS = Path("/etc/netns")  # ip netns exec lays a namespace's files from here over /etc
PROGRAMS: Mapping[str, str] = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sinfo": "slurm-wlm",
}
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
READY_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A lab that is up: what it was asked to be, and the daemons that it started."""

    spec: LabSpec
    processes: tuple[Started, ...]

    @property
    def slurm_conf(self) -> Path:
        """What SLURM_CONF names for every command of this Slurm."""
        return FOLDER / "slurm.conf"


def environment() -> dict[str, str]:
    """Return the environment of the lab's commands: this one's, and which Slurm is meant."""
    return {**os.environ, "SLURM_CONF": str(FOLDER / "slurm.conf")}


def find() -> Lab | None:
    """Return the lab of this machine, if one is up or was left half down.

    Raises:
        EnvironmentRefused: its state cannot be read.
    """
    path = FOLDER / "lab.json"
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        processes = tuple(Started(**process) for process in data["processes"])
        return Lab(spec=spec_from_dict(data["spec"]), processes=processes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvironmentRefused(f"{path}: not the state of a lab: {error}") from error


def check_machine() -> None:
    """Raise EnvironmentRefused where a lab cannot be made: no root, programs missing, a Slurm runs already."""
    if os.geteuid() != 0:
        raise EnvironmentRefused("a lab needs root: it makes network namespaces and starts a Slurm; use sudo")
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        raise EnvironmentRefused(f"a lab needs {', '.join(missing)}: apt-get install {' '.join(missing)}")
    lab = find()
    own = {process.pid for process in lab.processes} if lab else set()
    others = {pid: name for pid, name in running(DAEMONS).items() if pid not in own}
    if others and lab is None:
        told = ", ".join(f"{name} (process {pid})" for pid, name in sorted(others.items()))
        raise EnvironmentRefused(f"a Slurm runs on this machine already, a lab would disturb it: {told}")


def up(spec: LabSpec) -> Lab:
    """Bring a lab up and wait until all nodes are idle; one that is up as asked already is left as it is.

    Raises:
        EnvironmentRefused: see ``check_machine``; another lab is up; a part did not start.
    """
    check_machine()
    lab = find()
    if lab is not None:
        if lab.spec == spec and all(map(is_alive, lab.processes)):
            return lab
        state = "another lab is up" if lab.spec != spec else "a lab was left half down"
        raise EnvironmentRefused(f"{state}: crosstraffic lab down")
    if (Path("/sys/class/net") / network.BRIDGE).exists():
        raise EnvironmentRefused(f"a network port {network.BRIDGE} is there already, and no lab that made it")
    _write_files(spec)
    try:
        lab = Lab(spec=spec, processes=())
        _keep(lab)
        for command in network.commands_up(spec):
            _run(command)
        lab = _start(spec)
        _wait(lab)
    except BaseException:
        down()
        raise
    return lab


def down() -> bool:
    """Take the lab down: daemons, everything that runs on its nodes, network, files; tell whether there was one."""
    lab = find()
    if lab is None:
        return False
    if os.geteuid() != 0:
        raise EnvironmentRefused("taking a lab down needs root: use sudo")
    end(lab.processes)
    for node in lab.spec.nodes:
        found = _ask(("ip", "netns", "pids", network.namespace(node)))
        numbers = [int(word) for word in found.stdout.split()]
        end([Started(name=node, pid=pid, start_ticks=start_ticks(pid) or 0) for pid in numbers], within_s=2)
    for command in network.commands_down(lab.spec):
        _ask(command)
    for node in lab.spec.nodes:
        shutil.rmtree(HOSTS / network.namespace(node), ignore_errors=True)
    if HOSTS.is_dir() and not any(HOSTS.iterdir()):
        HOSTS.rmdir()
    shutil.rmtree(FOLDER, ignore_errors=True)
    return True


def require() -> Lab:
    """Return the lab that is up.

    Raises:
        UsageError: there is none.
    """
    lab = find()
    if lab is None:
        raise UsageError("no lab is up: crosstraffic lab up")
    return lab


def execute(node: str, command: Sequence[str]) -> int:
    """Run a command on a node, in its network and under its name; return its exit code.

    Raises:
        UsageError: no lab, no such node, or no command.
    """
    lab = require()
    if node not in lab.spec.nodes:
        raise UsageError(f"no such node: {node!r}; there are {', '.join(lab.spec.nodes)}")
    if not command:
        raise UsageError("no command: crosstraffic lab exec NODE -- COMMAND ...")
    return subprocess.run(network.inside(node, tuple(command)), env=environment(), check=False).returncode  # noqa: S603


def node_states() -> Mapping[str, str]:
    """Return what Slurm says of each node (idle, alloc, down ...); empty where it does not answer."""
    found = _ask(("sinfo", "-h", "-N", "-o", "%N %t"))
    return dict(line.split() for line in found.stdout.splitlines() if len(line.split()) == 2)


def _ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(command), env=environment(), capture_output=True, text=True, check=False)  # noqa: S603


def _run(command: Sequence[str]) -> None:
    done = _ask(command)
    if done.returncode:
        raise EnvironmentRefused(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _keep(lab: Lab) -> None:
    data = {"spec": spec_to_dict(lab.spec), "processes": [asdict(process) for process in lab.processes]}
    path = FOLDER / "lab.json"
    path.with_suffix(".new").write_text(json.dumps(data), encoding="utf-8")
    path.with_suffix(".new").replace(path)


def _memory_mib(spec: LabSpec) -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return max(256, int(total * 0.8) // spec.num_nodes)


def _write_files(spec: LabSpec) -> None:
    for name in ("munge", "log", "state", "spool"):
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
    (FOLDER / "munge").chmod(0o711)
    key = FOLDER / "munge" / "key"
    key.touch(mode=0o400)
    key.write_bytes(os.urandom(1024))
    (FOLDER / "slurm.conf").write_text(files.slurm_conf(spec, FOLDER, _memory_mib(spec)), encoding="utf-8")
    (FOLDER / "cgroup.conf").write_text(files.CGROUP, encoding="utf-8")
    prolog = FOLDER / "task_prolog"
    prolog.write_text(files.TASK_PROLOG, encoding="utf-8")
    prolog.chmod(0o755)
    for node in spec.nodes:
        folder = HOSTS / network.namespace(node)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(files.hosts(spec), encoding="utf-8")


def _start(spec: LabSpec) -> Lab:
    munge = FOLDER / "munge"
    files_of = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [word for option, name in files_of.items() for word in (f"--{option}", str(munge / name))]
    daemons: list[tuple[str, tuple[str, ...]]] = [
        ("munged", ("munged", "--foreground", "--force", *options)),
        ("slurmctld", ("unshare", "-u", "sh", "-c", 'hostname ctl; exec "$@"', "sh", "slurmctld", "-D")),
    ]
    daemons += [(f"slurmd {node}", network.inside(node, ("slurmd", "-D"))) for node in spec.nodes]
    started: list[Started] = []
    for name, command in daemons:
        started.append(start(name, command, FOLDER / "log" / f"{name.replace(' ', '.')}.out", environment()))
        _keep(Lab(spec=spec, processes=tuple(started)))
        if name == "munged":
            _wait_for(munge / "socket")
    return Lab(spec=spec, processes=tuple(started))


def _wait_for(path: Path, within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not path.exists():
        if time.monotonic() > until:
            raise EnvironmentRefused(f"munged did not make {path} within {within_s:g} s")
        time.sleep(0.05)


def _wait(lab: Lab) -> None:
    until = time.monotonic() + READY_WITHIN_S
    while True:
        dead = [process.name for process in lab.processes if not is_alive(process)]
        states = {} if dead else node_states()
        if len(states) == lab.spec.num_nodes and set(states.values()) == {"idle"}:
            return
        if dead or time.monotonic() > until:
            what = f"{', '.join(dead)} ended" if dead else f"nodes are {dict(states)} after {READY_WITHIN_S:g} s"
            raise EnvironmentRefused(f"the lab did not start: {what}: {_last_words(dead)}")
        time.sleep(0.2)


def _last_words(dead: Sequence[str]) -> str:
    names = [f"{name.replace(' ', '.')}" for name in dead] or ["slurmctld"]
    words: list[str] = []
    for name in names:
        for path in sorted((FOLDER / "log").glob(f"{name}.*")):
            words += path.read_text(encoding="utf-8", errors="replace").splitlines()[-2:]
    return " | ".join(words) or "no output"
