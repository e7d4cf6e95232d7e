"""Grids of ranks: groups of any dimensions, other factorizations of the same ranks, and what is refused."""

import pytest

from crosstraffic.patterns.rank_grid import RankGrid, check_fits, check_view, order_grid

BASE = RankGrid(shape=(2, 2, 2, 2), names=("tp", "cp", "dp", "pp"))


def test_groups_of_several_dimensions_have_the_first_one_fastest():
    grid = RankGrid(shape=(2, 2, 2), names=("a", "b", "c"))
    assert grid.groups("a") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert grid.groups("b") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert grid.groups("c", "a") == grid.groups("a", "c") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert grid.groups("a", "b", "c") == (tuple(range(8)),)


def test_groups_start_at_the_offset():
    grid = RankGrid(shape=(2, 3), names=("tp", "dp"), rank_offset=10)
    assert grid.groups("tp") == ((10, 11), (12, 13), (14, 15))
    assert grid.groups("dp") == ((10, 12, 14), (11, 13, 15))


def test_a_grid_of_120_ranks_has_megatron_s_strides():
    grid = RankGrid(shape=(2, 3, 4, 5), names=("tp", "cp", "pp", "dp"))
    assert [grid.stride(name) for name in grid.names] == [1, 2, 6, 24]
    assert grid.groups("dp")[0] == (0, 24, 48, 72, 96)
    assert len(grid.groups("cp", "dp")) == 8


def test_a_view_of_experts_shares_the_pipeline():
    check_view(BASE, RankGrid(shape=(1, 4, 2, 2), names=("etp", "ep", "edp", "pp")), ["pp"])


@pytest.mark.parametrize(
    ("shape", "names", "shared", "message"),
    [
        pytest.param((4, 2, 2), ("ep", "pp", "edp"), ["pp"], "different membership", id="pipeline elsewhere"),
        pytest.param((4, 2), ("ep", "pp"), ["pp"], "has size 8, but the grid size is 16", id="size"),
        pytest.param((4, 4), ("ep", "pp"), ["xp"], "not a dimension of the grid: 'xp'", id="unknown"),
        pytest.param((8, 2), ("ep", "pp"), ["pp", "pp"], "duplicate shared", id="shared twice"),
        pytest.param((2, 2, 2, 2), ("tp", "dp", "cp", "pp"), ["tp", "pp"], None, id="several shared"),
    ],
)
def test_views_that_do_not_fit(shape, names, shared, message):
    view = RankGrid(shape=shape, names=names)
    if message is None:
        check_view(BASE, view, shared)
        return
    with pytest.raises(ValueError, match=message):
        check_view(BASE, view, shared)


@pytest.mark.parametrize(
    ("shape", "names", "offset", "message"),
    [
        pytest.param((2, 2), ("tp",), 0, "as many sizes as names", id="lengths"),
        pytest.param((2, 2), ("tp", "tp"), 0, "duplicate names", id="duplicate"),
        pytest.param((2, 0), ("tp", "dp"), 0, "whole numbers from 1", id="zero"),
        pytest.param((2, 2), ("tp", "dp"), -1, "rank_offset must not be negative: -1", id="offset"),
    ],
)
def test_grids_that_are_none(shape, names, offset, message):
    with pytest.raises(ValueError, match=message):
        RankGrid(shape=shape, names=names, rank_offset=offset)


def test_a_grid_must_fit_the_world():
    check_fits(BASE, 16)
    with pytest.raises(ValueError, match=r"Grid shape \[2, 2, 2, 2\] is over sized with world size 15"):
        check_fits(BASE, 15)
    with pytest.raises(ValueError, match="over sized with world size 16 and rank offset 8"):
        check_fits(RankGrid(shape=(4, 4), names=("tp", "dp"), rank_offset=8), 16)


def test_experts_and_context_are_never_in_one_grid():
    with pytest.raises(ValueError, match="Both EP and CP > 1 is not allowed in one rank generator: ep 2, cp 2"):
        order_grid({"tp": 2, "cp": 2, "ep": 2, "dp": 1, "pp": 1}, "tp-cp-ep-dp-pp")
