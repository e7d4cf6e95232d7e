"""What a rank of a layout keeps in its memory: weights, KV cache, buffers, each a number with a name and its formula.

Weights and cache are exact but for norms and biases. Buffers of transports are what the engines allocate by default;
the workspace is an estimate. The CUDA context, channels of NCCL and CUDA graphs are not counted: they are what a
utilization below 1 is for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from crosstraffic.patterns.buffers import Part, rank_buffers
from crosstraffic.patterns.expert import backend, expert_path
from crosstraffic.patterns.kv_cache import (
    cached_entries,
    check_kv_dtype,
    conv_bytes,
    index_bytes,
    index_entries,
    state_bytes,
    token_bytes,
)
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import KV_FORMATS, ModelShape, dtype_bytes
from crosstraffic.patterns.setting import Setting
from crosstraffic.patterns.weight_format import weight_format
from crosstraffic.patterns.weights import RankParameters, rank_parameters

LINEAR = ("attention", "dense", "shared", "experts")  # router, embeddings and output layer are never quantised


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of the fullest rank of a layout.

    ``request_bytes`` is the KV cache there of one request of ``context`` tokens, ``num_requests`` how many its replica
    has, ``limit_bytes`` what may be used. ``buffers`` is all that is neither weights nor cache.
    """

    weights: Part
    buffers: tuple[Part, ...]
    request_bytes: int
    num_requests: int
    context: int
    limit_bytes: int

    @property
    def kv_bytes(self) -> int:
        """KV cache of all requests of the replica."""
        return self.request_bytes * self.num_requests

    @property
    def buffer_bytes(self) -> int:
        """All that is neither weights nor cache."""
        return sum(part.num_bytes for part in self.buffers)

    @property
    def total_bytes(self) -> int:
        """All of it, with the cache of all requests."""
        return self.weights.num_bytes + self.buffer_bytes + self.kv_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left of the limit with all requests; below 0: what is missing."""
        return self.limit_bytes - self.total_bytes

    @property
    def kv_capacity_bytes(self) -> int:
        """What is left for the cache beside weights and buffers; below 0: these alone do not fit."""
        return self.limit_bytes - self.weights.num_bytes - self.buffer_bytes

    @property
    def missing_bytes(self) -> int:
        """What weights, buffers and the cache of one request take beyond the limit; 0 if they fit."""
        return max(0, self.request_bytes - self.kv_capacity_bytes)

    @property
    def max_requests(self) -> int:
        """Requests of ``context`` tokens whose cache a replica can hold at once."""
        return max(0, self.kv_capacity_bytes) // self.request_bytes

    @property
    def max_tokens(self) -> int:
        """Tokens of such requests whose cache a replica can hold at once."""
        return max(0, self.kv_capacity_bytes) * self.context // self.request_bytes


def stored_bits(dtype: str) -> Fraction:
    """Return the bits of a stored weight with its share of the scales.

    >>> stored_bits("fp4"), stored_bits("bf16")
    (Fraction(9, 2), Fraction(16, 1))

    Raises:
        ValueError: unknown format.
    """
    form = weight_format(dtype)
    return form.bits + Fraction(8 * form.scale_bytes, form.block_rows * form.block_columns)


def formats(shape: ModelShape, weight_dtype: str | None, dtype: str) -> Mapping[str, str]:
    """Return the format of each kind of linear layer: as asked, else as the checkpoint has it, else ``dtype``.

    MXFP4 of a model with experts is that of the experts alone.

    Raises:
        ValueError: unknown format.

    Source: config.json of gpt-oss (modules_to_not_convert), of DeepSeek-V4 (expert_dtype).
    """
    chosen = weight_dtype or shape.weight_dtype or dtype
    found, is_mxfp4 = dict.fromkeys(LINEAR, chosen), weight_format(chosen) == weight_format("mxfp4")
    if shape.moe_layers and is_mxfp4:
        found = {**dict.fromkeys(LINEAR, dtype), "experts": chosen}
    if weight_dtype is None and shape.expert_dtype is not None:
        found["experts"] = shape.expert_dtype
    return found


def stored_bytes(parameters: RankParameters, kinds: Mapping[str, str], dtype: str) -> int:
    """Return bytes of a rank's weights: linear layers in their formats, all else in ``dtype``; scales spread evenly."""
    counts: Mapping[str, int] = {kind: getattr(parameters, kind) for kind in kinds}
    bits = sum((counts[kind] * stored_bits(name) for kind, name in kinds.items()), start=Fraction(0))
    return -(-bits // 8) + (parameters.total - sum(counts.values())) * dtype_bytes(dtype)


@lru_cache(maxsize=1024)
def _parameters(
    shape: ModelShape, layout: Layout, framework: str, redundant: int, chosen: str | None
) -> RankParameters:
    return rank_parameters(shape, layout, framework, redundant, expert_backend=chosen)


@lru_cache(maxsize=1024)
def _stage_request_bytes(
    shape: ModelShape,
    layers: tuple[int, ...],
    *,
    kv_dtype: str,
    num_tokens: int,
    block_tokens: int,
    tp: int,
    shards: int,
) -> int:
    """Return the cache of one request on one rank: its KV heads, its share of the tokens in whole pages, its state."""
    heads, total = shape.kv_heads_stored, 0
    has_index = kv_dtype in KV_FORMATS and not shape.compress_ratios

    def paged(entries: int) -> int:
        return -(-entries // (shards * block_tokens)) * block_tokens

    for layer in layers:
        entry = token_bytes(shape, layer, kv_dtype) * max(1, heads // tp) // heads
        total += paged(cached_entries(shape, layer, num_tokens)) * entry
        if not has_index:
            total += paged(index_entries(shape, layer, num_tokens)) * index_bytes(shape, layer)
        total += -(-(state_bytes(shape, layer) + conv_bytes(shape, layer)) // tp)
    return total


def rank_request_bytes(setting: Setting) -> int:
    """Return bytes of the cache of one request on the rank that holds most of it.

    A rank has max(1, KV heads / TP) heads (one copy of a head on several ranks where TP is larger, the whole latent
    of MLA on all of them), the layers of its stage, and 1 / dcp of the tokens. Context parallelism of a prompt cuts
    the cache where ranks keep their own tokens (Megatron-Core, TensorRT-LLM); vLLM and SGLang gather all of it on
    each rank.

    Source: vLLM @ 017e9f4448b7 v1/worker/block_table.py (TOTAL_CP_WORLD_SIZE); SGLang @ 6ed5780c4fd3
    srt/layers/cp/zigzag.py gather_kv_cache.
    """
    workload, layout = setting.workload, setting.layout
    keeps_own = setting.framework in ("megatron", "tensorrt_llm")
    kv_dtype = workload.kv_dtype or setting.dtype
    check_kv_dtype(setting.shape, kv_dtype)
    return max(
        _stage_request_bytes(
            setting.shape,
            tuple(layers),
            kv_dtype=kv_dtype,
            num_tokens=workload.context,
            block_tokens=workload.block_tokens,
            tp=setting.tp,
            shards=layout.dcp * (layout.cp if keeps_own else 1),
        )
        for layers in setting.stages
    )


def rank_memory(setting: Setting, *, num_requests: int, limit_bytes: int, weight_dtype: str | None = None) -> Memory:
    """Return what the fullest rank keeps: the most weights that any rank has, the most cache, and its buffers.

    ``num_requests`` is how many the replica has, in however many passes; ``weight_dtype`` a format of
    ``weight_format``, that of the model's checkpoint if absent.

    Raises:
        ValueError: unknown format of weights, or a dtype of the cache that does not fit the model.
    """
    shape, layout, framework = setting.shape, setting.layout, setting.framework
    parameters = _parameters(
        shape,
        replace(layout, replicas=1, dcp=1),
        framework,
        setting.workload.redundant_experts,
        backend(setting) if expert_path(setting) == "all_to_all" else None,
    )
    kinds = formats(shape, weight_dtype, setting.dtype)
    weights = Part(
        name="weights",
        num_bytes=stored_bytes(parameters, kinds, setting.dtype),
        formula="parameters of the fullest rank * bits / 8, scales included; norms and biases left out",
        source="linear layers: " + ", ".join(sorted(set(kinds.values()))) + f"; all else: {setting.dtype}",
    )
    return Memory(
        weights=weights,
        buffers=rank_buffers(setting),
        request_bytes=rank_request_bytes(setting),
        num_requests=num_requests,
        context=setting.workload.context,
        limit_bytes=limit_bytes,
    )
