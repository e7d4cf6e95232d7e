"""Who am I: read from the environment which rank a launcher made of this process. Pure: a mapping in, a value out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

STORE_VARIABLE = "CROSSTRAFFIC_STORE"  # path of a file store that our own launcher made for the ranks to meet
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm numbers batch, extern and interactive steps from the top: no ranks of a run
_FIRST_PORT, _NUM_PORTS = 20000, 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """One rank among those that a launcher started.

    ``meeting_point`` is a file:// or tcp:// URL, where one is known; ``is_served``: the launcher itself keeps a store
    of torch there, so that no rank must.
    """

    rank: int
    world_size: int
    local_rank: int | None
    launcher: str
    meeting_point: str | None
    is_served: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"{self.launcher}: rank must be in 0..{self.world_size - 1}: {self.rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """The variables by which a launcher tells a process its place."""

    name: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str | None
    needs: tuple[str, ...] = ()


# The innermost comes first: torchrun inside srun, then mpiexec inside (or bootstrapped by) srun, then srun alone.
LAUNCHERS: tuple[_Launcher, ...] = (
    _Launcher(
        name="torchrun", rank="RANK", world_size=("WORLD_SIZE",), local_rank="LOCAL_RANK", needs=("MASTER_ADDR",)
    ),
    _Launcher(name="local", rank="RANK", world_size=("WORLD_SIZE",), local_rank="LOCAL_RANK", needs=(STORE_VARIABLE,)),
    _Launcher(
        name="mpiexec (Open MPI)",
        rank="OMPI_COMM_WORLD_RANK",
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    _Launcher(  # with one of its MPI plug-ins, which sets PMI_RANK too
        name="srun",
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        needs=("SLURM_STEP_ID", "SLURM_MPI_TYPE"),
    ),
    _Launcher(name="mpiexec", rank="PMI_RANK", world_size=("PMI_SIZE",), local_rank="MPI_LOCALRANKID"),
    _Launcher(
        name="srun",
        rank="SLURM_PROCID",
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        needs=("SLURM_STEP_ID",),
    ),
)


def identify(environment: Mapping[str, str]) -> RankIdentity | None:
    """Return the rank that the innermost launcher gave this process; None where no launcher did.

    A batch script of Slurm has SLURM_PROCID too, but is no rank: only a numbered step is.

    >>> identify({"PMI_RANK": "1", "PMI_SIZE": "4"}).rank
    1
    >>> identify({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None
    True

    Raises:
        ValueError: a launcher's variables contradict each other or are not numbers.
    """
    for launcher in LAUNCHERS:
        size = next((name for name in launcher.world_size if name in environment), None)
        if size is None or any(name not in environment for name in (launcher.rank, *launcher.needs)):
            continue
        if launcher.name == "srun" and not _is_rank_of_srun(environment, launcher):
            continue
        local = launcher.local_rank
        return RankIdentity(
            rank=_number(environment, launcher.rank),
            world_size=_number(environment, size),
            local_rank=_number(environment, local) if local is not None and local in environment else None,
            launcher=launcher.name,
            meeting_point=meeting_point(environment),
            is_served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    return None


def _is_rank_of_srun(environment: Mapping[str, str], launcher: _Launcher) -> bool:
    """Tell whether srun itself made this process a rank, and did not only start another launcher's helpers."""
    if _number(environment, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return False
    if "SLURM_MPI_TYPE" not in launcher.needs:
        return True
    size = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS"))
    is_same = environment.get("PMI_RANK") == environment[launcher.rank] and environment.get("PMI_SIZE") == size
    return environment["SLURM_MPI_TYPE"] != "none" and is_same


def meeting_point(environment: Mapping[str, str]) -> str | None:
    """Return where ranks without MPI meet: our own file store, torchrun's address, or the first node of a Slurm step.

    >>> meeting_point({"SLURM_STEP_ID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "n[03-05,9],m1"})
    'tcp://n03:20078'
    """
    if STORE_VARIABLE in environment:
        return f"file://{environment[STORE_VARIABLE]}"
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return f"tcp://{environment['MASTER_ADDR']}:{_number(environment, 'MASTER_PORT')}"
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
    if nodes and "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" in environment:
        offset = _number(environment, "SLURM_JOB_ID") + _number(environment, "SLURM_STEP_ID")
        return f"tcp://{first_host(nodes)}:{_FIRST_PORT + offset % _NUM_PORTS}"
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list.

    >>> first_host("gpu[003-004,7]"), first_host("a1,b2"), first_host("r[1-2]n[05-06]")
    ('gpu003', 'a1', 'r1n05')
    """
    depth, end = 0, len(nodes)
    for index, letter in enumerate(nodes):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            end = index
            break
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes[:end])


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f"{name} must be a whole number: {environment[name]!r}") from None
