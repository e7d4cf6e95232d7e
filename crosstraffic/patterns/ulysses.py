"""Ulysses: all-to-alls that trade a share of the tokens for a share of the heads, before attention and after it."""

from crosstraffic.patterns.heads import Heads, rank_heads
from crosstraffic.patterns.layout import Groups
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

_TE = "TransformerEngine @ d0067d0da6cb context_parallel.py"
_TRT = "TensorRT-LLM @ 00dbe288d2a7 cpp/tensorrt_llm/common/attentionOp.cpp"
NAMES = ("query", "key", "value", "output")


def sent_bytes(local_tokens: int, heads: Heads, num_ranks: int, element_bytes: int) -> int:
    """Return what one rank sends to others in the four all-to-alls of a layer: (P-1)/P * (S/P) * (2Hq' + 2K') * d * b.

    >>> qwen3_32b = Heads(query_heads=64, kv_heads=8, key_dim=128, value_dim=128)
    >>> sent_bytes(131_072 // 8, qwen3_32b, 8, 2)
    528482304

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py AttnFuncWithCPAndQKVOA2A, flash_attn_a2a_communicate.
    """
    elements = heads.query_elements + heads.kv_elements + heads.output_elements
    return (num_ranks - 1) * local_tokens * elements // num_ranks * element_bytes


def crossover_ranks(query_heads: int, kv_heads: int) -> int:
    """Return from how many ranks on Ulysses sends no more than a ring of KV: P = (Hq + K) / K, there both are equal.

    >>> crossover_ranks(64, 8)
    9

    Raises:
        ValueError: query heads do not divide over the KV heads.
    """
    if query_heads < 1 or kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads do not divide over {kv_heads} KV heads")
    return (query_heads + kv_heads) // kv_heads


def check_heads(setting: Setting, num_ranks: int) -> None:
    """Raise ValueError where the heads of a rank do not divide over the ranks that trade them.

    TensorRT-LLM repeats KV heads where there are too few of them; TransformerEngine refuses.

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py AttnFuncWithCPAndQKVOA2A.forward; TensorRT-LLM
    @ 00dbe288d2a7 attentionOp.cpp (mUlyssesMQABroadcast).
    """
    heads = rank_heads(setting.shape, setting.tp)
    repeats = setting.framework == "tensorrt_llm"
    if heads.query_heads % num_ranks or (heads.kv_heads % num_ranks and not repeats):
        shared = "" if repeats else f", num_heads_kv = {heads.kv_heads}"
        cap = heads.query_heads if repeats else heads.kv_heads
        what = "heads / TP" if repeats or setting.shape.mla is not None else "KV heads / TP"
        raise ValueError(
            "ulysses: cp_comm_type='a2a' requires num_heads % cp_size == 0 for Q, K, V. Found "
            f"num_heads_q = {heads.query_heads}{shared}, cp_size = {num_ranks}: P <= {what} = {cap}"
        )


def subgroups(groups: Groups, ulysses_ranks: int) -> tuple[Groups, Groups]:
    """Split each context group into groups of neighbours that trade heads, and groups across them that form rings.

    >>> subgroups(((0, 2, 4, 6),), 2)
    (((0, 2), (4, 6)), ((0, 4), (2, 6)))

    Source: Megatron-LM @ d98e8a64ddf3 core/parallel_state.py create_hierarchical_groups (sizes [a2a, p2p]).
    """
    inner = tuple(
        group[start : start + ulysses_ranks] for group in groups for start in range(0, len(group), ulysses_ranks)
    )
    outer = tuple(group[start::ulysses_ranks] for group in groups for start in range(ulysses_ranks))
    return inner, outer


def ulysses_ranks(setting: Setting) -> int:
    """Return the ranks that trade heads where Ulysses and a ring are combined: as asked, else those on one node.

    Raises:
        ValueError: they do not divide the context group.
    """
    groups, asked = setting.groups["cp"], setting.workload.ulysses_ranks
    size = len(groups[0])
    if asked is not None:
        if size % asked:
            raise ValueError(f"ulysses_ranks must divide the context-parallel ranks: {asked} of {size}")
        return asked
    nodes = setting.nodes
    for count in range(size, 1, -1):
        if size % count == 0:
            inner, _ = subgroups(groups, count)
            if all(nodes[rank] == nodes[group[0]] for group in inner for rank in group):
                return count
    return 1


def ulysses_calls(setting: Setting) -> tuple[Calls, Calls]:
    """Return the all-to-alls before and after the attention of one layer."""
    if setting.framework == "tensorrt_llm":
        return (("cp.ulysses_qkv", 1),), (("cp.ulysses_output", 1),)
    return tuple((f"cp.ulysses_{name}", 1) for name in NAMES[:3]), (("cp.ulysses_output", 1),)


def ulysses_streams(setting: Setting, order: Order, groups: Groups) -> tuple[Stream, ...]:
    """Return the all-to-alls on ``groups``; payloads are what a rank sends in total, what it keeps included.

    TensorRT-LLM sends query, key and value in one call. MLA trades expanded heads.
    """
    num_ranks, heads, rows = len(groups[0]), rank_heads(setting.shape, setting.tp), setting.local_tokens
    kv_heads = num_ranks * -(-heads.kv_heads // num_ranks)
    key, value = kv_heads * heads.key_dim, kv_heads * heads.value_dim
    elements = {
        "query": (heads.query_elements, "(S / P) * (Hq / TP) * d * b"),
        "key": (key, "(S / P) * (K / TP) * d * b"),
        "value": (value, "(S / P) * (K / TP) * d * b"),
        "qkv": (heads.query_elements + key + value, "(S / P) * ((Hq + 2 * K) / TP) * d * b, K / TP at least P"),
        "output": (heads.output_elements, "(S / P) * (Hq / TP) * d * b"),
    }
    source = _TE if setting.framework != "tensorrt_llm" else _TRT
    function = "AttnFuncWithCPAndQKVOA2A" if setting.framework != "tensorrt_llm" else "ulyssesContextPreprocess"
    before, after = ulysses_calls(setting)
    streams: list[Stream] = []
    for name, _ in (*before, *after):
        count, formula = elements[name.removeprefix("cp.ulysses_")]
        streams += make_stream(
            setting,
            order,
            name=name,
            op="all_to_all",
            groups=groups,
            payload_bytes=rows * count * setting.element_bytes,
            formula=formula if setting.shape.mla is None else f"{formula}, K and V expanded to Hq heads",
            source=f"{source} {function}",
        )
    return tuple(streams)
