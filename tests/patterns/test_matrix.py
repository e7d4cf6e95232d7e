"""Byte matrices: whole counts near real ones, rows and columns in balance; rules that only say who sends."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.matrix import Sparse, groups_differ, round_rows, rule_from_dict, rule_to_dict


@settings(max_examples=50, deadline=None)
@given(num_rows=st.integers(1, 20), num_columns=st.integers(1, 20), seed=st.integers(0, 999))
def test_cells_are_rounded_up_or_down_and_sums_are_kept(num_rows, num_columns, seed):
    exact = np.random.default_rng(seed).random((num_rows, num_columns)) * 5
    whole = round_rows(exact)
    assert (np.abs(whole - exact) < 1).all()
    assert (np.abs(whole.sum(axis=1) - exact.sum(axis=1)) < 1.01).all()
    assert abs(whole.sum() - exact.sum()) <= 0.5 + 1e-6


@settings(max_examples=50, deadline=None)
@given(num_rows=st.integers(1, 30), num_columns=st.integers(1, 20), total=st.integers(0, 99), seed=st.integers(0, 99))
def test_equal_rows_of_a_whole_sum_keep_it_and_columns_stay_within_one(num_rows, num_columns, total, seed):
    share = np.random.default_rng(seed).random(num_columns) + 0.1
    exact = np.outer(np.full(num_rows, float(total)), share / share.sum())
    whole = round_rows(exact)
    assert (whole.sum(axis=1) == total).all()
    assert (np.abs(whole.sum(axis=0) - exact.sum(axis=0)) < 1 + 1e-6).all()


def test_whole_cells_stay():
    exact = np.array([[3.0, 0.0], [1.0, 2.0]])
    assert (round_rows(exact) == exact).all()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_equal_cells_give_a_circulant_matrix_of_equal_sums(size):
    whole = round_rows(np.full((size, size), 1 / size))
    assert (whole.sum(axis=0) == 1).all()
    assert (whole.sum(axis=1) == 1).all()


def test_a_certain_cell_never_gets_more():
    exact = np.outer(np.full(40, 3.0), [1.0, 0.9])
    assert (round_rows(exact)[:, 0] == 3).all()


def test_sparse_cells_are_the_matrix_of_each_group():
    rule = Sparse(cells=(((0, 2, 5), (1, 2, 7), (0, 2, 1)), ()))
    assert rule.matrix(3, 0).tolist() == [[0, 0, 6], [0, 0, 7], [0, 0, 0]]
    assert rule.matrix(2, 1).tolist() == [[0, 0], [0, 0]]
    assert rule_from_dict(json.loads(json.dumps(rule_to_dict(rule)))) == rule
    assert groups_differ(rule)
    assert not groups_differ(Sparse(cells=(((0, 1, 5),),)))


def test_one_list_of_sparse_cells_serves_all_groups():
    rule = Sparse(cells=(((0, 1, 5),),))
    assert rule.matrix(2, 3).tolist() == rule.matrix(2, 0).tolist() == [[0, 5], [0, 0]]


def test_sparse_cells_that_fit_no_group():
    with pytest.raises(ValueError, match="does not fit a group of 2"):
        Sparse(cells=(((0, 2, 5),),)).matrix(2, 0)
    with pytest.raises(ValueError, match="none negative"):
        Sparse(cells=(((0, 1, -5),),))
