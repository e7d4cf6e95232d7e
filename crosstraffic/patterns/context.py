"""Context parallelism: KV of a long prompt around a ring or gathered; and the decode form that shares the TP ranks."""

from crosstraffic.patterns.matrix import Ring
from crosstraffic.patterns.model import dtype_bytes
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

_TE = "TransformerEngine @ d0067d0da6cb attention/dot_product_attention/context_parallel.py"
_PCP = "vLLM @ 017e9f4448b7 model_executor/layers/attention/pcp.py"
_DCP = "vLLM @ 017e9f4448b7 v1/attention/ops/common.py"
LSE_BYTES = 4


def context_style(setting: Setting) -> str:
    """Return how KV travels: as asked, else as the engine does it (Megatron-Core: ring; serving engines: gather)."""
    asked = setting.workload.context_style
    if asked is not None:
        return asked
    return "ring" if setting.framework == "megatron" else "all_gather"


def attention_calls(setting: Setting) -> Calls:
    """Return what the attention of one layer calls, in order."""
    layout = setting.layout
    if setting.workload.phase == "decode":
        return (("dcp.query", 1), ("dcp.lse", 1), ("dcp.output", 1)) if layout.dcp > 1 else ()
    if layout.cp == 1:
        return ()
    return (("cp.kv_ring", layout.cp - 1),) if context_style(setting) == "ring" else (("cp.kv_all_gather", 1),)


def context_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the streams of context parallelism in prefill, and of decode context parallelism in decode."""
    if setting.workload.phase == "decode":
        return _decode_streams(setting, order)
    groups = setting.groups["cp"]
    num_ranks, shape = len(groups[0]), setting.shape
    kv_bytes = dtype_bytes(setting.workload.kv_dtype or setting.dtype)
    heads = max(1, shape.kv_heads_stored // setting.tp)
    per_token, what = heads * shape.kv_elements_per_head * kv_bytes, "2 * (K / TP) * d * b"
    if shape.mla is not None:
        what = "(kv_lora + rope) * b"
    if context_style(setting) == "all_gather":
        return make_stream(
            setting,
            order,
            name="cp.kv_all_gather",
            op="all_gather",
            groups=groups,
            payload_bytes=num_ranks * setting.local_tokens * per_token,
            formula=f"S * {what}, S / P from each rank",
            source=f"{_PCP}, SGLang @ 6ed5780c4fd3 srt/layers/cp"
            if shape.mla
            else f"{_TE} AttnFuncWithCPAndKVAllGather",
        )
    if shape.mla is not None:
        expanded = shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim + shape.mla.v_head_dim
        per_token = shape.num_heads // setting.tp * expanded * kv_bytes
        what = "(Hq / TP) * (nope + rope + v) * b, K and V expanded"
    hop = setting.local_tokens * per_token
    return make_stream(
        setting,
        order,
        name="cp.kv_ring",
        op="send_recv",
        groups=groups,
        payload_bytes=hop,
        formula=f"(S / P) * {what} a hop, P - 1 hops a layer",
        source=f"{_TE} AttnFuncWithCPAndKVP2P",
        rule=Ring(num_bytes=hop),
    )


def _decode_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Each rank holds every dcp-th token: gather the queries, then merge partial outputs by their softmax weights."""
    dcp = setting.layout.dcp
    if dcp == 1:
        return ()
    shape, groups, tokens = setting.shape, setting.groups["dcp"], setting.local_tokens
    query_dim, value_dim = shape.head_dim, shape.head_dim
    if shape.mla is not None:
        query_dim, value_dim = shape.mla.latent_dim, shape.mla.kv_lora_rank
    local_heads = shape.num_heads // setting.tp
    output_bytes, output_dtype = setting.element_bytes, setting.dtype
    if setting.framework == "sglang":
        output_bytes, output_dtype = 4, "float32"
    return (
        *make_stream(
            setting,
            order,
            name="dcp.query",
            op="all_gather",
            groups=groups,
            payload_bytes=dcp * tokens * local_heads * query_dim * setting.element_bytes,
            formula="B * (Hq / TP) * D_q * b from each rank",
            source=_DCP,
        ),
        *make_stream(
            setting,
            order,
            name="dcp.lse",
            op="all_gather",
            groups=groups,
            payload_bytes=dcp * tokens * local_heads * dcp * LSE_BYTES,
            formula="B * (Hq * dcp / TP) * 4 from each rank",
            source=f"{_DCP} _cp_lse_common",
            dtype="float32",
        ),
        *make_stream(
            setting,
            order,
            name="dcp.output",
            op="reduce_scatter",
            groups=groups,
            payload_bytes=tokens * local_heads * dcp * value_dim * output_bytes,
            formula="B * (Hq * dcp / TP) * D_v * b",
            source=f"{_DCP} cp_lse_ag_out_rs",
            dtype=output_dtype,
        ),
    )
