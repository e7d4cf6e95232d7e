"""What one curve says between and beyond its sizes, and what curves of other groups say at the same traffic.

Between sizes: the mean, in log time, of the straight line in size and the straight line in log size. Beyond them:
latency plus bytes over bandwidth through the last sizes, weighted by relative error.
Source: Hockney (1994) for the tail; Thakur, Rabenseifner and Gropp (2005) for the traffic of a rank.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

TAIL_SIZES = 3  # the last sizes that the line beyond them is drawn through
LINEAR_WEIGHT = 0.6  # of the straight line in size; the rest is the straight line in log size
GROUP_SLOPE = 0.6  # share of the trend in log2 ranks (at equal traffic) that is carried on beyond the groups measured


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
    weight = (last[:-1] / sizes[-1]) ** 0.5 / lasting[:-1] ** 2
    slope = float((weight * reach * rise).sum() / max((weight * reach * reach).sum(), 1e-300))
    slope = min(max(slope, 0.0), times[-1] / sizes[-1])
    answer: Floats = times[-1] + slope * (wanted - sizes[-1])
    return answer


def from_groups(groups: Floats, logs: Floats, wanted: float) -> Floats:
    """Return log time at ``wanted`` ranks from ``logs`` [groups, cells] at equal traffic; ``groups`` are log2 ranks.

    Between groups a straight line; beyond them a part of the trend of the nearest two, and of one group a copy.
    """
    if len(groups) == 1:
        copied: Floats = logs[0]
        return copied
    order = np.argsort(groups)
    groups, logs = groups[order], logs[order]
    if wanted < groups[0]:
        near, other = 0, 1
    elif wanted > groups[-1]:
        near, other = -1, -2
    else:
        above = int(np.searchsorted(groups, wanted))
        share = (wanted - groups[above - 1]) / (groups[above] - groups[above - 1])
        between: Floats = (1 - share) * logs[above - 1] + share * logs[above]
        return between
    slope = (logs[near] - logs[other]) / (groups[near] - groups[other])
    beyond: Floats = logs[near] + GROUP_SLOPE * slope * (wanted - groups[near])
    return beyond
