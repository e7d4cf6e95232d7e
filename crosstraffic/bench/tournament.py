"""A round-robin tournament: every pair of players once, in rounds of disjoint pairs that can play at the same time."""

import numpy as np
import numpy.typing as npt


def tournament(num_players: int) -> npt.NDArray[np.int64]:
    """Return the pairs of each round, ``[num_rounds, num_players // 2, 2]``, the lower player of a pair first.

    Even numbers of players take ``n - 1`` rounds; odd ones ``n``, and in each round one player rests.

    Source: the circle method. One player stays, the others move one place on each round, and those face each other
    whose places are as far from the ends.

    >>> tournament(4).tolist()
    [[[0, 3], [1, 2]], [[1, 3], [0, 2]], [[2, 3], [0, 1]]]

    Raises:
        ValueError: fewer than two players.
    """
    if num_players < 2:
        raise ValueError(f"a tournament needs at least 2 players: {num_players}")
    num_places = num_players + num_players % 2  # an odd number plays against a place where nobody stands
    circle = num_places - 1
    rounds = np.arange(circle)[:, np.newaxis]
    steps = np.arange(1, num_places // 2)[np.newaxis, :]
    firsts = np.hstack([rounds, (rounds - steps) % circle])
    seconds = np.hstack([np.full_like(rounds, circle), (rounds + steps) % circle])
    pairs = np.sort(np.stack([firsts, seconds], axis=2), axis=2)
    return pairs[:, 1:] if num_players % 2 else pairs
