"""Expert loads: the share of all messages that each expert gets, from a distribution or from recorded counts."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
MAX_LOGARITHM = 600.0  # of a load: sums over experts stay below the largest float


def _uniform(num_experts: int, num_tokens: int, parameter: float, rng: np.random.Generator) -> Floats:
    return np.ones(num_experts)


def _power_law(num_experts: int, num_tokens: int, parameter: float, rng: np.random.Generator) -> Floats:
    """Draw loads with density x^-alpha on [1, 0.8 tokens] by the inverse of its distribution function.

    Experts are drawn one by one, so that hot ones lie anywhere: the seed is also the permutation of the experts.

    Source: aiconfigurator @ 095f58a5, its power-law expert load; alpha 1.01 for DeepSeek models, 1.2 for Qwen,
    Mixtral and gpt-oss, 0.6 for prefill with a load balancer.
    """
    low, high = 1.0, max(2.0, 0.8 * num_tokens)
    place = rng.random(num_experts)
    if abs(parameter - 1) < 1e-9:
        return np.asarray(low * (high / low) ** place)
    exponent = 1 - parameter
    return np.asarray((low**exponent + place * (high**exponent - low**exponent)) ** (1 / exponent))


def _lognormal(num_experts: int, num_tokens: int, parameter: float, rng: np.random.Generator) -> Floats:
    """Draw loads whose logarithm is normal; shares are what counts, so that huge ones are scaled to stay numbers."""
    logarithms = parameter * rng.standard_normal(num_experts)
    return np.asarray(np.exp(logarithms - max(0.0, logarithms.max() - MAX_LOGARITHM)))


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

    Source: vLLM @ 017e9f4448b7 layers/fused_moe/expert_map_manager.py determine_expert_map, linear placement.
    """
    return tuple(num_experts // num_ranks + (rank < num_experts % num_ranks) for rank in range(num_ranks))
