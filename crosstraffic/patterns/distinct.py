"""De-duplication: how many different ranks or nodes a token's experts lie on, where one copy of the token is enough.

A token picks ``top_k`` different experts; node-limited routing first picks ``topk_groups`` of the groups of experts,
each set of groups as likely as its experts' loads make it, and then the experts among theirs. Given the load of each
expert, sets of experts are taken as likely as the product of the odds of their members (conditional Poisson sampling:
the distribution of largest entropy that has these loads). So all numbers are exact for this model, without sampling;
equal loads give plain counting of subsets.
"""

from fractions import Fraction
from itertools import pairwise
from math import comb

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.loads import Floats, experts_per_rank

MAX_ROUNDS = 20
ROUGH = 1e-11  # of loads: good enough
TINY = 1e-15
CERTAIN = 1e-9  # how far from 0 or 1 the probability of an expert may come


def expected_distinct(
    num_experts: int, top_k: int, num_places: int, *, num_groups: int = 1, topk_groups: int = 1
) -> Fraction:
    """Return the expected number of different places (ranks, nodes) of a token's experts, equal loads, exactly.

    Without groups, for places of equal size: R * (1 - C(E - E/R, k) / C(E, k)).

    >>> round(float(expected_distinct(256, 8, 8)), 3)
    5.295
    >>> round(float(expected_distinct(256, 8, 8, num_groups=8, topk_groups=4)), 3)
    3.629

    Raises:
        ValueError: groups that experts do not divide over, or fewer experts in them than top_k.

    Source: counting of subsets; DeepSeek-V3, arXiv 2412.19437 section 2.1.2, for the groups.
    """
    check_groups(num_experts, top_k, num_groups, topk_groups)
    size = num_experts // num_groups
    among = topk_groups * size
    total = Fraction(0)
    ends = np.cumsum((0, *experts_per_rank(num_experts, num_places))).tolist()
    for start, end in pairwise(ends):
        held = [max(0, min(end, (group + 1) * size) - max(start, group * size)) for group in range(num_groups)]
        ways: dict[tuple[int, int], int] = {(0, 0): 1}  # (groups picked, experts of the place in them) -> how often
        for own in held:
            for (picked, reached), count in list(ways.items()):
                key = (picked + 1, reached + own)
                ways[key] = ways.get(key, 0) + count
        missed = sum(count * comb(among - own, top_k) for (picked, own), count in ways.items() if picked == topk_groups)
        total += 1 - Fraction(missed, comb(num_groups, topk_groups) * comb(among, top_k))
    return total


def check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    """Raise ValueError for groups of experts that a token cannot pick its experts from."""
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"{num_experts} experts do not divide over {num_groups} groups")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_groups must be from 1 to the {num_groups} groups: {topk_groups}")
    if not 1 <= top_k <= topk_groups * (num_experts // num_groups):
        raise ValueError(f"top_k must be from 1 to the experts of {topk_groups} groups: {top_k} of {num_experts}")


def expert_odds(shares: Floats, top_k: int) -> Floats:
    """Return odds of experts whose product makes a set of ``top_k`` as likely as the loads ``shares`` ask.

    >>> expert_odds(np.full(4, 0.25), 2).round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]

    Source: Chen, Dempster and Liu, Weighted finite population sampling to maximize entropy, Biometrika 81 (1994).
    """
    wanted = shares * top_k
    free = (wanted > CERTAIN) & (wanted < 1 - CERTAIN)
    chance = np.clip(wanted, 0.0, 1 - CERTAIN)
    chance[wanted <= CERTAIN] = 0.0
    if free.any() and np.ptp(wanted[free]) > CERTAIN:
        num_points = top_k + 41 + top_k % 2  # of the circle; odd, so that no factor vanishes on it
        point = np.exp(2j * np.pi * np.arange(num_points) / num_points)
        miss = 1.0
        for _ in range(MAX_ROUNDS):
            factor = 1 + chance[:, None] * (point - 1)
            whole = factor.prod(axis=0)
            all_k = (whole * point**-top_k).mean().real
            others = (whole * point ** (1 - top_k) / factor).mean(axis=1).real  # chance that the others are k - 1
            found = np.clip(chance * others / all_k, TINY, 1 - TINY)
            miss, last = float(np.abs(found - wanted)[free].max()), miss
            if miss < ROUGH or miss > 0.9 * last:
                break
            logit = np.log(chance[free] / (1 - chance[free])) + np.log(wanted[free] / (1 - wanted[free]))
            chance[free] = 1 / (1 + np.exp(np.log(found[free] / (1 - found[free])) - logit))
    return np.asarray(chance / (1 - chance))


def hit_chances(
    shares: Floats, parts: npt.ArrayLike, top_k: int, *, num_groups: int = 1, topk_groups: int = 1
) -> Floats:
    """Return for each place the chance that some expert of a token lies there, ``[num_places]``.

    ``shares`` are the loads of the experts; ``parts[expert, place]`` the part of an expert's messages that goes to a
    place (1 or 0, less with replicas). The sum is the expected number of different places. With groups the loads are
    those that experts would have without them.

    >>> chances = hit_chances(np.full(256, 1 / 256), np.repeat(np.eye(8), 32, axis=0), 8, num_groups=8, topk_groups=4)
    >>> round(float(chances.sum()), 3)
    3.629

    Raises:
        ValueError: groups that experts do not divide over, or fewer experts in them than top_k.
    """
    check_groups(shares.size, top_k, num_groups, topk_groups)
    spread = np.asarray(parts, dtype=np.float64)
    odds = expert_odds(shares, top_k)
    odds /= odds[odds > 0].mean()
    if topk_groups < num_groups:
        odds = np.maximum(odds, CERTAIN)  # so that some set fits into few groups, whatever the loads
    keep = np.concatenate((np.ones((1, shares.size)), 1 - spread.T))  # the first row misses no place
    weight = (keep * odds).reshape(len(keep), num_groups, -1)
    sums = np.zeros((len(keep), num_groups, top_k + 1))  # elementary symmetric polynomials of each group's odds
    sums[..., 0] = 1.0
    for index in range(weight.shape[2]):
        sums[..., 1:] += sums[..., :-1] * weight[..., index, None]
    ways = np.zeros((len(keep), topk_groups + 1, top_k + 1))
    ways[:, 0, 0] = 1.0
    for group in range(num_groups):
        for picked in range(min(group + 1, topk_groups), 0, -1):
            for taken in range(top_k + 1):
                ways[:, picked, taken:] += ways[:, picked - 1, : top_k + 1 - taken] * sums[:, group, taken, None]
    missed = ways[:, topk_groups, top_k]
    return np.asarray(np.clip(1 - missed[1:] / missed[0], 0.0, 1.0))
