"""Prefill-decode disaggregation: the KV cache of finished prompts moves from one pool of ranks to another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from crosstraffic.patterns.cache_parts import Part, cache_parts
from crosstraffic.patterns.descriptors import Descriptors, Rows, check_cross_layer, piece_descriptors, style_of
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.matrix import Matrix, Sparse
from crosstraffic.patterns.model import KV_FORMATS, ModelShape, dtype_name
from crosstraffic.patterns.placement import attention_tp, check_model
from crosstraffic.patterns.request_flows import Flows, replica_flows, request_counts
from crosstraffic.patterns.reshard import Pool, make_pool, part_pieces
from crosstraffic.patterns.step import Block, Step, Task
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.transfer_schedule import (
    Runs,
    TransferPlan,
    even_runs,
    num_calls,
    run_lengths,
    transfer_plan,
)
from crosstraffic.patterns.workload import Workload

SCHEDULED: Mapping[str, str] = {
    "request": "",
    "layer": "; a call for each layer of a stage",
    "chunk": "; a call for each chunk of the prompts, the last with the rest",
}
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


def check_pools(shape: ModelShape, prefill: Layout, decode: Layout, framework: str) -> None:
    """Raise ValueError, with the engine's rule, for layouts that an engine cannot join."""
    for layout in (prefill, decode):
        check_model(shape, layout, framework)
    ours, theirs = attention_tp(decode, framework), attention_tp(prefill, framework)
    if framework == "vllm" and max(ours, theirs) % min(ours, theirs):
        raise ValueError(
            f"Local tensor parallel size {ours} is not divisible by remote tensor parallel size {theirs} "
            "(vLLM's NIXL connector: one must divide the other)"
        )
    if framework == "sglang":
        _check_sglang(shape, prefill, decode)


def _check_sglang(shape: ModelShape, prefill: Layout, decode: Layout) -> None:
    """Raise ValueError for pools that SGLang does not join.

    Source: SGLang @ 6ed5780c4fd3 disaggregation/common/conn.py try_ensure_parallel_info, _resolve_rank_mapping.
    """
    rules = (
        (decode.pp in (1, prefill.pp), f"decode pp must equal prefill pp ({prefill.pp}) or be 1: {decode.pp}"),
        (decode.cp == 1, f"Decode cp size ({decode.cp}) should be equal to 1"),
        (decode.dcp == 1 or shape.mla is not None, "PD decode DCP requires an MLA or hybrid-MLA KV pool."),
        (
            decode.dcp == 1 or prefill.cp == 1,
            f"PD decode DCP currently requires prefill attention CP=1, got {prefill.cp}.",
        ),
    )
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"SGLang: {rule}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moved:
    """What one request moves between corners of replicas, ``[prefill corners, decode corners]`` each.

    ``growing`` are the bytes that are there before the prompt is at its end; ``layer_bytes`` those of one layer of each
    kind, by the first layer of the kind.
    """

    num_bytes: Matrix
    growing: Matrix
    count: Matrix
    largest: Matrix
    layer_bytes: Mapping[int, Matrix]


def _layer_kinds(parts: Sequence[Part]) -> Mapping[int, int]:
    """Return for each layer that caches anything the first one that has the same parts.

    >>> from crosstraffic.patterns.model import load_model
    >>> set(_layer_kinds(cache_parts(load_model("gpt-oss-20b"), 1000, "bfloat16")).values())
    {0, 1}
    """
    held: dict[int, tuple[int, ...]] = {}
    for index, part in enumerate(parts):
        for layer in part.layers:
            held[layer] = (*held.get(layer, ()), index)
    first: dict[tuple[int, ...], int] = {}
    for layer in sorted(held):
        first.setdefault(held[layer], layer)
    return {layer: first[held[layer]] for layer in sorted(held)}


