"""Tensor parallelism: the all-reduces of each layer and of the embedding, and the gather of the logits."""

from collections.abc import Mapping

from crosstraffic.patterns.data import sums_tokens
from crosstraffic.patterns.quantized import OnWire, format_of, quantized_all_reduce
from crosstraffic.patterns.setting import Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

VOCAB_PADDING: Mapping[str, int] = {"vllm": 64, "sglang": 64, "megatron": 128, "tensorrt_llm": 64}
TOP_TOKEN_BYTES = 8  # a float32 logit and its index, as float32
_VLLM = "vLLM @ 017e9f4448b7"
_SGLANG = "SGLang @ 6ed5780c4fd3"
_MEGATRON = "Megatron-LM @ d98e8a64ddf3"
_LINEAR: Mapping[str, str] = {
    "vllm": f"{_VLLM} layers/linear.py RowParallelLinear.forward",
    "sglang": f"{_SGLANG} layers/linear.py RowParallelLinear.forward",
    "megatron": f"{_MEGATRON} core/tensor_parallel/layers.py RowParallelLinear.forward",
    "tensorrt_llm": "TensorRT-LLM _torch/modules/linear.py Linear.forward, row parallel",
}
_EMBEDDING: Mapping[str, str] = {
    "vllm": f"{_VLLM} layers/vocab_parallel_embedding.py VocabParallelEmbedding.forward",
    "sglang": f"{_SGLANG} layers/vocab_parallel_embedding.py VocabParallelEmbedding.forward",
    "megatron": f"{_MEGATRON} core/tensor_parallel/layers.py VocabParallelEmbedding.forward",
    "tensorrt_llm": "TensorRT-LLM _torch/modules/embedding.py Embedding.forward",
}
_LOGITS: Mapping[str, str] = {
    "vllm": f"{_VLLM} layers/logits_processor.py _gather_logits",
    "sglang": f"{_SGLANG} layers/logits_processor.py _get_logits",
    "megatron": f"{_MEGATRON} core/models/gpt/gpt_model.py, runtime_gather_output",
    "tensorrt_llm": "TensorRT-LLM _torch/modules/embedding.py LMHead.forward",
}


