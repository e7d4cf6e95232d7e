"""Tensor parallelism: the all-reduces of each layer, embedding and logits; sequence parallelism on the same group."""

from crosstraffic.patterns.setting import Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

VOCAB_PADDING = 64
_LINEAR = "vLLM @ 017e9f4448b7 layers/linear.py RowParallelLinear.forward"
_EMBEDDING = "vLLM @ 017e9f4448b7 layers/vocab_parallel_embedding.py VocabParallelEmbedding.forward"
_LOGITS = "vLLM @ 017e9f4448b7 layers/logits_processor.py _gather_logits"
_SEQUENCE = "Megatron-LM @ d98e8a64ddf3 core/tensor_parallel/mappings.py"


def vocab_shard(vocab: int, tp: int) -> int:
    """Return the vocabulary entries of one rank, the vocabulary padded to 64 and then to equal shards.

    >>> vocab_shard(128256, 8)
    16032
    """
    return -(-(-(-vocab // VOCAB_PADDING) * VOCAB_PADDING) // tp)


def tensor_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the streams of tensor parallelism; payloads are M = T * H * b, logits T_s * V * b in total.

    T_s, the tokens whose logits are wanted: all in decode, one per request in prefill.
    """
    groups, size = setting.tensor_groups, setting.hidden_bytes
    workload = setting.workload
    sampled = workload.num_tokens if workload.phase == "decode" else min(workload.batch, workload.num_tokens)
    logits = sampled * vocab_shard(setting.shape.vocab, setting.tp) * setting.tp * setting.element_bytes
    reduce_formula = "T * H * b"
    streams: list[Stream] = []
    for name in ("tp.attention_output", "tp.mlp_output"):
        streams += make_stream(
            setting,
            order,
            name=name,
            op="all_reduce",
            groups=groups,
            payload_bytes=size,
            formula=reduce_formula,
            source=_LINEAR,
        )
    streams += make_stream(
        setting,
        order,
        name="tp.moe_gather",
        op="all_gather",
        groups=groups,
        payload_bytes=size,
        formula="T * H * b: expert output of tokens that were cut over TP",
        source="vLLM @ 017e9f4448b7 models/deepseek_v2.py DeepseekV2MoE.forward",
    )
    streams += make_stream(
        setting,
        order,
        name="tp.embedding",
        op="all_reduce",
        groups=groups,
        payload_bytes=size,
        formula=reduce_formula,
        source=_EMBEDDING,
    )
    streams += make_stream(
        setting,
        order,
        name="tp.logits",
        op="all_gather",
        groups=groups,
        payload_bytes=logits,
        formula="T_s * V_padded * b, V_padded / P from each rank",
        source=_LOGITS,
    )
    return tuple(streams)


def sequence_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return what sequence parallelism makes of the all-reduces: gather and scatter of the same bytes, same group."""
    groups, size = setting.tensor_groups, setting.hidden_bytes
    formula = "T * H * b, T padded to a multiple of TP"
    return (
        *make_stream(
            setting,
            order,
            name="sp.all_gather",
            op="all_gather",
            groups=groups,
            payload_bytes=size,
            formula=formula,
            source=f"{_SEQUENCE} _gather_along_first_dim",
        ),
        *make_stream(
            setting,
            order,
            name="sp.reduce_scatter",
            op="reduce_scatter",
            groups=groups,
            payload_bytes=size,
            formula=formula,
            source=f"{_SEQUENCE} _reduce_scatter_along_first_dim",
        ),
        *make_stream(
            setting,
            order,
            name="sp.embedding",
            op="reduce_scatter",
            groups=groups,
            payload_bytes=size,
            formula=formula,
            source=f"{_SEQUENCE} _reduce_scatter_along_first_dim",
        ),
        *make_stream(
            setting,
            order,
            name="sp.output",
            op="all_gather",
            groups=groups,
            payload_bytes=size,
            formula=f"{formula}: before the output layer",
            source=f"{_SEQUENCE} _gather_along_first_dim",
        ),
    )
