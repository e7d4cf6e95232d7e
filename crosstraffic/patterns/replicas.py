"""Replicas of hot experts (EPLB): which expert each slot of each rank holds, and what it costs to move them."""

from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.loads import Floats, experts_per_rank
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.weights import expert_bytes

Indices = npt.NDArray[np.int64]
SCALE_BLOCK = 128  # one fp32 scale for each 128 x 128 weights of an fp8 expert


def balanced_packing(weights: npt.ArrayLike, num_packs: int) -> Indices:
    """Pack items into packs of equal count and near equal weight: ``[num_packs, items / num_packs]``.

    Items go from the heaviest to the lightest, each to the lightest pack that has room; packs of one keep the order.

    >>> balanced_packing([9, 1, 5, 4], 2).tolist()
    [[0, 1], [2, 3]]

    Raises:
        ValueError: the items do not divide over the packs.

    Source: README of github.com/deepseek-ai/EPLB @ d52c72d5.
    """
    loads = np.asarray(weights, dtype=np.float64)
    if num_packs < 1 or loads.size % num_packs:
        raise ValueError(f"{loads.size} items do not divide over {num_packs} packs")
    room = loads.size // num_packs
    if room == 1:
        return np.arange(num_packs, dtype=np.int64).reshape(-1, 1)
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    lightest = [(0.0, pack) for pack in range(num_packs)]  # a heap of those with room; the first one of equals
    for item in np.argsort(-loads, kind="stable"):
        total, pack = heappop(lightest)
        packs[pack].append(int(item))
        if len(packs[pack]) < room:
            heappush(lightest, (total + float(loads[item]), pack))
    return np.array(packs, dtype=np.int64)


def replicate_experts(weights: npt.ArrayLike, num_slots: int) -> Indices:
    """Return the expert of each slot: each once, then one more of whichever has the most load per replica.

    >>> replicate_experts([1, 9, 4], 5).tolist()
    [0, 1, 2, 1, 1]

    Raises:
        ValueError: fewer slots than experts.
    """
    loads = np.asarray(weights, dtype=np.float64)
    if num_slots < loads.size:
        raise ValueError(f"fewer slots than experts: {num_slots} of {loads.size}")
    slots, count = list(range(loads.size)), np.ones(loads.size)
    for _ in range(num_slots - loads.size):
        hottest = int(np.argmax(loads / count))
        slots.append(hottest)
        count[hottest] += 1
    return np.array(slots, dtype=np.int64)


def rebalance(
    weights: npt.ArrayLike, *, num_slots: int, num_groups: int = 1, num_nodes: int = 1, num_ranks: int
) -> Indices:
    """Return the expert of each slot, ``[num_slots]``, slots in the order of ranks, for the loads of one layer.

    Where the expert groups divide over the nodes, groups are packed to nodes first, experts replicated within their
    node, and replicas packed to the ranks of the node (so that routing to few groups stays routing to few nodes).
    Otherwise experts are replicated and packed over all ranks, whatever their group.

    >>> rebalance([90, 132, 40, 61], num_slots=6, num_ranks=2).tolist()
    [1, 3, 2, 1, 0, 0]

    Raises:
        ValueError: experts that do not divide over the groups, or slots over the ranks, or ranks over the nodes.

    Source: README of github.com/deepseek-ai/EPLB @ d52c72d5, hierarchical and global load balancing.
    """
    loads = np.asarray(weights, dtype=np.float64)
    for what, count, over, parts in (
        ("experts", loads.size, "groups", num_groups),
        ("slots", num_slots, "ranks", num_ranks),
        ("ranks", num_ranks, "nodes", num_nodes),
    ):
        if parts < 1 or count % parts:
            raise ValueError(f"{count} {what} do not divide over {parts} {over}")
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    group_size = loads.size // num_groups
    slots: list[Indices] = []
    for groups in balanced_packing(loads.reshape(num_groups, group_size).sum(axis=1), num_nodes):
        experts = (groups[:, None] * group_size + np.arange(group_size)).ravel()
        own = replicate_experts(loads[experts], num_slots // num_nodes)
        per_replica = loads[experts][own] / np.bincount(own)[own]
        slots.append(experts[own[balanced_packing(per_replica, num_ranks // num_nodes).ravel()]])
    return np.concatenate(slots)


def placement(
    num_experts: int,
    num_ranks: int,
    *,
    num_redundant: int = 0,
    weights: npt.ArrayLike | None = None,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> Floats:
    """Return the part of each expert's messages that goes to each rank, ``[num_experts, num_ranks]``, rows sum to 1.

    Experts lie in order. With redundant experts they lie as ``rebalance`` puts them for the loads ``weights``, and each
    replica of an expert gets an equal part.

    >>> placement(3, 2).tolist()
    [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]
    """
    parts = np.zeros((num_experts, num_ranks))
    if num_redundant == 0:
        parts[np.arange(num_experts), np.repeat(np.arange(num_ranks), experts_per_rank(num_experts, num_ranks))] = 1.0
        return parts
    slots = rebalance(
        np.ones(num_experts) if weights is None else weights,
        num_slots=num_experts + num_redundant,
        num_groups=num_groups,
        num_nodes=num_nodes,
        num_ranks=num_ranks,
    )
    ranks = np.repeat(np.arange(num_ranks), slots.size // num_ranks)
    np.add.at(parts, (slots, ranks), 1 / np.bincount(slots)[slots])
    return parts


def balancedness(loads: npt.ArrayLike) -> float:
    """Return mean / max of the loads of ranks: 1 where all are equal.

    >>> balancedness([2, 2, 4, 0])
    0.5

    Source: vLLM @ 017e9f4448b7 distributed/eplb/eplb_state.py.
    """
    values = np.asarray(loads, dtype=np.float64)
    return float(values.mean() / values.max()) if values.size and values.max() > 0 else 1.0


def rebalance_bytes(shape: ModelShape, num_slots: int, *, dtype: str = "fp8", num_layers: int | None = None) -> int:
    """Return the most bytes that a rank takes in when ``num_slots`` of its slots change in each layer with experts.

    Scales of an fp8 expert are not counted.

    Raises:
        ValueError: a negative number, a model without experts, or an unknown dtype.

    Source: vLLM @ 017e9f4448b7 distributed/eplb/rebalance_execute.py: each new slot gets its expert whole.
    """
    if num_slots < 0:
        raise ValueError(f"num_slots must not be negative: {num_slots}")
    if not shape.moe_layers:
        raise ValueError(f"{shape.name} has no experts")
    layers = shape.num_moe_layers if num_layers is None else num_layers
    return num_slots * layers * expert_bytes(shape, dtype, with_scales=False)


def host_copy_bytes(num_layers: int, num_experts: int, bytes_per_expert: int) -> int:
    """Return bytes of a copy of all experts in host memory, from which an online balancer fills slots.

    >>> host_copy_bytes(58, 256, 24 * 2**20) // 2**30
    348

    Source: TensorRT-LLM blog 4, Scaling Expert Parallelism in TensorRT-LLM (24 MiB an expert in FP4).
    """
    return num_layers * num_experts * bytes_per_expert
