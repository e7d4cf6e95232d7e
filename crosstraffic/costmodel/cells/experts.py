"""What one curve says between and beyond its sizes, and what curves of other groups say of this one.

Between sizes: the mean, in log time, of the straight line in size and the straight line in log size. Beyond them:
latency plus bytes over bandwidth through the last sizes, weighted by relative error.
Source: Hockney (1994) for the tail; Thakur, Rabenseifner and Gropp (2005) for the traffic of a rank.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Curve = tuple[Floats, Floats]  # sizes [bytes], ascending, and times [s]

TAIL_SIZES = 5  # the last sizes that the line beyond them is drawn through
TAIL_POWER = 1.5  # of size in the weight of each: the nearer to the end the more; both chosen on A100, H100, B200
LINEAR_WEIGHT = 0.8  # of the straight line in size; the rest is the straight line in log size
# Shares of the trend in log ranks that are carried on beyond the groups measured; chosen on A100, H100 and B200 tables.
TREND_LATENCY = 1.3  # at equal bytes for each peer, latency ruling
TREND_TRANSFER = 1.0  # the same, bandwidth ruling
TREND_PAYLOAD = 0.4  # at equal payload; all-reduce grows by 1.5 from 2 to 4 ranks and by 1.5^0.38 from 4 to 8
ELASTICITY_POWER = 4.0  # how sharply the second takes over from the first


def traffic_factor(op: str, num_ranks: int) -> float:
    """Return bytes that a rank sends for each byte of payload, by nccl-tests' convention.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005).

    >>> traffic_factor("all_reduce", 8), traffic_factor("all_gather", 4), traffic_factor("send_recv", 2)
    (1.75, 0.75, 1.0)
    """
    if num_ranks < 2:
        return 1.0
    if op == "all_reduce":
        return 2.0 * (num_ranks - 1) / num_ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"):
        return (num_ranks - 1) / num_ranks
    return 1.0


def log_time(sizes: Floats, times: Floats, wanted: Floats) -> Floats:
    """Return log time of one curve at ``wanted`` sizes [bytes]; ``sizes`` ascend, at least two of them.

    >>> log_time(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 4.0]), np.array([8.0])).round(6).tolist()
    [2.079442]
    """
    x, y = np.log2(np.maximum(sizes, 1.0)), np.log(times)
    asked = np.log2(np.maximum(wanted, 1.0))
    straight = np.log(np.interp(wanted, sizes, times))
    answer: Floats = LINEAR_WEIGHT * straight + (1 - LINEAR_WEIGHT) * np.interp(asked, x, y)
    above = wanted > sizes[-1]
    if above.any():
        answer[above] = np.log(tail(sizes, times, wanted[above]))
    return answer


def tail(sizes: Floats, times: Floats, wanted: Floats) -> Floats:
    """Return times above the largest size: a line through the last sizes that meets the last time exactly.

    The slope is not below zero and not above the proportional one, so that a time never falls with size nor a rate.
    """
    last, lasting = sizes[-TAIL_SIZES:], times[-TAIL_SIZES:]
    reach, rise = sizes[-1] - last[:-1], times[-1] - lasting[:-1]
    weight = (last[:-1] / sizes[-1]) ** TAIL_POWER / lasting[:-1] ** 2
    slope = float((weight * reach * rise).sum() / max((weight * reach * reach).sum(), 1e-300))
    slope = min(max(slope, 0.0), times[-1] / sizes[-1])
    answer: Floats = times[-1] + slope * (wanted - sizes[-1])
    return answer


def trend(near: Curve, other: Curve, ranks: tuple[int, int, int], wanted: Floats) -> Floats:
    """Return log time at ``ranks[2]`` from curves at ``ranks[0]`` (the nearest) and ``ranks[1]``, on one side of it.

    Where latency counts, curves are compared at equal bytes for each peer, as a library takes the same protocol there,
    and what grows with the group is carried on: the more, the more latency rules (the constant part of a call fades
    beside its steps). Where time is proportional to size they are compared at equal payload, and little of the growth
    is left.
    """
    octaves = np.log2(np.array(ranks, dtype=np.float64))
    steps = (octaves[2] - octaves[0]) / (octaves[0] - octaves[1])
    up = 1.0 if octaves[2] > octaves[0] else -1.0  # towards fewer ranks what grew by a share shrinks by its inverse

    def carried(here: Floats, there: Floats, share: Floats | float) -> Floats:
        answer: Floats = here + np.power(share, up) * (here - there) * steps
        return answer

    by_peer = [wanted * (count / ranks[2]) for count in ranks[:2]]
    elasticity = _elasticity(near, by_peer[0])
    latency_share = TREND_LATENCY + (TREND_TRANSFER - TREND_LATENCY) * elasticity
    at_peer = carried(log_time(*near, by_peer[0]), log_time(*other, by_peer[1]), latency_share)
    at_payload = carried(log_time(*near, wanted), log_time(*other, wanted), TREND_PAYLOAD)
    weight = _elasticity(near, wanted) ** ELASTICITY_POWER
    mixed: Floats = (1 - weight) * at_peer + weight * at_payload
    return mixed


def _elasticity(curve: Curve, wanted: Floats) -> Floats:
    """Return how log time grows with log size: 0 where latency rules, 1 where bandwidth does."""
    grown = (log_time(*curve, 2 * wanted) - log_time(*curve, wanted / 2)) / np.log(4.0)
    answer: Floats = np.clip(grown, 0.0, 1.0)
    return answer


def between(low: Curve, high: Curve, ranks: tuple[int, int, int], wanted: Floats) -> Floats:
    """Return log time at ``ranks[2]``, which lies between ``ranks[0]`` and ``ranks[1]``: a line in log ranks."""
    octaves = np.log2(np.array(ranks, dtype=np.float64))
    share = (octaves[2] - octaves[0]) / (octaves[1] - octaves[0])
    answer: Floats = (1 - share) * log_time(*low, wanted) + share * log_time(*high, wanted)
    return answer
