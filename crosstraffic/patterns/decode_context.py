"""Decode context parallelism: TP ranks that would repeat the KV cache hold a share of its tokens each instead.

A step gathers the queries, attends to the local tokens, and merges outputs by their log-sum-exps. A prefill does the
same, or gathers the cache, where a request has tokens in it already.
"""

from collections.abc import Mapping

from crosstraffic.patterns.layout import Groups
from crosstraffic.patterns.model import KV_FORMATS, dtype_bytes, dtype_name
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Op, Stream
from crosstraffic.patterns.workload import Workload

_COMMON = "vLLM @ 017e9f4448b7 v1/attention/ops/common.py"
_A2A = "vLLM @ 017e9f4448b7 v1/attention/ops/dcp_alltoall.py dcp_a2a_lse_reduce"
_UTILS = "vLLM @ 017e9f4448b7 v1/attention/ops/dcp_utils.py MLADCPManager"
_SGLANG = "SGLang @ 6ed5780c4fd3 srt/layers/dcp/comm.py"
LSE_BYTES = 4
WORKSPACE_TOKENS = 64 * 1024  # vLLM: most cached tokens that a chunk of a prefill brings together
NEEDS_DCP: Mapping[str, str] = {
    "vllm": "dcp_comm_backend='a2a' requires decode_context_parallel_size > 1.",
    "sglang": "--dcp-comm-backend a2a only affects the decode context-parallel attention reduction and therefore "
    "requires --dcp-size / --decode-context-parallel-size > 1, but got dcp_size=1.",
}


def token_rank(token: int, dcp: int, interleave: int = 1) -> int:
    """Return which rank of a decode-context group holds a token of a request.

    >>> [token_rank(token, 2) for token in range(5)], [token_rank(token, 2, 2) for token in range(5)]
    ([0, 1, 0, 1, 0], [0, 0, 1, 1, 0])

    Source: vLLM @ 017e9f4448b7 config/parallel.py cp_kv_cache_interleave_size; SGLang @ 6ed5780c4fd3
    srt/layers/dcp/layout.py (interleave 1).
    """
    return token // interleave % dcp


def rank_tokens(num_tokens: int, dcp: int, interleave: int = 1) -> tuple[int, ...]:
    """Return how many tokens of a request each rank of a decode-context group holds.

    >>> rank_tokens(10, 4), rank_tokens(10, 4, 4)
    ((3, 3, 2, 2), (4, 4, 2, 0))

    Source: vLLM @ 017e9f4448b7 v1/attention/backends/utils.py get_dcp_local_seq_lens.
    """
    rounds, rest = divmod(num_tokens, interleave * dcp)
    return tuple(rounds * interleave + min(interleave, max(0, rest - rank * interleave)) for rank in range(dcp))


def largest_share(num_tokens: int, dcp: int, interleave: int = 1) -> int:
    """Return the tokens of a request that the fullest rank keeps: ceil(S / dcp) where tokens are dealt out one by one.

    >>> largest_share(10, 4), largest_share(10, 4, 4)
    (3, 4)
    """
    return rank_tokens(num_tokens, dcp, interleave)[0]


