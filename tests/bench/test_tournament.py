"""A tournament: every pair once, disjoint within a round, in as few rounds as there can be."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crosstraffic.bench.tournament import tournament


@given(num_players=st.integers(2, 60))
def test_every_pair_plays_once_and_nobody_twice_in_a_round(num_players: int) -> None:
    rounds = tournament(num_players).tolist()
    pairs = [tuple(pair) for players in rounds for pair in players]
    assert sorted(pairs) == list(itertools.combinations(range(num_players), 2))
    for players in rounds:
        playing = [player for pair in players for player in pair]
        assert len(set(playing)) == len(playing) == num_players - num_players % 2
    assert len(rounds) == num_players - 1 + num_players % 2


@pytest.mark.parametrize("num_players", [-1, 0, 1])
def test_too_few_players_are_refused(num_players: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 players: {num_players}"):
        tournament(num_players)
