"""Prefill-decode disaggregation: the KV cache of finished prompts moves from one pool of ranks to another."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from crosstraffic.patterns.cache_parts import cache_parts
from crosstraffic.patterns.descriptors import Descriptors, Rows, check_cross_layer, piece_descriptors, style_of
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.matrix import Matrix, Sparse, scale_matrix
from crosstraffic.patterns.model import KV_FORMATS, ModelShape, dtype_name
from crosstraffic.patterns.placement import attention_tp, check_model
from crosstraffic.patterns.reshard import Pool, make_pool, part_pieces
from crosstraffic.patterns.step import Block, Step, Task
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.transfer_schedule import Runs, TransferPlan, even_runs, num_calls, transfer_plan
from crosstraffic.patterns.workload import Workload

_SOURCES = {
    "vllm": "vLLM @ 017e9f4448b7 kv_connector/v1/nixl/tp_mapping.py",
    "megatron": "Megatron-LM @ d98e8a64ddf3 core/inference/disaggregation/kv_reshard.py",
    "sglang": "SGLang @ 6ed5780c4fd3 disaggregation, send_kvcache_slice",
    "tensorrt_llm": "reshard as Megatron-LM @ d98e8a64ddf3 kv_reshard.py",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handoff:
    """The traffic of one handoff: its stream, bytes and descriptors between ranks, and how the engine makes it.

    ``matrix`` is bytes ``[num_prefill, num_decode]``, all calls together. ``runs`` are the calls, as (how many, bytes
    of the busiest prefill rank in each), where the workload asks for a schedule; None leaves it to the step.
    """

    streams: tuple[Stream, ...]
    matrix: Matrix
    descriptors: Descriptors
    plan: TransferPlan
    runs: Runs | None

    @property
    def matrix_bytes(self) -> Rows:
        """Bytes ``[prefill rank][decode rank]``."""
        return tuple(map(tuple, self.matrix.tolist()))


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
    ours, theirs = attention_tp(decode, framework), attention_tp(prefill, framework)
    if framework == "vllm" and max(ours, theirs) % min(ours, theirs):
        raise ValueError(
            f"Local tensor parallel size {ours} is not divisible by remote tensor parallel size {theirs} "
            "(vLLM's NIXL connector: one must divide the other)"
        )
    if framework == "sglang" and decode.pp not in (1, prefill.pp):
        raise ValueError(f"SGLang: decode pp must equal prefill pp ({prefill.pp}) or be 1: {decode.pp}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moved:
    """What one request moves between corners of replicas, ``[prefill corners, decode corners]`` each."""

    num_bytes: Matrix
    count: Matrix
    largest: Matrix


def _moved(
    shape: ModelShape, num_tokens: int, pools: tuple[Pool, Pool], workload: Workload, kv_dtype: str, plan: TransferPlan
) -> _Moved:
    size = tuple(pool.ranks.shape[1] for pool in pools)
    num_bytes, count, largest = (np.zeros(size, dtype=np.int64) for _ in range(3))
    for part in cache_parts(shape, num_tokens, kv_dtype):
        pieces = part_pieces(part, num_tokens, *pools)
        number, biggest = piece_descriptors(pieces, *pools, workload, plan)
        place = (pieces.source, pieces.destination)
        np.add.at(num_bytes, place, pieces.num_bytes)
        np.add.at(count, place, number)
        np.maximum.at(largest, place, biggest)
    return _Moved(num_bytes=num_bytes, count=count, largest=largest)


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


def handoff(
    shape: ModelShape,
    prefill_layout: Layout,
    decode_layout: Layout,
    workload: Workload,
    *,
    prefill_ranks: Sequence[int],
    decode_ranks: Sequence[int],
    framework: str,
    prefill_instances: int = 1,
    decode_instances: int = 1,
) -> Handoff:
    """Return the traffic of handing the KV of one batch from prefill instances to decode instances.

    ``prefill_ranks`` and ``decode_ranks`` are the world ranks of each side, instance after instance in the order of its
    layout. The one stream, ``pd.kv``, moves all of it in one call unless the workload asks for a schedule; its groups
    are the ranks that are connected by any transfer.

    Raises:
        ValueError: ranks that do not fit the layouts or are on both sides; layouts that the engine cannot join.
    """
    _check(shape, prefill_layout, decode_layout, framework)
    sides = (
        ("prefill", prefill_layout, prefill_ranks, prefill_instances),
        ("decode", decode_layout, decode_ranks, decode_instances),
    )
    for name, layout, ranks, instances in sides:
        if instances < 1:
            raise ValueError(f"{name}: instances must be a whole number from 1: {instances}")
        needed = instances * world_size(layout, framework)
        if len(ranks) != needed:
            of = f"{instances} x {layout}" if instances > 1 else str(layout)
            raise ValueError(f"{name}: {of} takes {needed} ranks, {len(ranks)} are given")
    if len({*prefill_ranks, *decode_ranks}) != len(prefill_ranks) + len(decode_ranks):
        raise ValueError("a rank is in both pools, or twice in one")
    if workload.cross_layer_blocks:
        check_cross_layer(shape, framework)
    asked = workload.kv_dtype or shape.kv_dtype
    kv_dtype = asked if asked in KV_FORMATS else dtype_name(asked)
    plan = transfer_plan(framework, workload)
    pools = (
        make_pool(shape, prefill_layout, framework, prefill_instances),
        make_pool(shape, decode_layout, framework, decode_instances),
    )
    size = (len(prefill_ranks), len(decode_ranks))
    matrix, count, largest = (np.zeros(size, dtype=np.int64) for _ in range(3))
    found: dict[int, _Moved] = {}
    pairs = request_pairs(workload, pools[0].num_replicas, pools[1].num_replicas)
    for (source, destination, tokens), times in pairs.items():
        if tokens not in found:
            found[tokens] = _moved(shape, tokens, pools, workload, kv_dtype, plan)
        place = np.ix_(pools[0].ranks[source], pools[1].ranks[destination])
        matrix[place] += times * found[tokens].num_bytes
        count[place] += times * found[tokens].count
        largest[place] = np.maximum(largest[place], found[tokens].largest)
    stream, runs = _stream(shape, matrix, (prefill_ranks, decode_ranks), workload, kv_dtype, framework, max(found))
    return Handoff(
        streams=(stream,),
        matrix=matrix,
        descriptors=Descriptors(
            block_tokens=workload.block_tokens,
            direction=plan.direction,
            counts=count,
            sizes=largest,
            source=style_of(framework, plan.connector, workload).source,
        ),
        plan=plan,
        runs=runs,
    )


def _stream(
    shape: ModelShape,
    matrix: Matrix,
    ranks: tuple[Sequence[int], Sequence[int]],
    workload: Workload,
    kv_dtype: str,
    framework: str,
    num_tokens: int,
) -> tuple[Stream, Runs | None]:
    """Return the stream, its groups the connected ranks, and the calls where a schedule was asked for."""
    payload, runs, formula = int(matrix.sum(axis=1).max()), None, _formula(shape)
    call = matrix
    if workload.kv_schedule is not None:
        calls = num_calls(
            workload.kv_schedule,
            num_layers=shape.num_layers,
            num_tokens=num_tokens,
            chunk_tokens=workload.chunk_tokens,
        )
        runs = even_runs(payload, calls)
        each = runs[-1][1]  # the last call takes what does not divide: the largest
        call = scale_matrix(matrix, payload, each)
        payload, formula = each, f"{formula}; 1 / {calls} of it a call, by {workload.kv_schedule}"
    groups: list[tuple[int, ...]] = []
    cells: list[tuple[tuple[int, int, int], ...]] = []
    for rows, columns in _components(matrix):
        groups.append((*(ranks[0][rank] for rank in rows), *(ranks[1][rank] for rank in columns)))
        part = call[np.ix_(rows, columns)]
        source, destination = np.nonzero(part)
        amounts = part[source, destination]
        cells.append(tuple(zip(source.tolist(), (destination + len(rows)).tolist(), amounts.tolist(), strict=True)))
    alike = len(set(cells)) == 1 and len(set(map(len, groups))) == 1
    stream = Stream(
        name="pd.kv",
        pattern="pd",
        op="kv_transfer",
        phase="handoff",
        groups=tuple(groups),
        payload_bytes=payload,
        calls_per_step=1 if runs is None else sum(times for times, _ in runs),
        dtype=kv_dtype,
        formula=formula,
        source=_SOURCES[framework],
        rule=Sparse(cells=(cells[0],) if alike else tuple(cells)),
    )
    return stream, runs


def _formula(shape: ModelShape) -> str:
    cached = f"S * {'(kv_lora + rope)' if shape.mla else 'heads * 2 * d'} * L * b"
    if shape.compress_ratios:
        cached = "entries of each layer (window, S / ratio) * bytes of one"
    state = " + the state of linear-attention layers" if shape.linear_layers else ""
    return f"{cached}{state} over layers, heads and tokens that both ranks hold, one source for each"


def on_ranks(streams: Sequence[Stream], ranks: Sequence[int]) -> tuple[Stream, ...]:
    """Move the streams of a layout onto the ranks of a pool: rank i of the layout is ``ranks[i]`` of the world."""
    return tuple(
        replace(stream, groups=tuple(tuple(ranks[rank] for rank in group) for group in stream.groups))
        for stream in streams
    )


def handoff_step(
    shape: ModelShape, handoff_streams: Sequence[Stream], decode_step: Step | None, runs: Runs | None = None
) -> Step:
    """Return a handoff beside a decode step if one is given: the calls of ``runs``, or an equal call per layer.

    The last call takes what does not divide, so that all calls together move all bytes.
    """
    blocks: list[Block] = []
    for stream in handoff_streams:
        blocks += [
            Block(repeat=repeat, tasks=(Task(stream=stream.name, payload_bytes=size),))
            for repeat, size in runs or even_runs(stream.payload_bytes, shape.num_layers)
        ]
    lanes: tuple[tuple[Block, ...], ...] = (tuple(blocks),)
    if decode_step is not None:
        lanes = (*lanes, *decode_step.lanes)
    return Step(name="handoff", phase="handoff", lanes=lanes)
