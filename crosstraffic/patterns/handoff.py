"""Prefill-decode disaggregation: the KV cache of finished prompts moves from one pool of ranks to another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.matrix import Explicit, Matrix
from crosstraffic.patterns.model import ModelShape, dtype_bytes, dtype_name
from crosstraffic.patterns.placement import attention_tp, check_model
from crosstraffic.patterns.reshard import Piece, pieces
from crosstraffic.patterns.step import Block, Step, Task
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.workload import Workload

Rows = tuple[tuple[int, ...], ...]
_SOURCES = {
    "vllm": "vLLM @ 017e9f4448b7 kv_connector/v1/nixl/tp_mapping.py",
    "megatron": "Megatron-LM @ d98e8a64ddf3 core/inference/disaggregation/kv_reshard.py",
    "sglang": "SGLang @ 6ed5780c4fd3 disaggregation, send_kvcache_slice",
    "tensorrt_llm": "reshard as Megatron-LM @ d98e8a64ddf3 kv_reshard.py",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Pieces of memory that a transfer names, ``[prefill rank][decode rank]``: how many, and bytes of the largest.

    The last page of a request counts as a whole one: transfers move pages.
    """

    block_tokens: int
    count: Rows
    bytes: Rows

    @property
    def max_count_per_rank(self) -> int:
        """Most descriptors that one decode rank handles."""
        return max(map(sum, zip(*self.count, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """The traffic of one handoff: its stream, bytes ``[prefill rank][decode rank]`` and descriptors."""

    streams: tuple[Stream, ...]
    matrix_bytes: Rows
    descriptors: Descriptors


def request_pairs(workload: Workload, prefill_replicas: int, decode_replicas: int) -> Counter[tuple[int, int, int]]:
    """Return how many requests of how many tokens go from which prefill replica to which decode replica.

    Request i is prefilled by replica i mod P and decoded by replica i mod D; ``batch`` requests per prefill replica
    share its tokens.

    >>> sorted(request_pairs(Workload(phase="handoff", batch=2, context=10), 1, 3).items())
    [((0, 0, 10), 1), ((0, 1, 10), 1)]
    """
    pairs: Counter[tuple[int, int, int]] = Counter()
    each, rest = divmod(workload.num_tokens, workload.batch)
    for request in range(workload.batch * prefill_replicas):
        tokens = each + (request // prefill_replicas < rest)
        if tokens:
            pairs[request % prefill_replicas, request % decode_replicas, tokens] += 1
    return pairs


def _check(shape: ModelShape, prefill: Layout, decode: Layout, framework: str) -> None:
    for layout in (prefill, decode):
        check_model(shape, layout, framework)
        if layout.cp > 1 and layout.dcp > 1:
            raise ValueError(f"a handoff with both cp and dcp on one side is not described: {layout}")
    if shape.linear_layers:
        raise ValueError(f"{shape.name}: the state of linear-attention layers in a handoff is not described")
    ours, theirs = attention_tp(decode, framework), attention_tp(prefill, framework)
    if framework == "vllm" and max(ours, theirs) % min(ours, theirs):
        raise ValueError(
            f"Local tensor parallel size {ours} is not divisible by remote tensor parallel size {theirs} "
            "(vLLM's NIXL connector: one must divide the other)"
        )
    if framework == "sglang" and decode.pp not in (1, prefill.pp):
        raise ValueError(f"SGLang: decode pp must equal prefill pp ({prefill.pp}) or be 1: {decode.pp}")


def _descriptors(piece: Piece, shape: ModelShape, workload: Workload, framework: str, same_tp: bool) -> tuple[int, int]:
    """Return how many descriptors a piece takes, and the bytes of one."""
    element = dtype_bytes(workload.kv_dtype or shape.dtype)
    row = piece.num_heads * shape.kv_elements_per_head * element
    parts = 1
    if shape.mla is None and (workload.kv_split or framework == "sglang"):
        parts = 2
    if framework == "sglang" and shape.mla is None and not same_tp:
        return piece.num_layers * piece.num_tokens * parts, row // parts
    blocks = -(-piece.num_tokens // workload.block_tokens)
    return piece.num_layers * blocks * parts, workload.block_tokens * row // parts


def _components(matrix: Matrix) -> list[tuple[list[int], list[int]]]:
    """Return the connected parts of who sends to whom, as (prefill ranks, decode ranks)."""
    left = set(np.nonzero(matrix.any(axis=1))[0].tolist())
    parts: list[tuple[list[int], list[int]]] = []
    for start in sorted(left):
        if start not in left:
            continue
        rows, columns, new = {start}, set[int](), {start}
        while new:
            reached = set(np.nonzero(matrix[sorted(new)].any(axis=0))[0].tolist()) - columns
            columns |= reached
            new = set(np.nonzero(matrix[:, sorted(reached)].any(axis=1))[0].tolist()) - rows if reached else set()
            rows |= new
        left -= rows
        parts.append((sorted(rows), sorted(columns)))
    return parts


def _rows(matrix: Matrix) -> Rows:
    return tuple(map(tuple, matrix.tolist()))


def handoff(
    shape: ModelShape,
    prefill_layout: Layout,
    decode_layout: Layout,
    workload: Workload,
    *,
    prefill_ranks: Sequence[int],
    decode_ranks: Sequence[int],
    framework: str,
) -> Handoff:
    """Return the traffic of handing the KV of one batch from a prefill pool to a decode pool.

    ``prefill_ranks`` and ``decode_ranks`` are the world ranks of each pool, in the order of its layout. The one
    stream, ``pd.kv``, moves all of it in one call; its groups are the ranks that are connected by any transfer.

    Raises:
        ValueError: ranks that do not fit the layouts or are in both pools; layouts that the engine cannot join.
    """
    _check(shape, prefill_layout, decode_layout, framework)
    for name, layout, ranks in (("prefill", prefill_layout, prefill_ranks), ("decode", decode_layout, decode_ranks)):
        if len(ranks) != world_size(layout, framework):
            raise ValueError(f"{name}: {layout} takes {world_size(layout, framework)} ranks, {len(ranks)} are given")
    if len({*prefill_ranks, *decode_ranks}) != len(prefill_ranks) + len(decode_ranks):
        raise ValueError("a rank is in both pools, or twice in one")
    size = (len(prefill_ranks), len(decode_ranks))
    matrix, count, largest = (np.zeros(size, dtype=np.int64) for _ in range(3))
    kv_dtype = dtype_name(workload.kv_dtype or shape.dtype)
    unit = shape.kv_elements_per_head * dtype_bytes(kv_dtype)
    same_tp = attention_tp(prefill_layout, framework) == attention_tp(decode_layout, framework)
    replicas = tuple(layout.dp * layout.replicas for layout in (prefill_layout, decode_layout))
    pairs = request_pairs(workload, *replicas)
    for request, times in pairs.items():
        for piece in pieces(shape, prefill_layout, decode_layout, framework=framework, requests=(request,)):
            place = piece.source, piece.destination
            number, num_bytes = _descriptors(piece, shape, workload, framework, same_tp)
            matrix[place] += times * piece.num_layers * piece.num_heads * piece.num_tokens * unit
            count[place] += times * number
            largest[place] = max(largest[place], num_bytes)
    groups: list[tuple[int, ...]] = []
    squares: list[Rows] = []
    for rows, columns in _components(matrix):
        groups.append((*(prefill_ranks[rank] for rank in rows), *(decode_ranks[rank] for rank in columns)))
        square = np.zeros((len(groups[-1]), len(groups[-1])), dtype=np.int64)
        square[: len(rows), len(rows) :] = matrix[np.ix_(rows, columns)]
        squares.append(_rows(square))
    per_token = "(kv_lora + rope)" if shape.mla else "heads * 2 * d"
    stream = Stream(
        name="pd.kv",
        pattern="pd",
        op="kv_transfer",
        phase="handoff",
        groups=tuple(groups),
        payload_bytes=int(matrix.sum(axis=1).max()),
        calls_per_step=1,
        dtype=kv_dtype,
        formula=f"S * {per_token} * L * b over layers, heads and tokens that both ranks hold, one source for each",
        source=_SOURCES[framework],
        rule=Explicit(bytes=(squares[0],) if len(set(squares)) == 1 else tuple(squares)),
    )
    return Handoff(
        streams=(stream,),
        matrix_bytes=_rows(matrix),
        descriptors=Descriptors(block_tokens=workload.block_tokens, count=_rows(count), bytes=_rows(largest)),
    )


def on_ranks(streams: Sequence[Stream], ranks: Sequence[int]) -> tuple[Stream, ...]:
    """Move the streams of a layout onto the ranks of a pool: rank i of the layout is ``ranks[i]`` of the world."""
    return tuple(
        replace(stream, groups=tuple(tuple(ranks[rank] for rank in group) for group in stream.groups))
        for stream in streams
    )


def handoff_step(shape: ModelShape, handoff_streams: Sequence[Stream], decode_step: Step | None) -> Step:
    """Return a layer-wise handoff, an equal call per layer, beside a decode step if one is given.

    The last call takes what does not divide, so that all calls together move the stream's payload.
    """
    blocks: list[Block] = []
    for stream in handoff_streams:
        layer, rest = divmod(stream.payload_bytes, shape.num_layers)
        sizes = [(shape.num_layers - 1, layer), (1, layer + rest)] if rest else [(shape.num_layers, layer)]
        blocks += [
            Block(repeat=repeat, tasks=(Task(stream=stream.name, payload_bytes=size),))
            for repeat, size in sizes
            if repeat and size
        ]
    lanes: tuple[tuple[Block, ...], ...] = (tuple(blocks),)
    if decode_step is not None:
        lanes = (*lanes, *decode_step.lanes)
    return Step(name="handoff", phase="handoff", lanes=lanes)
