"""Who holds which part of the KV cache, and who sends which part to whom when two pools are cut differently."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.cache_parts import Part
from crosstraffic.patterns.layout import Layout, process_groups
from crosstraffic.patterns.matrix import Matrix
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.placement import attention_tp
from crosstraffic.patterns.stages import stage_layers
from crosstraffic.patterns.zigzag import CUTS, token_ranks

Vector = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank of a pool holds: the replica, layers, KV heads, and which share of the tokens.

    ``context_rank`` is its place in the prefill-context group. Ranks of one replica with the same stage, ``tp_rank``
    and ``share`` hold the same.
    """

    rank: int
    replica: int
    stage: int
    layers: range
    heads: range
    tp_rank: int
    context_rank: int
    share: int


def heads_of(tp_rank: int, tp: int, num_heads: int) -> range:
    """Return the KV heads of one TP rank; where there are more ranks than heads, several hold the same one.

    >>> heads_of(1, 4, 8), heads_of(5, 8, 4), heads_of(2, 3, 8)
    (range(2, 4), range(2, 3), range(5, 8))
    """
    first = tp_rank * num_heads // tp
    return range(first, max(first + 1, (tp_rank + 1) * num_heads // tp))


def cuts_by_context(framework: str) -> bool:
    """Tell whether prefill context parallelism leaves each rank its own share of the KV cache.

    vLLM and SGLang gather K and V: every context rank keeps all of them (decode context parallelism cuts the cache).
    Attention of Megatron-Core and TensorRT-LLM leaves them where they are.

    Source: vLLM @ 017e9f4448b7 v1/worker/block_table.py (TOTAL_CP_WORLD_SIZE is that of dcp); SGLang @ 6ed5780c4fd3
    disaggregation/common/conn.py is_dummy_cp_rank (context rank 0 sends all of it).
    """
    return framework in ("megatron", "tensorrt_llm")


def num_shares(layout: Layout, framework: str) -> int:
    """Return into how many shares the tokens of a request are cut."""
    return layout.cp if cuts_by_context(framework) else layout.dcp


def token_shares(num_tokens: int, layout: Layout, framework: str) -> Vector:
    """Return for each token which share it is in, ``[num_tokens]``.

    Decode context parallelism deals tokens out in turn; context parallelism as in ``zigzag``.

    >>> token_shares(8, Layout(cp=2), "megatron").tolist(), token_shares(4, Layout(dcp=2, tp=2), "vllm").tolist()
    ([0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 0, 1])

    Source: vLLM @ 017e9f4448b7 v1/worker/gpu/block_table.py (cp_kv_cache_interleave_size 1); SGLang @ 6ed5780c4fd3
    disaggregation/common/utils.py build_dcp_token_transfer_plan.
    """
    if cuts_by_context(framework):
        return token_ranks(num_tokens, layout.cp, CUTS[framework])
    return np.arange(num_tokens, dtype=np.int64) % layout.dcp


def holdings(shape: ModelShape, layout: Layout, framework: str) -> tuple[Holding, ...]:
    """Return what each rank of a pool holds, by its rank within the pool."""
    groups = process_groups(layout, framework)
    tp = attention_tp(layout, framework)
    stages = stage_layers(shape.num_layers, layout, framework)
    stage_of = {rank: stage for group in groups["pp"] for stage, rank in enumerate(group)}
    context_of = {rank: place for group in groups["cp"] for place, rank in enumerate(group)}
    share_of = {rank: place for group in groups.get("dcp", ()) for place, rank in enumerate(group)}
    if cuts_by_context(framework):
        share_of = context_of
    if tp == layout.tp:
        tensor = groups["tp"]
    elif framework == "sglang":
        tensor = groups["attn_tp"]
    else:
        tensor = tuple((rank,) for group in groups["tp"] for rank in group)
    place_of = {rank: place for group in tensor for place, rank in enumerate(group)}
    seen: dict[tuple[int, int, int], int] = {}
    found: list[Holding] = []
    for rank in sorted(place_of):
        corner = (stage_of[rank], context_of[rank], place_of[rank])
        seen[corner] = seen.get(corner, -1) + 1
        found.append(
            Holding(
                rank=rank,
                replica=seen[corner],
                stage=stage_of[rank],
                layers=stages[stage_of[rank]],
                heads=heads_of(place_of[rank], tp, shape.kv_heads_stored),
                tp_rank=place_of[rank],
                context_rank=context_of[rank],
                share=share_of.get(rank, 0),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Ranks of one or several equal instances by replica and corner, and what each corner of a replica holds.

    ``ranks``: ``[num_replicas, num_corners]``; the other arrays are ``[num_corners]``. ``is_source`` marks the first
    corner that holds something: of those that hold the same one sends.
    """

    layout: Layout
    framework: str
    tp: int
    stages: tuple[range, ...]
    ranks: Matrix
    stage: Vector
    place: Vector
    share: Vector
    is_source: npt.NDArray[np.bool_]

    @property
    def num_replicas(self) -> int:
        """Replicas of all instances."""
        return len(self.ranks)


def make_pool(shape: ModelShape, layout: Layout, framework: str, instances: int = 1) -> Pool:
    """Return the ranks of ``instances`` of a layout, one behind the other, by what they hold."""
    held = holdings(shape, layout, framework)
    by_replica: dict[int, list[Holding]] = {}
    for one in held:
        by_replica.setdefault(one.replica, []).append(one)
    for corners in by_replica.values():
        corners.sort(key=lambda one: (one.stage, one.context_rank, one.tp_rank))
    ranks = np.array([[one.rank for one in by_replica[replica]] for replica in sorted(by_replica)], dtype=np.int64)
    first = by_replica[0]
    seen: set[tuple[int, int, int]] = set()
    is_source = []
    for one in first:
        corner = (one.stage, one.tp_rank, one.share)
        is_source.append(corner not in seen)
        seen.add(corner)
    return Pool(
        layout=layout,
        framework=framework,
        tp=attention_tp(layout, framework),
        stages=stage_layers(shape.num_layers, layout, framework),
        ranks=np.concatenate([ranks + instance * len(held) for instance in range(instances)]),
        stage=np.array([one.stage for one in first], dtype=np.int64),
        place=np.array([one.tp_rank for one in first], dtype=np.int64),
        share=np.array([one.share for one in first], dtype=np.int64),
        is_source=np.array(is_source),
    )


def head_flow(
    num_heads: int, prefill_tp: int, decode_tp: int, *, prefers_own: bool, places: Iterable[int] | None = None
) -> Matrix:
    """Return how many heads each prefill place sends to each decode place, ``[prefill_tp, decode_tp]``.

    Each decode rank gets each of its heads once. Of ranks that hold the same head one sends: rank r x P // D of the
    prefill TP group where that one holds it (``prefers_own``: vLLM, SGLang), else the first one. ``places`` are the
    prefill places that hold anything, all by default.

    SGLang's ranks that hold a copy of a head (P > K, P > D) each send it, one over the other; it is counted once.

    >>> head_flow(8, 4, 2, prefers_own=True).tolist()
    [[2, 0], [2, 0], [0, 2], [0, 2]]
    >>> head_flow(1, 4, 2, prefers_own=True).T.tolist(), head_flow(1, 4, 2, prefers_own=False).T.tolist()
    ([[1, 0, 0, 0], [0, 0, 1, 0]], [[1, 0, 0, 0], [1, 0, 0, 0]])

    Raises:
        ValueError: a head that no place holds.

    Source: vLLM @ 017e9f4448b7 kv_connector/v1/nixl/tp_mapping.py compute_tp_mapping; SGLang @ 6ed5780c4fd3
    disaggregation/common/conn.py _resolve_rank_mapping; Megatron-LM @ d98e8a64ddf3
    core/inference/disaggregation/kv_reshard.py plan_kv_reshard.
    """
    holders = np.arange(prefill_tp, dtype=np.int64) if places is None else np.array(sorted(places), dtype=np.int64)
    ours, theirs = _intervals(holders, prefill_tp, num_heads), np.arange(decode_tp, dtype=np.int64)
    first, end = _intervals(theirs, decode_tp, num_heads)
    taker = np.repeat(theirs, end - first)
    head = np.arange(len(taker)) - np.repeat(np.cumsum(end - first) - end, end - first)
    found = np.searchsorted(ours[1], head, side="right")
    if len(holders) == 0 or (found == len(holders)).any() or (ours[0][found] > head).any():
        raise ValueError(f"no rank holds some of {num_heads} heads: places {holders.tolist()} of {prefill_tp}")
    source = holders[found]
    if prefers_own:
        own = taker * prefill_tp // decode_tp
        start, stop = _intervals(own, prefill_tp, num_heads)
        source = np.where(np.isin(own, holders) & (start <= head) & (head < stop), own, source)
    flow = np.zeros((prefill_tp, decode_tp), dtype=np.int64)
    np.add.at(flow, (source, taker), 1)
    return flow


def _intervals(places: Vector, tp: int, num_heads: int) -> tuple[Vector, Vector]:
    """Return the first head of each place, and the one behind its last: ``heads_of`` for arrays."""
    first = places * num_heads // tp
    return first, np.maximum(first + 1, (places + 1) * num_heads // tp)


def head_offset(decode_rank: int, prefill_tp: int, decode_tp: int, num_heads: int) -> int:
    """Return where in the heads of its one prefill rank a decode rank reads, in units of what it reads (D > P).

    >>> [head_offset(rank, 2, 8, 4) for rank in range(8)]
    [0, 0, 1, 1, 0, 0, 1, 1]

    Source: vLLM @ 017e9f4448b7 kv_connector/v1/nixl/tp_mapping.py compute_tp_mapping, rank_offset_factor.
    """
    if decode_tp <= prefill_tp or num_heads == 1:
        return 0
    if decode_tp > num_heads:
        return decode_rank * num_heads // decode_tp - decode_rank * prefill_tp // decode_tp * num_heads // prefill_tp
    return decode_rank % (decode_tp // prefill_tp)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """What corners of a prefill replica send to corners of a decode replica of one part: ``[num_pieces]`` each."""

    part: Part
    source: Vector
    destination: Vector
    num_layers: Vector
    num_heads: Vector
    num_entries: Vector

    @property
    def num_bytes(self) -> Vector:
        """Bytes of each piece."""
        return self.num_layers * self.num_heads * self.num_entries * self.part.head_bytes


def _common_shares(part: Part, num_tokens: int, prefill: Pool, decode: Pool) -> Matrix:
    """Return how many entries are in each share of the prefill pool and of the decode pool, ``[shares, shares]``."""
    cut = tuple(num_shares(pool.layout, pool.framework) for pool in (prefill, decode))
    if cut == (1, 1):
        return np.array([[part.num_entries]], dtype=np.int64)
    length = num_tokens if part.is_latest else part.num_entries
    given, taken = (
        token_shares(length, pool.layout, pool.framework)[length - part.num_entries :] for pool in (prefill, decode)
    )
    return np.bincount(given * cut[1] + taken, minlength=cut[0] * cut[1]).reshape(cut)


def part_pieces(part: Part, num_tokens: int, prefill: Pool, decode: Pool) -> Pieces:
    """Return who sends what of one part of a request of ``num_tokens``: boxes of layers, heads and entries.

    What ranks hold is a box each, and two ranks have in common the box where theirs overlap. A state is not cut by
    tokens: each decode rank gets its heads of it from the first prefill rank that has them.
    """
    prefers_own = prefill.framework in ("vllm", "sglang")
    members = np.zeros(max(part.layers) + 1, dtype=np.int64)
    members[list(part.layers)] = 1
    common = np.array(
        [
            [members[max(ours.start, theirs.start) : min(ours.stop, theirs.stop)].sum() for theirs in decode.stages]
            for ours in prefill.stages
        ],
        dtype=np.int64,
    )
    is_source = prefill.is_source
    if part.is_state:
        corners = prefill.stage * prefill.tp + prefill.place
        is_source = np.zeros(len(corners), dtype=np.bool_)
        is_source[np.unique(corners, return_index=True)[1]] = True
    senders = np.flatnonzero(is_source)
    share = np.zeros_like(prefill.share) if part.is_state else prefill.share
    flows = np.zeros((int(share.max()) + 1, prefill.tp, decode.tp), dtype=np.int64)
    for index in range(len(flows)):
        places = set(prefill.place[senders][share[senders] == index].tolist())
        flows[index] = head_flow(part.num_heads, prefill.tp, decode.tp, prefers_own=prefers_own, places=places)
    layers = common[prefill.stage[senders][:, None], decode.stage[None, :]]
    heads = flows[share[senders][:, None], prefill.place[senders][:, None], decode.place[None, :]]
    entries = np.ones_like(layers)
    if not part.is_state:
        shares = _common_shares(part, num_tokens, prefill, decode)
        entries = shares[share[senders][:, None], decode.share[None, :]]
    row, column = np.nonzero((layers > 0) & (heads > 0) & (entries > 0))
    return Pieces(
        part=part,
        source=senders[row],
        destination=column.astype(np.int64),
        num_layers=layers[row, column],
        num_heads=heads[row, column],
        num_entries=entries[row, column],
    )