def _moved(
    parts: Sequence[Part], num_tokens: int, pools: tuple[Pool, Pool], workload: Workload, plan: TransferPlan
) -> _Moved:
    size = tuple(pool.ranks.shape[1] for pool in pools)
    num_bytes, growing, count, largest = (np.zeros(size, dtype=np.int64) for _ in range(4))
    layer_bytes = {layer: np.zeros(size, dtype=np.int64) for layer in set(_layer_kinds(parts).values())}
    for part in parts:
        pieces = part_pieces(part, num_tokens, *pools)
        number, biggest = piece_descriptors(pieces, num_tokens, *pools, workload=workload, plan=plan)
        place, amount = (pieces.source, pieces.destination), pieces.num_bytes
        np.add.at(num_bytes, place, amount)
        np.add.at(growing, place, amount * (part.num_entries - part.last) // part.num_entries)
        np.add.at(count, place, number)
        np.maximum.at(largest, place, biggest)
        for layer in layer_bytes.keys() & set(part.layers):
            np.add.at(layer_bytes[layer], place, amount // pieces.num_layers)
    return _Moved(num_bytes=num_bytes, growing=growing, count=count, largest=largest, layer_bytes=layer_bytes)


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
    check_pools(shape, prefill_layout, decode_layout, framework)
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
    flows: dict[int, Flows] = {}
    for tokens, counts in request_counts(workload, pools[0].num_replicas, pools[1].num_replicas).items():
        found[tokens] = _moved(cache_parts(shape, tokens, kv_dtype), tokens, pools, workload, plan)
        flows[tokens] = replica_flows(counts, *pools)
        flows[tokens].add(matrix, found[tokens].num_bytes)
        flows[tokens].add(count, found[tokens].count)
        flows[tokens].raise_to(largest, found[tokens].largest)
    call, runs = matrix, None
    if plan.is_asked:
        kinds = _layer_kinds(cache_parts(shape, max(found), kv_dtype))
        call, runs = _calls(matrix, found, flows, pools[0], workload, plan.schedule, kinds)
    return Handoff(
        streams=(_stream(shape, matrix, call, runs, (prefill_ranks, decode_ranks), plan, kv_dtype, framework),),
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


def _calls(
    total: Matrix,
    found: Mapping[int, _Moved],
    flows: Mapping[int, Flows],
    prefill: Pool,
    workload: Workload,
    schedule: str,
    kinds: Mapping[int, int],
) -> tuple[Matrix, Runs]:
    """Return the bytes of one call, all but the last alike, and the calls of the prefill rank that sends most.

    layer: a call for each layer of a pipeline stage; the bytes are those of the heaviest kind. chunk: what a chunk adds
    to the cache; the last call takes the rest, windows and states with it: these are known when the prompt ends.
    """
    busiest = int(total.sum(axis=1).argmax())
    whole = int(total[busiest].sum())
    calls = num_calls(
        schedule,
        num_layers=max(map(len, prefill.stages)),
        num_tokens=workload.num_tokens,
        chunk_tokens=workload.chunk_tokens,
    )

    def placed(amounts: Mapping[int, Matrix]) -> Matrix:
        matrix = np.zeros_like(total)
        for tokens, amount in amounts.items():
            flows[tokens].add(matrix, amount)
        return matrix

    if schedule == "layer":
        of_kind = {
            layer: placed({tokens: one.layer_bytes[layer] for tokens, one in found.items() if layer in one.layer_bytes})
            for layer in set(kinds.values())
        }
        held = prefill.stages[int(prefill.stage[np.nonzero(prefill.ranks == busiest)[1][0]])]
        sizes = [int(of_kind[kinds[layer]][busiest].sum()) for layer in held if layer in kinds]
        return max(of_kind.values(), key=lambda matrix: int(matrix.sum(axis=1).max())), run_lengths(sizes)
    each, rest = np.divmod(placed({tokens: one.growing for tokens, one in found.items()}), workload.num_tokens)
    chunk = each * workload.chunk_tokens + rest * workload.chunk_tokens // workload.num_tokens
    if calls == 1 or not chunk.any():
        return total, ((1, whole),)
    sent = int(chunk[busiest].sum())
    return chunk, run_lengths([*[sent] * (calls - 1), whole - (calls - 1) * sent])


def _stream(
    shape: ModelShape,
    matrix: Matrix,
    call: Matrix,
    runs: Runs | None,
    ranks: tuple[Sequence[int], Sequence[int]],
    plan: TransferPlan,
    kv_dtype: str,
    framework: str,
) -> Stream:
    """Return the stream, its groups the connected ranks; ``call`` is what one call moves of ``matrix``."""
    groups: list[tuple[int, ...]] = []
    cells: list[tuple[tuple[int, int, int], ...]] = []
    for rows, columns in _components(matrix):
        groups.append((*(ranks[0][rank] for rank in rows), *(ranks[1][rank] for rank in columns)))
        part = call[np.ix_(rows, columns)]
        source, destination = np.nonzero(part)
        amounts = part[source, destination]
        cells.append(tuple(zip(source.tolist(), (destination + len(rows)).tolist(), amounts.tolist(), strict=True)))
    alike = len(set(cells)) == 1 and len(set(map(len, groups))) == 1
    return Stream(
        name="pd.kv",
        pattern="pd",
        op="kv_transfer",
        phase="handoff",
        groups=tuple(groups),
        payload_bytes=int(call.sum(axis=1).max()),
        calls_per_step=1 if runs is None else sum(times for times, _ in runs),
        dtype=kv_dtype,
        formula=_formula(shape) + ("" if runs is None else SCHEDULED[plan.schedule]),
        source=_SOURCES[framework],
        rule=Sparse(cells=(cells[0],) if alike else tuple(cells)),
    )


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