def kv_parallel_bytes(
    num_tokens: int, num_heads: int, *, query_dim: int, value_dim: int, num_ranks: int, element_bytes: int
) -> tuple[int, int]:
    """Return the least that a rank receives of queries, and sends of partial outputs, in one layer.

    Any attention over a KV cache whose tokens are cut over ranks: a rank starts with the queries of ``num_heads`` / P
    heads and needs all; it ends with the outputs of these heads, merged from a partial output and a log-sum-exp of
    every rank. (P - 1) / P * T * Hq * D_q * b, and (P - 1) / P * T * Hq * (D_v * b + 4).

    >>> kv_parallel_bytes(32, 128, query_dim=576, value_dim=512, num_ranks=8, element_bytes=2)
    (4128768, 3684352)

    Raises:
        ValueError: heads do not divide over the ranks.

    Source: arXiv 2507.07120 (Helix), section 2; vLLM @ 017e9f4448b7 v1/attention/ops/dcp_alltoall.py.
    """
    if num_heads % num_ranks:
        raise ValueError(f"{num_heads} heads do not divide over {num_ranks} ranks")
    moved = (num_ranks - 1) * num_tokens * (num_heads // num_ranks)
    return moved * query_dim * element_bytes, moved * (value_dim * element_bytes + LSE_BYTES)


def helix_bytes(
    num_tokens: int, num_heads: int, *, value_dim: int, kvp: int, tpa: int, element_bytes: int, stats_bytes: int = 4
) -> int:
    """Return what one rank of Helix sends in the all-to-all after attention, whatever the length of the context.

    ``kvp`` ranks share the tokens, ``tpa`` the heads; every rank makes the queries it needs itself, and after the
    exchange all kvp x tpa ranks go on as TP ranks. ``stats_bytes``: TensorRT-LLM sends two floats a head, 8.

    >>> helix_bytes(32, 128, value_dim=512, kvp=8, tpa=1, element_bytes=2)
    3684352

    Source: arXiv 2507.07120, section 2.1; TensorRT-LLM @ 0071496dc625 _torch/distributed/ops.py HelixAllToAllNative.
    """
    if num_heads % (kvp * tpa):
        raise ValueError(f"{num_heads} heads do not divide over kvp x tpa = {kvp} x {tpa} ranks")
    return (kvp - 1) * num_tokens * (num_heads // (kvp * tpa)) * (value_dim * element_bytes + stats_bytes)


def check_backend(setting: Setting) -> None:
    """Raise ValueError for an exchange of outputs that has no group, or whose heads do not divide over it.

    Source: vLLM @ 017e9f4448b7 config/parallel.py, v1/attention/ops/dcp_alltoall.py; SGLang @ 6ed5780c4fd3
    server_args.py _handle_dcp_validation.
    """
    if setting.workload.dcp_backend != "a2a":
        return
    dcp = setting.layout.dcp
    if dcp == 1:
        raise ValueError(
            NEEDS_DCP.get(
                setting.framework, f"{setting.framework} has no decode context parallelism: dcp_backend='a2a'"
            )
        )
    heads = attending_heads(setting)
    if heads % dcp:
        raise ValueError(f"H={heads} must be divisible by DCP world size {dcp}.")


def is_prefill_context(setting: Setting) -> bool:
    """Tell whether ranks hold prefill context (vLLM's PCP): then decode reuses those ranks, not those of TP alone."""
    return setting.framework == "vllm" and setting.layout.cp > 1


def attending_heads(setting: Setting) -> int:
    """Return the query heads for which a rank attends to its share of the tokens.

    Those of its whole decode-context group. Under vLLM's PCP the ranks of a context group have the same heads: its own
    where the group is the context group, all where it spans TP x PCP.
    """
    own, layout = setting.shape.num_heads // setting.tp, setting.layout
    if is_prefill_context(setting):
        return own if layout.dcp == layout.cp else own * layout.tp
    return own * layout.dcp


def decode_context_calls(setting: Setting) -> Calls:
    """Return what decode context parallelism adds to the attention of one layer, in order.

    Nothing in a prefill that finds nothing in the cache. A prefill of a model with latent attention gathers the
    cached latents; any other attends with gathered queries, as decode does.
    """
    layout, workload = setting.layout, setting.workload
    if layout.dcp == 1:
        return ()
    if workload.phase == "prefill":
        if workload.cached_tokens == 0:
            return ()
        if setting.shape.mla is not None:
            return (("dcp.context", context_chunks(setting)[0]),)
    is_packed = merges_packed(setting)
    merge: Calls = (("dcp.exchange", 1),) if is_packed else (("dcp.lse", 1), ("dcp.output", 1))
    if not is_prefill_context(setting):
        return (("dcp.query", 1), *merge)
    query: Calls = (("dcp.query", 1),) if layout.dcp > layout.cp else ()
    return (*query, *merge, *((("dcp.heads", 1),) if is_packed else ()))


def merges_packed(setting: Setting) -> bool:
    """Tell whether outputs and log-sum-exps go in one all-to-all; SGLang has that for latent attention only."""
    if setting.framework == "sglang" and setting.shape.mla is None:
        return False
    return setting.workload.dcp_backend == "a2a"


def requests_at_once(workload: Workload) -> int:
    """Return the requests of one replica that a prefill runs at once: all, or those of one micro-batch."""
    return min(-(-workload.batch // workload.num_micro_batches), workload.pass_tokens(workload.num_tokens))


def context_chunks(setting: Setting) -> tuple[int, int]:
    """Return in how many calls a prefill gathers what is cached, and the tokens that a rank contributes to each.

    A rank contributes its share of every request, rounded up. vLLM brings at most ``WORKSPACE_TOKENS`` together at a
    time (less where its model length allows less than 8192 tokens): chunks are counted as equal ones here.

    Source: vLLM @ 017e9f4448b7 model_executor/layers/attention/mla_attention.py build_mla_chunked_context_metadata,
    determine_chunked_prefill_workspace_size; SGLang @ 6ed5780c4fd3 srt/layers/dcp/comm.py all_gather_kv_cache_for_dcp.
    """
    dcp = setting.layout.dcp
    rows = requests_at_once(setting.workload) * largest_share(setting.workload.cached_tokens, dcp)
    calls = 1
    if setting.framework == "vllm":
        calls = -(-rows // (WORKSPACE_TOKENS // dcp))
    return calls, -(-rows // calls)


def _query_groups(setting: Setting) -> Groups:
    return setting.tensor_groups if is_prefill_context(setting) else setting.groups["dcp"]


def decode_context_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the streams of decode context parallelism.

    SGLang merges in float32; without latent attention it all-reduces all heads and keeps its own. Under vLLM's PCP
    outputs are all-reduced too: every rank of the group needs the same heads.
    """
    if setting.layout.dcp == 1:
        return ()
    check_backend(setting)
    shape, groups, tokens, dcp = setting.shape, setting.groups["dcp"], setting.local_tokens, setting.layout.dcp
    query_dim, value_dim = shape.head_dim, shape.head_dim
    if shape.mla is not None:
        query_dim, value_dim = shape.mla.latent_dim, shape.mla.kv_lora_rank
    own, heads, element = shape.num_heads // setting.tp, attending_heads(setting), setting.element_bytes
    askers = _query_groups(setting)
    is_sglang, is_packed = setting.framework == "sglang", merges_packed(setting)
    reduce: tuple[Op, str, str] = ("reduce_scatter", "B * (Hq * dcp / TP) * D_v * b", f"{_COMMON} cp_lse_ag_out_rs")
    if is_prefill_context(setting):
        reduce = ("all_reduce", "B * Hq_local * D_v * b, Hq_local: Hq / TP, or Hq", f"{_COMMON} cp_lse_ag_out_ar")
    elif is_sglang and shape.mla is None:
        reduce = ("all_reduce", "B * (Hq * dcp / TP) * d * 4", f"{_SGLANG} cp_lse_ag_out_rs_mha")
    elif is_sglang:
        reduce = ("reduce_scatter", "B * (Hq * dcp / TP) * D_v * 4", f"{_SGLANG} cp_lse_ag_out_rs_mla")
    op, formula, source = reduce
    found = [
        *_context_stream(setting, order),
        *make_stream(
            setting,
            order,
            name="dcp.query",
            op="all_gather",
            groups=askers,
            payload_bytes=len(askers[0]) * tokens * own * query_dim * element,
            formula="B * (Hq / TP) * D_q * b from each rank",
            source=f"{_SGLANG} all_gather_q_for_mla_decode" if is_sglang else _UTILS,
        ),
    ]
    if is_packed:
        found += make_stream(
            setting,
            order,
            name="dcp.exchange",
            op="all_to_all",
            groups=groups,
            payload_bytes=tokens * heads * (value_dim * element + LSE_BYTES),
            formula="B * Hq_local * (D_v * b + 4): outputs with log-sum-exps packed to them",
            source=f"{_SGLANG} dcp_a2a_lse_reduce" if is_sglang else _A2A,
        )
        found += make_stream(
            setting,
            order,
            name="dcp.heads",
            op="all_gather",
            groups=setting.groups["cp"],
            payload_bytes=tokens * own * value_dim * element,
            formula="B * (Hq / TP) * D_v * b: heads that the exchange left on different ranks",
            source="vLLM @ 017e9f4448b7 model_executor/layers/attention/pcp.py finalize_mla_pcp_decode",
        )
        return tuple(found)
    found += make_stream(
        setting,
        order,
        name="dcp.lse",
        op="all_gather",
        groups=groups,
        payload_bytes=dcp * tokens * heads * LSE_BYTES,
        formula="B * Hq_local * 4 from each rank, Hq_local: Hq * dcp / TP"
        if not is_prefill_context(setting)
        else "B * Hq_local * 4 from each rank, Hq_local: Hq / TP, or Hq",
        source=f"{_SGLANG} _ag_lse" if is_sglang else f"{_COMMON} _cp_lse_common",
        dtype="float32",
    )
    found += make_stream(
        setting,
        order,
        name="dcp.output",
        op=op,
        groups=groups,
        payload_bytes=tokens * heads * value_dim * (4 if is_sglang else element),
        formula=formula,
        source=source,
        dtype="float32" if is_sglang else None,
    )
    return tuple(found)


def _context_stream(setting: Setting, order: Order) -> tuple[Stream, ...]:
    mla, workload = setting.shape.mla, setting.workload
    if mla is None or workload.phase != "prefill" or workload.cached_tokens == 0:
        return ()
    dtype = setting.dtype
    if setting.framework == "sglang" and workload.kv_dtype not in (None, *KV_FORMATS):
        dtype = dtype_name(str(workload.kv_dtype))
    _, rows = context_chunks(setting)
    return make_stream(
        setting,
        order,
        name="dcp.context",
        op="all_gather",
        groups=setting.groups["dcp"],
        payload_bytes=setting.layout.dcp * rows * mla.latent_dim * dtype_bytes(dtype),
        formula="S_cached * (kv_lora + rope) * b, S_cached / dcp from each rank",
        source=f"{_SGLANG} all_gather_kv_cache_for_dcp" if setting.framework == "sglang" else f"{_UTILS}.kv_gather",
        dtype=dtype,
    )
