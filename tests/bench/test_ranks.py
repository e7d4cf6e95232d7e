"""Who am I: the environments that launchers make, by table."""

from collections.abc import Mapping

import pytest

from crosstraffic.bench.ranks import RankIdentity, first_host, identify

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "10007",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", "PMI_FD": "9"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
CASES = {
    "torchrun": (TORCHRUN, (5, 8, 1, "torchrun", "tcp://node0:29500")),
    "srun counts the step's tasks": (SRUN, (6, 8, 2, "srun", "tcp://gpu07:20010")),
    "srun of an older Slurm": (
        {key: value for key, value in SRUN.items() if key != "SLURM_STEP_NUM_TASKS"},
        (6, 16, 2, "srun", "tcp://gpu07:20010"),
    ),
    "srun with an MPI plug-in": (
        SRUN | {"SLURM_MPI_TYPE": "pmi2", "PMI_RANK": "6", "PMI_SIZE": "8"},
        (6, 8, 2, "srun", "tcp://gpu07:20010"),
    ),
    "mpiexec whose helpers srun started": (
        SRUN | {"SLURM_MPI_TYPE": "pmi2"} | HYDRA,
        (2, 4, 2, "mpiexec", "tcp://gpu07:20010"),
    ),
    "mpiexec of as many ranks as the step has tasks": (
        SRUN | {"SLURM_MPI_TYPE": "none", "PMI_RANK": "6", "PMI_SIZE": "8"},
        (6, 8, None, "mpiexec", "tcp://gpu07:20010"),
    ),
    "mpiexec of MPICH": (HYDRA, (2, 4, 2, "mpiexec", None)),
    "mpiexec of Open MPI": (OPEN_MPI, (3, 4, 1, "mpiexec (Open MPI)", None)),
    "own launcher": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CROSSTRAFFIC_STORE": "/run/x/store"},
        (1, 2, 1, "local", "file:///run/x/store"),
    ),
    "torchrun inside srun": (SRUN | TORCHRUN, (5, 8, 1, "torchrun", "tcp://node0:29500")),
    "mpiexec inside a one-task step": (
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"} | HYDRA,
        (2, 4, 2, "mpiexec", "tcp://gpu07:20010"),
    ),
}


@pytest.mark.parametrize(("environment", "expected"), CASES.values(), ids=CASES.keys())
def test_each_launcher_is_recognised(environment: Mapping[str, str], expected: tuple[object, ...]) -> None:
    found = identify(environment)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.launcher, found.meeting_point) == expected


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "4"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "4294967291"},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "4294967290"},
        {"SLURM_NTASKS": "8"},
    ],
    ids=["nothing", "left over RANK", "batch script", "batch step", "interactive step", "sbatch options"],
)
def test_no_launcher_means_no_rank(environment: Mapping[str, str]) -> None:
    assert identify(environment) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (HYDRA | {"PMI_RANK": "4"}, r"mpiexec: rank must be in 0\.\.3: 4"),
        (HYDRA | {"PMI_SIZE": "four"}, "PMI_SIZE must be a whole number: 'four'"),
    ],
    ids=["rank beyond the world", "not a number"],
)
def test_contradictions_are_named(environment: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        identify(environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n[1,4-5]", "n1"), ("a[09-11],b2", "a09"), ("b2,a[1-2]", "b2"), ("r[3-4]s[07,09]x", "r3s07x")],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_two_steps_of_a_job_meet_at_different_ports() -> None:
    points = {identify(SRUN | {"SLURM_STEP_ID": str(step)}) for step in range(3)}
    assert len({point.meeting_point for point in points if isinstance(point, RankIdentity)}) == 3