def padded_vocab(vocab: int, tp: int, framework: str = "vllm") -> int:
    """Return the entries of a vocabulary cut over TP ranks, padding included: equal shards.

    vLLM and SGLang pad to a multiple of 64, whatever TP is; Megatron-Core to one of 128 * TP
    (make_vocab_size_divisible_by).

    >>> padded_vocab(128256, 8), padded_vocab(128256, 8, "megatron")
    (128256, 129024)

    Source: vLLM @ 017e9f4448b7 layers/vocab_parallel_embedding.py pad_vocab_size; Megatron-LM @ d98e8a64ddf3
    training/vocab_utils.py calculate_padded_vocab_size.
    """
    padding = VOCAB_PADDING[framework] * (tp if framework == "megatron" else 1)
    padded = -(-vocab // padding) * padding
    return -(-padded // tp) * tp


def vocab_shard(vocab: int, tp: int, framework: str = "vllm") -> int:
    """Return the vocabulary entries of one rank.

    >>> vocab_shard(128256, 8)
    16032
    """
    return padded_vocab(vocab, tp, framework) // tp


def logits_shard_bytes(num_tokens: int, vocab: int, tp: int, element_bytes: int, framework: str = "vllm") -> int:
    """Return bytes of logits that one rank works out for ``num_tokens`` tokens, and gives to the others.

    >>> logits_shard_bytes(64, 128256, 8, 2)
    2052096
    """
    return num_tokens * vocab_shard(vocab, tp, framework) * element_bytes


def received_logits(
    num_tokens: int, vocab: int, tp: int, element_bytes: int, *, to_all: bool = True, framework: str = "vllm"
) -> tuple[int, ...]:
    """Return bytes of logits that each rank gets from others: (P - 1) * T_s * V / P * b.

    All ranks by default; only the first where an engine gathers to one rank (vLLM where ``use_all_gather`` is False).

    >>> received_logits(1, 128, 2, 2), received_logits(1, 128, 2, 2, to_all=False)
    ((128, 128), (128, 0))

    Source: vLLM @ 017e9f4448b7 layers/logits_processor.py _gather_logits.
    """
    shard = logits_shard_bytes(num_tokens, vocab, tp, element_bytes, framework)
    return tuple((tp - 1) * shard if to_all or rank == 0 else 0 for rank in range(tp))


def top_token_bytes(num_tokens: int, tp: int) -> int:
    """Return bytes that are gathered, in total, where each rank tells only its best token: 8 * TP a token.

    Greedy drafts in vLLM do this instead of gathering logits: a float32 value and a float32 index of each rank.

    >>> top_token_bytes(64, 8)
    4096

    Source: vLLM @ 017e9f4448b7 layers/logits_processor.py get_top_tokens.
    """
    return TOP_TOKEN_BYTES * tp * num_tokens


def sampled_tokens(setting: Setting) -> int:
    """Return T_s, the tokens of one replica whose logits are wanted: all in decode, one per request in prefill."""
    workload = setting.workload
    if workload.phase == "decode":
        return workload.num_tokens
    return min(workload.pass_requests, workload.pass_tokens(workload.num_tokens))


def on_wire(setting: Setting) -> OnWire:
    """Return what an all-reduce of hidden states puts on the wire, quantised if that was asked for.

    Raises:
        ValueError: the engine does not quantise all-reduces that way, here, or there is none to quantise.
    """
    wanted = setting.workload.quantized_all_reduce
    if wanted is not None:
        format_of(setting.framework, wanted)
    if wanted is None or setting.tp == 1:
        return OnWire(
            payload_bytes=setting.hidden_bytes,
            dtype=setting.dtype,
            formula="T * H * b",
            source=_LINEAR[setting.framework],
        )
    if setting.workload.sequence_parallel:
        raise ValueError(f"quantized_all_reduce={wanted!r}: sequence parallelism leaves no all-reduce to quantise")
    nodes = setting.nodes
    if setting.framework == "vllm" and any(len({nodes[rank] for rank in group}) > 1 for group in setting.tensor_groups):
        raise ValueError(f"quantized_all_reduce={wanted!r}: QuickReduce is off where the TP group spans nodes")
    return quantized_all_reduce(
        setting.framework, wanted, setting.hidden_bytes, num_ranks=setting.tp, dtype=setting.dtype
    )


def tensor_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the streams of tensor parallelism; payloads are M = T * H * b, logits T_s * V * b in total.

    A layer reduces the output of attention and that of the MLP, shared and routed experts as one sum. SGLang with
    attention data parallelism cuts the output layer over all TP ranks nevertheless: they gather the rows of all
    replicas first, and each of them gets all their logits.
    """
    groups, framework = setting.tensor_groups, setting.framework
    reduced, wanted = on_wire(setting), setting.workload.quantized_all_reduce
    streams: list[Stream] = []
    for name, sources in (
        ("tp.attention_output", _LINEAR),
        ("tp.mlp_output", _LINEAR),
        ("tp.embedding", _EMBEDDING),
    ):
        source = sources[framework] if wanted is None else f"{sources[framework]}; {reduced.source}"
        streams += make_stream(
            setting,
            order,
            name=name,
            op="all_reduce",
            groups=groups,
            payload_bytes=reduced.payload_bytes,
            formula=reduced.formula,
            source=source,
            dtype=reduced.dtype,
        )
    tp, tokens = setting.tp, setting.local_tokens
    padded = ", T padded to a multiple of TP" if tokens % tp else ""
    streams += make_stream(
        setting,
        order,
        name="tp.moe_gather",
        op="all_gather",
        groups=groups,
        payload_bytes=-(-tokens // tp) * tp * setting.shape.hidden * setting.element_bytes,
        formula=f"T * H * b: expert output of tokens that were cut over TP{padded}",
        source=f"{_VLLM} models/utils.py sequence_parallel_chunk, models/deepseek_v2.py DeepseekV2MoE.forward",
    )
    return (*streams, *_output_streams(setting, order))


def _output_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the gather of the logits, and that of the rows they are made of where replicas share the output layer."""
    framework, rows, shape = setting.framework, sampled_tokens(setting), setting.shape
    replicas = setting.layout.dp if framework == "sglang" else 1
    groups = setting.groups["tp"] if replicas > 1 else setting.tensor_groups
    tp = setting.layout.tp if replicas > 1 else setting.tp
    what = f"dp * T_s of {replicas} replicas" if replicas > 1 else "T_s"
    streams: list[Stream] = []
    if replicas > 1:
        streams += make_stream(
            setting,
            order,
            name="tp.sampled_rows",
            op="all_reduce" if sums_tokens(setting) else "all_gather",
            groups=groups,
            payload_bytes=replicas * rows * shape.hidden * setting.element_bytes,
            formula=f"{what} * H * b: rows of all replicas for the output layer",
            source=f"{_SGLANG} layers/logits_processor.py _gather_dp_attn_hidden_states",
        )
    shard = logits_shard_bytes(replicas * rows, shape.vocab, tp, setting.element_bytes, framework)
    streams += make_stream(
        setting,
        order,
        name="tp.logits",
        op="all_gather",
        groups=groups,
        payload_bytes=shard * tp,
        formula=f"{what} * V_padded * b, V_padded / P from each rank",
        source=_LOGITS[framework],
    )
    return tuple(streams)
