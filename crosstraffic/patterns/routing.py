"""Expert load: which rank's experts the tokens go to, and the byte matrix of dispatch and combine that follows.

Counts are (token, expert) messages, nothing de-duplicated: a token with ``top_k`` experts on one rank is sent there
``top_k`` times, as low-latency dispatch kernels and plain all-to-all dispatchers do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.matrix import Matrix

Floats = npt.NDArray[np.float64]
Direction = Literal["dispatch", "combine"]


def _uniform(num_experts: int, num_tokens: int, parameter: float, rng: np.random.Generator) -> Floats:
    return np.ones(num_experts)


def _power_law(num_experts: int, num_tokens: int, parameter: float, rng: np.random.Generator) -> Floats:
    """Draw loads with density x^-alpha on [1, 0.8 tokens] by the inverse of its distribution function.

    Source: aiconfigurator @ 095f58a5, its power-law expert load.
    """
    low, high = 1.0, max(2.0, 0.8 * num_tokens)
    place = rng.random(num_experts)
    if abs(parameter - 1) < 1e-9:
        return np.asarray(low * (high / low) ** place)
    exponent = 1 - parameter
    return np.asarray((low**exponent + place * (high**exponent - low**exponent)) ** (1 / exponent))


def _lognormal(num_experts: int, num_tokens: int, parameter: float, rng: np.random.Generator) -> Floats:
    return np.asarray(np.exp(parameter * rng.standard_normal(num_experts)))


def _k_hot(num_experts: int, num_tokens: int, parameter: float, rng: np.random.Generator) -> Floats:
    load = np.zeros(num_experts)
    load[rng.permutation(num_experts)[: int(parameter)]] = 1.0
    return load


LOADS: Mapping[str, Callable[[int, int, float, np.random.Generator], Floats]] = {
    "uniform": _uniform,
    "power_law": _power_law,
    "lognormal": _lognormal,
    "k_hot": _k_hot,
}
DISTRIBUTIONS: tuple[str, ...] = (*LOADS, "one_hot", "explicit")


def expert_shares(
    *,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    distribution: str,
    parameter: float = 0.0,
    seed: int = 0,
    weights: tuple[float, ...] = (),
) -> Floats:
    """Return the share of all messages that each expert gets, ``[num_experts]``, summing to 1.

    A token picks ``top_k`` different experts, so no expert gets more than 1 / top_k of the messages; what a skewed
    load would give above that is spread over the others in proportion. ``num_tokens`` is that of the whole group.

    >>> expert_shares(num_experts=4, top_k=2, num_tokens=8, distribution="explicit", weights=(8, 1, 1, 0)).tolist()
    [0.5, 0.25, 0.25, 0.0]

    Raises:
        ValueError: a distribution without expert shares (one_hot), or weights that give fewer than top_k experts.
    """
    if distribution == "explicit":
        load = np.asarray(weights, dtype=np.float64)
    elif distribution in LOADS:
        load = LOADS[distribution](num_experts, num_tokens, parameter, np.random.default_rng(seed))
    else:
        raise ValueError(f"no expert shares for distribution: {distribution!r}; allowed: {', '.join(LOADS)}, explicit")
    if np.count_nonzero(load) < top_k:
        raise ValueError(f"fewer experts with load than top_k: {np.count_nonzero(load)} of {top_k}")
    share = load / load.sum()
    capped = np.zeros(num_experts, dtype=bool)
    limit = 1 / top_k
    while np.any(over := ~capped & (share > limit * (1 + 1e-12))):
        capped |= over
        share[capped] = limit
        rest = load[~capped].sum()
        if rest > 0:
            share[~capped] = load[~capped] / rest * max(0.0, 1 - limit * capped.sum())
    return np.asarray(share)


def experts_per_rank(num_experts: int, num_ranks: int) -> tuple[int, ...]:
    """Place experts in order, the first ranks holding one more where they do not divide.

    >>> experts_per_rank(8, 3)
    (3, 3, 2)

    Source: vLLM @ 017e9f4448b7, fused_moe layer, linear expert placement.
    """
    return tuple(num_experts // num_ranks + (rank < num_experts % num_ranks) for rank in range(num_ranks))


def round_rows(shares: Floats, total: int, num_rows: int) -> Matrix:
    """Return whole counts ``[num_rows, n]``: rows sum to ``total``, columns to their share of all rows (within one).

    What a row cannot give in whole messages is carried to the next one; equal claims go to the destination that comes
    first after the row's own index, so that equal shares give a circulant matrix.

    >>> round_rows(np.array([0.25, 0.25, 0.25, 0.25]), 2, 4).tolist()
    [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]
    """
    num_columns = len(shares)
    exact = shares * total
    base = np.floor(exact + 1e-9).astype(np.int64)
    left = total - int(base.sum())
    matrix = np.tile(base, (num_rows, 1))
    if left == 0:
        return matrix
    given = np.zeros(num_columns)
    fraction = np.maximum(exact - base, 0.0)
    index = np.arange(num_columns)
    for row in range(num_rows):
        claim = np.where(fraction > 1e-9, (row + 1) * fraction - given, -np.inf)
        chosen = np.lexsort(((index - row) % num_columns, -np.round(claim, 9)))[:left]
        matrix[row, chosen] += 1
        given[chosen] += 1
    return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Dispatch or combine of a mixture of experts over one group; the same expert load in every group.

    ``num_tokens`` is the number of tokens that each rank of the group routes. ``parameter``: alpha of power_law, sigma
    of lognormal, how many experts of k_hot, which rank of one_hot; ``weights`` the load per expert of explicit. one_hot
    sends every message to one rank, whatever experts it holds: the worst case.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    bytes_per_message: int
    distribution: str = "uniform"
    parameter: float = 0.0
    seed: int = 0
    direction: Direction = "dispatch"
    weights: tuple[float, ...] = ()
    kind: str = "routed"

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"unknown routing: {self.distribution!r}; allowed: {', '.join(DISTRIBUTIONS)}")
        if self.direction not in ("dispatch", "combine"):
            raise ValueError(f"unknown direction: {self.direction!r}; allowed: dispatch, combine")
        if self.num_tokens < 0 or self.bytes_per_message < 0:
            raise ValueError("num_tokens and bytes_per_message must not be negative")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be between 1 and the number of experts: {self.top_k} of {self.num_experts}")
        if self.distribution in ("power_law", "lognormal") and self.parameter < 0:
            raise ValueError(f"{self.distribution}: the parameter must not be negative: {self.parameter}")
        if self.distribution == "k_hot" and not self.top_k <= self.parameter <= self.num_experts:
            raise ValueError(
                f"k_hot: the number of hot experts must be between top_k={self.top_k} and {self.num_experts}: "
                f"{self.parameter:g}"
            )
        if self.distribution == "one_hot" and (self.parameter < 0 or self.parameter != int(self.parameter)):
            raise ValueError(f"one_hot: the rank must be a whole number from 0: {self.parameter:g}")
        if (self.distribution == "explicit") != bool(self.weights):
            raise ValueError("weights go with distribution explicit, and only with it")
        if self.weights and (len(self.weights) != self.num_experts or min(self.weights) < 0):
            raise ValueError(
                f"explicit: {self.num_experts} weights are needed, none negative: {len(self.weights)} given"
            )

    def counts(self, num_ranks: int) -> Matrix:
        """Return messages per call ``[source][destination]`` of dispatch; each row sums to num_tokens * top_k."""
        return _counts(self, num_ranks)

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        """Return bytes per call, ``[num_ranks, num_ranks]``; combine is dispatch's way back."""
        counts = _counts(self, num_ranks)
        return np.ascontiguousarray((counts.T if self.direction == "combine" else counts) * self.bytes_per_message)


