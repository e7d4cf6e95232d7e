"""Who holds which part of the KV cache, and who sends which part to whom when two pools are cut differently."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.layout import Layout, process_groups
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.placement import attention_tp, stage_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank of a pool holds: the replica, layers, heads, and which share of the tokens."""

    rank: int
    replica: int
    layers: range
    heads: range
    tp_rank: int
    context_rank: int
    token_class: int


def heads_of(tp_rank: int, tp: int, num_heads: int) -> range:
    """Return the KV heads of one TP rank; where there are more ranks than heads, several hold the same one.

    >>> heads_of(1, 4, 8), heads_of(5, 8, 4), heads_of(2, 3, 8)
    (range(2, 4), range(2, 3), range(5, 8))
    """
    first = tp_rank * num_heads // tp
    return range(first, max(first + 1, (tp_rank + 1) * num_heads // tp))


def holdings(shape: ModelShape, layout: Layout, framework: str) -> tuple[Holding, ...]:
    """Return what each rank of a pool holds, by its rank within the pool."""
    groups = process_groups(layout, framework)
    tp = attention_tp(layout, framework)
    stages = stage_layers(shape.num_layers, layout, framework)
    stage_of = {rank: stage for group in groups["pp"] for stage, rank in enumerate(group)}
    context_of = {rank: place for group in groups["cp"] for place, rank in enumerate(group)}
    if tp == layout.tp:
        tensor = groups["tp"]
    elif framework == "sglang":
        tensor = groups["attn_tp"]
    else:
        tensor = tuple((rank,) for group in groups["tp"] for rank in group)
    place_of = {rank: place for group in tensor for place, rank in enumerate(group)}
    replica_of: dict[int, int] = {}
    seen: dict[tuple[int, int, int], int] = {}
    for rank in sorted(place_of):
        corner = (stage_of[rank], context_of[rank], place_of[rank])
        replica_of[rank] = seen.get(corner, 0)
        seen[corner] = replica_of[rank] + 1
    return tuple(
        Holding(
            rank=rank,
            replica=replica_of[rank],
            layers=stages[stage_of[rank]],
            heads=heads_of(place_of[rank], tp, shape.kv_heads_stored),
            tp_rank=place_of[rank],
            context_rank=context_of[rank],
            token_class=place_of[rank] % layout.dcp,
        )
        for rank in sorted(place_of)
    )


def token_owners(num_tokens: int, layout: Layout) -> npt.NDArray[np.int64]:
    """Return for each token which share it is in, context rank x dcp + decode-context class, ``[num_tokens]``.

    Context parallelism cuts the sequence into 2 x cp chunks, rank r holding chunks r and 2 x cp - 1 - r, so that causal
    attention is even; decode context parallelism deals tokens out in turn.

    >>> token_owners(8, Layout(cp=2)).tolist(), token_owners(4, Layout(dcp=2, tp=2)).tolist()
    ([0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 0, 1])

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py; vLLM @ 017e9f4448b7 (dcp: token i on i mod dcp).
    """
    token = np.arange(num_tokens, dtype=np.int64)
    chunk = token * 2 * layout.cp // max(1, num_tokens)
    context = np.minimum(chunk, 2 * layout.cp - 1 - chunk)
    return np.asarray(context * layout.dcp + token % layout.dcp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the cache that one rank sends to another: layers x heads x tokens, ranks within their pools."""

    source: int
    destination: int
    num_layers: int
    num_heads: int
    num_tokens: int


def _window_layers(shape: ModelShape, num_tokens: int) -> Iterator[tuple[frozenset[int], int]]:
    """Yield sets of layers with the number of latest tokens that they keep."""
    sliding = frozenset(shape.sliding_layers)
    yield frozenset(range(shape.num_layers)) - sliding, num_tokens
    if sliding and shape.sliding_window is not None:
        yield sliding, min(num_tokens, shape.sliding_window)


def pieces(
    shape: ModelShape,
    prefill: Layout,
    decode: Layout,
    *,
    framework: str,
    requests: tuple[tuple[int, int, int], ...],
) -> Iterator[Piece]:
    """Yield who sends what, for requests given as (prefill replica, decode replica, tokens).

    The parts of two ranks overlap in a box of layers, heads and tokens. Of prefill ranks that hold the same box one
    sends: rank r x P // D of its TP group where that one holds it (vLLM), else the first.

    Source: vLLM @ 017e9f4448b7 nixl/tp_mapping.py compute_tp_mapping; Megatron-LM @ d98e8a64ddf3
    core/inference/disaggregation/kv_reshard.py plan_kv_reshard.
    """
    sources, sinks = holdings(shape, prefill, framework), holdings(shape, decode, framework)
    prefill_tp, decode_tp = attention_tp(prefill, framework), attention_tp(decode, framework)
    for prefill_replica, decode_replica, num_tokens in requests:
        givers = [holding for holding in sources if holding.replica == prefill_replica]
        takers = [holding for holding in sinks if holding.replica == decode_replica]
        by_place: dict[tuple[int, int, range], list[Holding]] = {}
        for giver in givers:
            by_place.setdefault((giver.context_rank, giver.token_class, giver.layers), []).append(giver)
        for layers, kept in _window_layers(shape, num_tokens):
            start = num_tokens - kept
            given = token_owners(num_tokens, prefill)[start:]
            taken = token_owners(num_tokens, decode)[start:]
            shares = np.zeros((prefill.cp * prefill.dcp, decode.cp * decode.dcp), dtype=np.int64)
            np.add.at(shares, (given, taken), 1)
            for taker in takers:
                preferred = taker.tp_rank * prefill_tp // decode_tp if framework == "vllm" else 0
                for (context_rank, token_class, stage), holders in by_place.items():
                    common = len(layers & set(stage) & set(taker.layers))
                    tokens = int(
                        shares[
                            context_rank * prefill.dcp + token_class,
                            taker.context_rank * decode.dcp + taker.token_class,
                        ]
                    )
                    if not common or not tokens:
                        continue
                    heads: dict[int, int] = {}
                    for head in taker.heads:
                        having = [holder for holder in holders if head in holder.heads]
                        chosen = next((one for one in having if one.tp_rank == preferred), None) or having[0]
                        heads[chosen.rank] = heads.get(chosen.rank, 0) + 1
                    for source, num_heads in heads.items():
                        yield Piece(
                            source=source,
                            destination=taker.rank,
                            num_layers=common,
                            num_heads=num_heads,
                            num_tokens=tokens,
                        )
