"""Context parallelism: a long prompt cut over ranks, and how its keys and values meet its queries.

Keys and values go around a ring or are gathered (here), heads are traded for tokens (``ulysses``), or queries travel
(``pass_query``). What ranks hold of a prompt is in ``zigzag``, the form of decode in ``decode_context``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.patterns.decode_context import (
    check_backend,
    decode_context_calls,
    decode_context_streams,
    requests_at_once,
)
from crosstraffic.patterns.heads import Heads, rank_heads
from crosstraffic.patterns.layout import Groups
from crosstraffic.patterns.matrix import Ring
from crosstraffic.patterns.model import KV_FORMATS, dtype_bytes, dtype_name
from crosstraffic.patterns.pass_query import pass_query_calls, pass_query_streams
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.ulysses import check_heads, subgroups, ulysses_calls, ulysses_ranks, ulysses_streams
from crosstraffic.patterns.workload import Workload
from crosstraffic.patterns.zigzag import check_length, local_rows, request_lengths

_TE = "TransformerEngine @ d0067d0da6cb attention/dot_product_attention/context_parallel.py"
_PCP = "vLLM @ 017e9f4448b7 model_executor/layers/attention/pcp.py"
_SGLANG = "SGLang @ 6ed5780c4fd3 srt/layers/cp"
# The styles that an engine has, the one that it takes by itself first.
ENGINE_STYLES: Mapping[str, tuple[str, ...]] = {
    "vllm": ("all_gather",),
    "sglang": ("all_gather",),
    "megatron": ("ring", "all_gather", "ulysses", "ulysses_ring"),
    "tensorrt_llm": ("ulysses",),
}
OUTPUT_SOURCES: Mapping[str, str] = {
    "vllm": "vLLM @ 017e9f4448b7 v1/worker/gpu/pcp_manager.py restore_hidden_states",
    "sglang": f"{_SGLANG}/utils.py cp_gather_after_forward",
    "tensorrt_llm": "TensorRT-LLM @ 01ea6d79d454 tensorrt_llm/models/modeling_utils.py DecoderModelForCausalLM.forward",
}
TE_NAMES: Mapping[str, str] = {"ring": "p2p", "ulysses": "a2a", "ulysses_ring": "a2a+p2p"}
RINGS = ("ring", "ulysses_ring", "pass_q")


def context_style(setting: Setting) -> str:
    """Return how a prompt's attention communicates: as asked, else as the engine does it by itself.

    Megatron-Core passes KV around a ring; where layers attend to a window, which TransformerEngine allows no ring for,
    it is taken to gather. vLLM and SGLang gather, TensorRT-LLM trades heads.

    Source: Megatron-LM @ d98e8a64ddf3 core/extensions/transformer_engine.py (cp_comm_type None is p2p); vLLM
    @ 017e9f4448b7 model_executor/layers/attention/pcp.py; SGLang @ 6ed5780c4fd3 srt/layers/cp; TensorRT-LLM
    tensorrt_llm/mapping.py (attn_cp_size 1: Ulysses).
    """
    asked = setting.workload.context_style
    if asked is not None:
        return asked
    if setting.framework == "megatron" and setting.shape.sliding_layers:
        return "all_gather"
    return ENGINE_STYLES[setting.framework][0]


def is_context_cut(setting: Setting) -> bool:
    """Tell whether the step is a prefill whose prompts are cut over ranks."""
    return setting.layout.cp > 1 and setting.workload.phase == "prefill"


def style_note(setting: Setting) -> str | None:
    """Say what is special about the style of context parallelism; None where the engine works just so.

    A style that the engine lacks is described all the same: as what it would put on the wire.
    """
    if not is_context_cut(setting):
        return None
    framework, style = setting.framework, context_style(setting)
    if style not in ENGINE_STYLES[framework]:
        has = ", ".join(ENGINE_STYLES[framework])
        known = "; pass_q is that of arXiv 2411.01783, in no engine described here" if style == "pass_q" else ""
        return f"{framework} has no {style} context parallelism (it has {has}): described as if it had{known}"
    if framework == "sglang" and shortest_prompt(setting.workload) < 2 * setting.layout.cp:
        return (
            f"SGLang cuts prompts from 2 x cp = {2 * setting.layout.cp} tokens on, and runs a batch with a shorter one "
            "whole on every rank: described as if it were cut"
        )
    if framework == "megatron" and style == "all_gather" and setting.workload.context_style is None:
        return (
            "TransformerEngine allows a ring for no layer with a sliding window: keys and values are gathered instead"
        )
    return None


def shortest_prompt(workload: Workload) -> int:
    """Return the tokens of the shortest prompt, or part of one, that a prefill runs at once on any replica."""
    totals = [tokens for tokens in workload.replica_tokens if tokens] or [workload.num_tokens]
    return min(request_lengths(workload.pass_tokens(min(totals)), requests_at_once(workload)))


def check_context(setting: Setting) -> None:
    """Raise ValueError where prompts, heads or layers do not allow the style, or the merge of decode has no group.

    Rings need two chunks of each prompt for each rank; trading heads needs heads that divide; TransformerEngine's
    rings know no sliding window.

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py attn_forward_func_with_cp.
    """
    check_backend(setting)
    if not is_context_cut(setting):
        return
    style, size = context_style(setting), setting.layout.cp
    if style in RINGS:
        check_length(shortest_prompt(setting.workload), size)
    if style in ("ring", "ulysses_ring") and setting.framework == "megatron" and setting.shape.sliding_layers:
        raise ValueError(
            "Context parallelism does not support sliding window attention with "
            f"cp_comm_type='{TE_NAMES[style]}': {setting.shape.name} has {len(setting.shape.sliding_layers)} layers "
            "with a window; all_gather and ulysses allow it"
        )
    if style == "ulysses":
        check_heads(setting, size)
    if style == "ulysses_ring":
        check_heads(setting, ulysses_ranks(setting))


def attention_calls(setting: Setting) -> Calls:
    """Return what the attention of one layer calls, in order.

    Raises:
        ValueError: see ``check_context``.
    """
    check_context(setting)
    decode = decode_context_calls(setting)
    if not is_context_cut(setting):
        return decode
    style, size = context_style(setting), setting.layout.cp
    if style == "ring":
        return (("cp.kv_ring", size - 1), *decode)
    if style == "pass_q":
        return (*pass_query_calls(size), *decode)
    if style == "all_gather":
        return (*((part.name, part.calls) for part in _gathers(setting)), *decode)
    before, after = ulysses_calls(setting)
    if style == "ulysses":
        return (*before, *after, *decode)
    return (*before, ("cp.kv_ring", size // ulysses_ranks(setting) - 1), *after, *decode)


def output_calls(setting: Setting) -> Calls:
    """Return what brings the tokens of a context group together again behind the last layer.

    vLLM gathers the rows of all ranks in every step, those of decode too, of which each rank has all; SGLang and
    TensorRT-LLM those of a prefill.
    """
    is_gathered = setting.framework == "vllm" or (setting.framework in OUTPUT_SOURCES and is_context_cut(setting))
    return (("pcp.hidden_states", 1),) if setting.layout.cp > 1 and is_gathered else ()


def why_no_context(setting: Setting) -> str:
    """Say why neither form of context parallelism puts anything on the wire."""
    layout, phase = setting.layout, setting.workload.phase
    if phase == "decode" and setting.framework == "tensorrt_llm" and layout.cp > 1:
        return "cuts the prompt: what TensorRT-LLM does in decode (heads traded again, or Helix) is not described"
    if phase == "decode" and layout.cp > 1:
        return "cuts the prompt: in decode only dcp > 1 puts traffic on the wire"
    if phase == "prefill" and layout.dcp > 1:
        return "dcp cuts the cache: a prefill that finds nothing in it (cached_tokens=0) has nothing to exchange"
    return "cp=1: its groups have one rank"


def hop_bytes(local_tokens: int, heads: Heads, element_bytes: int) -> int:
    """Return what one hop of a ring of keys and values carries: (S / P) * 2 * (K / TP) * d * b.

    >>> hop_bytes(65_536, Heads(query_heads=16, kv_heads=1, key_dim=128, value_dim=128), 2)
    33554432

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py AttnFuncWithCPAndKVP2P.forward.
    """
    return local_tokens * heads.kv_elements * element_bytes


def context_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the streams of context parallelism in prefill, and of decode context parallelism."""
    streams: list[Stream] = [*decode_context_streams(setting, order), *_output_stream(setting, order)]
    if not is_context_cut(setting):
        return tuple(streams)
    style, groups = context_style(setting), setting.groups["cp"]
    if style == "all_gather":
        streams += _gather_streams(setting, order)
    elif style == "pass_q":
        streams += pass_query_streams(setting, order)
    elif style == "ring":
        streams += _ring_stream(setting, order, groups)
    elif style == "ulysses":
        streams += ulysses_streams(setting, order, groups)
    else:
        inner, outer = subgroups(groups, ulysses_ranks(setting))
        streams += [*ulysses_streams(setting, order, inner), *_ring_stream(setting, order, outer)]
    return tuple(streams)