@lru_cache(maxsize=8)
def _counts(rule: Routed, num_ranks: int) -> Matrix:
    total = rule.num_tokens * rule.top_k
    if rule.distribution == "one_hot":
        if rule.parameter >= num_ranks:
            raise ValueError(f"one_hot: rank {rule.parameter:g} is not in a group of {num_ranks} ranks")
        counts = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        counts[:, int(rule.parameter)] = total
        return counts
    if num_ranks > rule.num_experts:
        raise ValueError(f"more ranks than experts: {num_ranks} ranks, {rule.num_experts} experts")
    shares = expert_shares(
        num_experts=rule.num_experts,
        top_k=rule.top_k,
        num_tokens=rule.num_tokens * num_ranks,
        distribution=rule.distribution,
        parameter=rule.parameter,
        seed=rule.seed,
        weights=rule.weights,
    )
    ends = np.cumsum(experts_per_rank(rule.num_experts, num_ranks))
    return round_rows(np.diff(np.concatenate(([0.0], np.cumsum(shares)[ends - 1]))), total, num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """How uneven a set of loads is; all figures are 0 (max_over_mean 1) for equal loads."""

    max_over_mean: float
    cv: float
    gini: float
    zero_share: float


def imbalance(loads: npt.ArrayLike) -> Imbalance:
    """Return max / mean, coefficient of variation, Gini coefficient and share of zeros of loads (per rank or expert).

    >>> imbalance([0, 0, 0, 4])
    Imbalance(max_over_mean=4.0, cv=1.7320508075688772, gini=0.75, zero_share=0.75)
    """
    values = np.sort(np.asarray(loads, dtype=np.float64).ravel())
    mean = float(values.mean()) if values.size else 0.0
    if mean == 0:
        return Imbalance(max_over_mean=1.0, cv=0.0, gini=0.0, zero_share=1.0 if values.size else 0.0)
    place = 2 * np.arange(1, values.size + 1) - values.size - 1
    return Imbalance(
        max_over_mean=float(values[-1]) / mean,
        cv=float(values.std()) / mean,
        gini=float((place * values).sum() / (values.size * values.sum())),
        zero_share=float((values == 0).mean()),
    )


def parse_routing(text: str) -> tuple[str, float]:
    """Read ``uniform``, ``power_law:1.2``, ``lognormal:1``, ``k_hot:8`` or ``one_hot:0`` into name and parameter.

    >>> parse_routing("power_law:1.2"), parse_routing("uniform")
    (('power_law', 1.2), ('uniform', 0.0))

    Raises:
        ValueError: unknown name, or a parameter that is missing, not a number, or not wanted.
    """
    name, _, value = text.partition(":")
    if name not in DISTRIBUTIONS or name == "explicit":
        raise ValueError(
            f"unknown routing: {text!r}; allowed: uniform, power_law:A, lognormal:S, k_hot:N, one_hot:RANK"
        )
    if (name == "uniform") == bool(value):
        raise ValueError(f"routing {name} takes {'no' if name == 'uniform' else 'a'} parameter: {text!r}")
    try:
        return name, float(value) if value else 0.0
    except ValueError as error:
        raise ValueError(f"routing {name}: not a number: {value!r}") from error
