"""Descriptors: pieces of memory that a handoff names, how many and of how many bytes; posting them takes CPU time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from crosstraffic.patterns.cache_parts import Part, cache_parts
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.matrix import Matrix
from crosstraffic.patterns.model import KV_FORMATS, ModelShape, dtype_name
from crosstraffic.patterns.reshard import Pieces, Pool, Vector
from crosstraffic.patterns.stages import stage_layers
from crosstraffic.patterns.transfer_schedule import TransferPlan
from crosstraffic.patterns.workload import Workload

Rows = tuple[tuple[int, ...], ...]
POSTING_S = 2.4e-6  # of one descriptor, published: nixl issue 1514, 18,880 of them in about 46 ms
Slices = Literal["never", "other tp", "some heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a connector names memory.

    ``is_packed``: K and V of a page are one piece. ``merges``: pages in a row become one piece. ``slices`` tells when a
    piece is only the heads of one token: they do not lie in a row.
    """

    is_packed: bool
    merges: bool
    slices: Slices
    source: str


_NIXL = Style(
    is_packed=True,
    merges=False,
    slices="never",
    source="vLLM @ 017e9f4448b7 kv_connector/v1/nixl/base_worker.py _compute_desc_ids",
)
_SGLANG = Style(
    is_packed=False,
    merges=True,
    slices="other tp",
    source="SGLang @ 6ed5780c4fd3 disaggregation/mooncake/conn.py _send_kvcache_generic, send_kvcache_slice",
)
_MEGATRON = Style(
    is_packed=False,
    merges=False,
    slices="some heads",
    source="Megatron-LM @ d98e8a64ddf3 core/inference/disaggregation/transfer_backends/nixl.py _begin_transfer",
)
STYLES: Mapping[tuple[str, str], Style] = {
    ("vllm", "nixl"): _NIXL,
    ("vllm", "nixl_push"): _NIXL,
    ("vllm", "mooncake"): Style(
        is_packed=True,
        merges=True,
        slices="never",
        source="vLLM @ 017e9f4448b7 kv_connector/v1/mooncake/mooncake_connector.py _can_coalesce_block_transfers",
    ),
    ("sglang", "mooncake"): _SGLANG,
    ("sglang", "nixl"): _SGLANG,
    ("megatron", "nixl"): _MEGATRON,
    ("megatron", "nccl"): _MEGATRON,
    ("tensorrt_llm", "ucx"): _NIXL,
    ("tensorrt_llm", "nixl"): _NIXL,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Descriptors:
    """Pieces of memory that a transfer names between prefill and decode ranks: how many, and bytes of the largest.

    ``counts`` and ``sizes`` are arrays ``[num_prefill, num_decode]``; ``count`` and ``bytes`` the same as tuples. The
    last page of a request counts as a whole one: transfers move pages.
    """

    block_tokens: int
    direction: str
    counts: Matrix = field(repr=False)
    sizes: Matrix = field(repr=False)
    source: str

    @property
    def count(self) -> Rows:
        """How many, ``[prefill rank][decode rank]``."""
        return tuple(map(tuple, self.counts.tolist()))

    @property
    def bytes(self) -> Rows:
        """Bytes of the largest, ``[prefill rank][decode rank]``."""
        return tuple(map(tuple, self.sizes.tolist()))

    @property
    def total(self) -> int:
        """Descriptors of all ranks."""
        return int(self.counts.sum())

    @property
    def max_count_per_rank(self) -> int:
        """Most descriptors that one decode rank handles."""
        return int(self.counts.sum(axis=0).max())

    @property
    def max_count_per_poster(self) -> int:
        """Most descriptors that one rank posts: a decode rank that pulls, a prefill rank that pushes."""
        return int(self.counts.sum(axis=0 if self.direction == "pull" else 1).max())

    @property
    def posting_s(self) -> float:
        """Estimate of the CPU time that the busiest rank needs to post them: see ``posting_s``."""
        return posting_s(self.max_count_per_poster)


def posting_s(count: int) -> float:
    """Return the CPU time of posting descriptors, at the 2.4 us each that were published for UCX over InfiniBand.

    An estimate from one report, never measured here; cuda_ipc was reported at about 20 times as much.

    >>> round(posting_s(18_880), 4)
    0.0453

    Source: nixl issue 1514 (18,880 descriptors, about 46 ms), vLLM issue 55434 (cuda_ipc).
    """
    if count < 0:
        raise ValueError(f"count must not be negative: {count}")
    return count * POSTING_S


def page_bytes(block_tokens: int, num_heads: int, head_dim: int, element_bytes: int, *, is_packed: bool = True) -> int:
    """Return bytes of one page of one layer on one rank: block * heads * d * b, twice where K and V are packed.

    >>> page_bytes(16, 1, 128, 2), [page_bytes(16, heads, 128, 2, is_packed=False) for heads in (1, 4)]
    (8192, [4096, 16384])

    Source: vLLM @ 017e9f4448b7 kv_connector/v1/nixl/base_worker.py; ai-dynamo/dynamo issue 12750 (16,384 bytes).
    """
    return block_tokens * num_heads * (2 if is_packed else 1) * head_dim * element_bytes


def style_of(framework: str, connector: str, workload: Workload) -> Style:
    """Return how memory is named; ``kv_split`` is vLLM's older layout, in which K and V lie apart."""
    style = STYLES[framework, connector]
    if style.is_packed and workload.kv_split:
        return Style(is_packed=False, merges=style.merges, slices=style.slices, source=style.source)
    return style


def _is_kv(part: Part) -> bool:
    """Tell whether an entry is a key and a value of the same size."""
    return len(part.regions) == 2 and part.regions[0] == part.regions[1]


def _regions(part: Part, style: Style) -> tuple[int, ...]:
    """Return the bytes of one piece of an entry in each memory region of a layer."""
    return (part.head_bytes,) if style.is_packed and _is_kv(part) else part.regions


def _blocks(part: Part, entries: Vector, num_tokens: int, block_tokens: int, framework: str) -> Vector:
    """Return the pages of entries; vLLM moves one more of a window, which need not begin with a page.

    Source: vLLM @ 017e9f4448b7 kv_connector/v1/nixl/base_scheduler.py blocks_per_sw.
    """
    blocks = -(-entries // block_tokens)
    if part.is_latest and framework == "vllm":
        return np.asarray(np.minimum(-(-num_tokens // block_tokens), blocks + 1))
    return np.asarray(blocks)


def _runs(blocks: Vector, workload: Workload, plan: TransferPlan) -> tuple[Vector, Vector]:
    """Return into how many runs of pages in a row blocks fall, and the pages of the largest."""
    group = np.maximum(blocks, 1)
    if plan.schedule == "chunk":
        group = np.minimum(group, max(1, workload.chunk_tokens // workload.block_tokens))
    row = group if workload.contiguous_blocks is None else np.minimum(group, workload.contiguous_blocks)
    full, rest = np.divmod(blocks, group)
    return full * -(-group // row) + -(-rest // row), row


def piece_descriptors(
    pieces: Pieces, num_tokens: int, prefill: Pool, decode: Pool, *, workload: Workload, plan: TransferPlan
) -> tuple[Vector, Vector]:
    """Return how many descriptors each piece of a request of ``num_tokens`` takes, and the bytes of the largest one.

    A page of a layer is one (K and V packed), or one for each memory region; of a state one for each region. Pages of
    DeepSeek-V4, and of ``cross_layer_blocks``, hold all layers alike.

    Source: see ``STYLES``; vLLM @ 017e9f4448b7 nixl/base_worker.py _register_packed_kv_cache (DeepSeek-V4).
    """
    part, framework = pieces.part, prefill.framework
    style = style_of(framework, plan.connector, workload)
    regions = _regions(part, style)
    held = np.maximum(1, part.num_heads // prefill.tp), np.maximum(1, part.num_heads // decode.tp)
    is_whole = (pieces.num_heads == held[0]) & (pieces.num_heads == held[1])
    if part.is_state:
        if framework == "sglang":
            regions = (part.head_bytes,) if prefill.tp == decode.tp else regions
        return pieces.num_layers * len(regions), pieces.num_heads * max(regions)
    blocks = _blocks(part, pieces.num_entries, num_tokens, workload.block_tokens, framework)
    slices = {
        "never": np.zeros_like(is_whole),
        "other tp": np.full_like(is_whole, _is_kv(part) and prefill.tp != decode.tp),
        "some heads": ~is_whole,
    }[style.slices]
    runs, row = (blocks, np.ones_like(blocks))
    if style.merges:
        merged = _runs(blocks, workload, plan)
        runs, row = np.where(is_whole, merged[0], runs), np.where(is_whole, merged[1], row)
    tokens = blocks * workload.block_tokens
    if framework == "sglang" and decode.layout.dcp > prefill.layout.dcp:
        slices, tokens = np.ones_like(is_whole), pieces.num_entries
    count = np.where(slices, tokens, runs) * pieces.num_layers * len(regions)
    largest = np.where(slices, 1, row * workload.block_tokens) * pieces.num_heads * max(regions)
    if framework == "vllm" and (workload.cross_layer_blocks or part.is_packed_page):
        count, largest = runs, row * workload.block_tokens * pieces.num_heads * part.head_bytes * pieces.num_layers
    return count, largest


def check_cross_layer(shape: ModelShape, framework: str) -> None:
    """Raise ValueError where pages cannot hold all layers.

    Source: vLLM @ 017e9f4448b7 kv_connector/v1/nixl/connector.py prefer_cross_layer_blocks.
    """
    if framework != "vllm":
        raise ValueError(f"cross_layer_blocks is vLLM's: {framework}")
    if shape.linear_layers or shape.sliding_layers:
        raise ValueError(f"{shape.name}: cross_layer_blocks needs layers that all cache alike (vLLM)")


def num_regions(shape: ModelShape, layout: Layout, framework: str, workload: Workload) -> int:
    """Return the memory regions of the cache that a rank registers, of the pipeline stage that has most.

    A region a layer (K and V packed; two where they lie apart), one more for index keys, one for each of a state's
    parts; one in all with ``cross_layer_blocks`` and for DeepSeek-V4. Hybrid models share regions between kinds of
    layers, which is not counted.

    >>> from crosstraffic.patterns.model import load_model
    >>> num_regions(load_model("Llama-3.1-70B"), Layout(tp=8), "vllm", Workload(phase="handoff"))
    80

    Source: vLLM @ 017e9f4448b7 kv_connector/v1/nixl/base_worker.py register_kv_caches.
    """
    if workload.cross_layer_blocks:
        check_cross_layer(shape, framework)
    if framework == "vllm" and (workload.cross_layer_blocks or shape.compress_ratios):
        return 1
    kv_dtype = workload.kv_dtype or shape.kv_dtype
    connector = workload.kv_connector or next(name for engine, name in STYLES if engine == framework)
    style = style_of(framework, connector, workload)
    parts = cache_parts(shape, max(1, workload.context), kv_dtype if kv_dtype in KV_FORMATS else dtype_name(kv_dtype))
    return max(
        sum(len(set(part.layers) & set(layers)) * len(_regions(part, style)) for part in parts)
        for layers in stage_layers(shape.num_layers, layout, framework)
    )


def registered_descriptors(
    shape: ModelShape, layout: Layout, framework: str, workload: Workload, *, num_blocks: int
) -> int:
    """Return the descriptors that a rank prepares when it starts: regions * pages of its cache.

    Source: vLLM @ 017e9f4448b7 kv_connector/v1/nixl/base_worker.py (num_descs = num_regions * num_blocks).
    """
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be a whole number from 1: {num_blocks}")
    return num_regions(shape, layout, framework, workload) * num_blocks
