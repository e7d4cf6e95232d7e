"""How many processors the ranks keep busy."""

import pytest

from crosstraffic.bench.turns import polled_processors
from crosstraffic.results.record import Place


def place(rank: int, node: int, cpus: tuple[int, ...], machine: str | None) -> Place:
    return Place(
        rank=rank, host=f"n{node}", pid=rank, node=node, cpus=cpus, device=None, nic=None, machine=machine
    )  # fmt: skip


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        (("a", "b", "c", "d"), 8),  # four machines of two processors
        (("a", "a", "a", "a"), 2),  # four network namespaces of one machine
        (("a", "a", "b", "b"), 4),
        ((None, None, None, None), 8),  # a run from before machines were told apart
    ],
)
def test_hosts_of_one_machine_share_its_processors(machines: tuple[str | None, ...], expected: int) -> None:
    places = [place(rank, rank // 2, (0, 1), machines[rank // 2]) for rank in range(8)]
    assert polled_processors("mpi", places) == expected


def test_ranks_that_sleep_keep_no_processor_busy() -> None:
    assert polled_processors("gloo", [place(0, 0, (0,), "a")]) is None


def test_bound_ranks_count_the_processors_that_they_are_bound_to() -> None:
    assert polled_processors("mpi", [place(rank, 0, (0,), "a") for rank in range(4)]) == 1