def _kv_rows(setting: Setting) -> int:
    """Return the tokens whose keys and values a rank has to pass on.

    Its new ones, and its share of what was cached; but vLLM's and SGLang's ranks each have all that was cached.
    """
    workload = setting.workload
    if not workload.cached_tokens or (
        context_style(setting) == "all_gather" and setting.framework in ("vllm", "sglang")
    ):
        return setting.local_tokens
    requests = requests_at_once(workload)
    cached = local_rows(requests * workload.cached_tokens, requests, setting.layout.cp, setting.framework)
    return setting.local_tokens + cached


def _kv_dtype(setting: Setting) -> str:
    """Return in which dtype keys and values travel: that of the cache, but serving engines quantize behind the wire."""
    asked = setting.workload.kv_dtype
    if asked is None or asked in KV_FORMATS or setting.framework in ("vllm", "sglang"):
        return setting.dtype
    return dtype_name(asked)


def _ring_stream(setting: Setting, order: Order, groups: Groups) -> tuple[Stream, ...]:
    """Return the ring of keys and values. Where heads were traded before, hops stay as large and become fewer."""
    dtype = _kv_dtype(setting)
    hop = hop_bytes(_kv_rows(setting), rank_heads(setting.shape, setting.tp), dtype_bytes(dtype))
    what = "2 * (K / TP) * d * b"
    if setting.shape.mla is not None:
        what = "(Hq / TP) * (nope + rope + v) * b, K and V expanded"
    hops = "P - 1" if len(groups[0]) == setting.layout.cp else "P / ulysses_ranks - 1"
    return make_stream(
        setting,
        order,
        name="cp.kv_ring",
        op="send_recv",
        groups=groups,
        payload_bytes=hop,
        formula=f"((S + S_cached) / P) * {what} a hop, {hops} hops a layer"
        if setting.workload.cached_tokens
        else f"(S / P) * {what} a hop, {hops} hops a layer",
        source=f"{_TE} AttnFuncWithCPAndKVP2P",
        rule=Ring(num_bytes=hop),
        dtype=dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """One tensor, or several of one size, that a layer gathers: elements of a token on a rank."""

    name: str
    elements: int
    formula: str
    source: str
    calls: int = 1


def _gathers(setting: Setting) -> tuple[_Gather, ...]:
    """Return what an engine gathers for the attention of one layer.

    TransformerEngine gathers K, then V. SGLang gathers K and V, or latent and rotary key, as one tensor, vLLM latent
    and rotary key apart; both gather the keys of a sparse-attention index too.
    """
    shape, heads, framework = setting.shape, rank_heads(setting.shape, setting.tp), setting.framework
    if framework not in ("vllm", "sglang"):
        source = f"{_TE} AttnFuncWithCPAndKVAllGather"
        if heads.key_elements == heads.value_elements:
            per_token = _Gather(
                name="cp.kv_all_gather",
                elements=heads.key_elements,
                formula="S * (K / TP) * d * b, S / P from each rank: K, then V",
                source=source,
                calls=2,
            )
            return (per_token,)
        key, value = "S * (Hq / TP) * (nope + rope) * b, K expanded", "S * (Hq / TP) * v * b, V expanded"
        return (
            _Gather(name="cp.key_all_gather", elements=heads.key_elements, formula=key, source=source),
            _Gather(name="cp.value_all_gather", elements=heads.value_elements, formula=value, source=source),
        )
    if shape.mla is None:
        elements, formula = heads.kv_elements, "S * 2 * (K / TP) * d * b, S / P from each rank"
        found = [
            _Gather(name="cp.kv_all_gather", elements=elements, formula=formula, source=f"{_SGLANG} gather_kv_cache")
        ]
    elif framework == "sglang":
        elements, formula = shape.mla.latent_dim, "S * (kv_lora + rope) * b, S / P from each rank"
        source = f"{_SGLANG} materialize_full_mla_kv"
        found = [_Gather(name="cp.kv_all_gather", elements=elements, formula=formula, source=source)]
    else:
        source = f"{_PCP} maybe_gather_mla_latent_cache_inputs"
        latent, rope = "S * kv_lora * b, S / P from each rank", "S * rope * b, S / P from each rank"
        found = [
            _Gather(name="cp.kv_all_gather", elements=shape.mla.kv_lora_rank, formula=latent, source=source),
            _Gather(name="cp.rope_all_gather", elements=shape.mla.qk_rope_head_dim, formula=rope, source=source),
        ]
    if shape.indexer is not None:
        source = (
            f"{_PCP} maybe_gather_indexer_k" if framework == "vllm" else f"{_SGLANG} materialize_full_indexer_k_cache"
        )
        formula = "S * d_index * b, S / P from each rank: keys of the sparse-attention index"
        found.append(
            _Gather(name="cp.index_all_gather", elements=shape.indexer.head_dim, formula=formula, source=source)
        )
    return tuple(found)


def _gather_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    groups, dtype, rows = setting.groups["cp"], _kv_dtype(setting), _kv_rows(setting)
    return tuple(
        stream
        for part in _gathers(setting)
        for stream in make_stream(
            setting,
            order,
            name=part.name,
            op="all_gather",
            groups=groups,
            payload_bytes=len(groups[0]) * rows * part.elements * dtype_bytes(dtype),
            formula=part.formula,
            source=part.source,
            dtype=dtype,
        )
    )


def _output_stream(setting: Setting, order: Order) -> tuple[Stream, ...]:
    groups = setting.groups["cp"]
    return make_stream(
        setting,
        order,
        name="pcp.hidden_states",
        op="all_gather",
        groups=groups,
        payload_bytes=len(groups[0]) * setting.hidden_bytes,
        formula="S * H * b, S / P from each rank"
        if is_context_cut(setting)
        else "P * B * H * b: every rank has all rows of a decode",
        source=OUTPUT_SOURCES.get(setting.framework, ""),
    )
