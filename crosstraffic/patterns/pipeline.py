"""Pipeline parallelism: hidden states over each stage boundary, and what the receivers gather of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.patterns.layout import Groups
from crosstraffic.patterns.matrix import ByteRule, Chain, Explicit, Ring
from crosstraffic.patterns.setting import BOUNDARY, Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.tensor import sampled_tokens, vocab_shard

# Tensors of T x H that cross a boundary: hidden states and residual, or their sum.
TENSORS: Mapping[str, int] = {"vllm": 2, "sglang": 2, "megatron": 1, "tensorrt_llm": 2}
SLICED = frozenset({"vllm", "sglang"})
SOURCES: Mapping[str, str] = {
    "vllm": "vLLM @ 017e9f4448b7 distributed/parallel_state.py isend_tensor_dict",
    "sglang": "SGLang @ 6ed5780c4fd3 PPProxyTensors, distributed/parallel_state.py send_tensor_dict",
    "megatron": "Megatron-LM @ d98e8a64ddf3 core/inference/communication_utils.py",
    "tensorrt_llm": "TensorRT-LLM mapping.py; hidden states and residual as in vLLM",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One tensor that crosses a boundary, ``width`` x H a token.

    Each rank of a stage sends one of ``parts``; ``is_gathered``: the receivers put the parts together at once.
    """

    name: str
    width: int
    parts: int
    is_gathered: bool


def sent_tensors(setting: Setting, start_layer: int | None = None) -> tuple[Sent, ...]:
    """Return the tensors that cross the boundary before ``start_layer``, by default the last one.

    Hidden states and residual, or one tensor where the engine adds them up before (Megatron-Core), or where the model
    carries several residual streams, all of them in the hidden states (DeepSeek-V4). Kimi-K3's residual holds one state
    for each block of layers that was begun.

    vLLM and SGLang send a tensor in TP parts where its elements divide by TP, and gather it again. What sequence
    parallelism has scattered stays as it is: vLLM's residual, Megatron-Core's hidden states.

    Source: vLLM @ 017e9f4448b7 distributed/parallel_state.py _should_use_all_gather, models/deepseek_v4 and
    models/kimi_k3 make_empty_intermediate_tensors; SGLang @ 6ed5780c4fd3 models/deepseek_v4.py; Megatron-LM
    @ d98e8a64ddf3 abstract_model_inference_wrapper.py _allocate_recv_buffer.
    """
    streams, block, tp = setting.shape.residual_streams, setting.shape.residual_block_layers, setting.tp
    before = setting.chunks[-1].start if start_layer is None else start_layer
    names: tuple[str, ...] = ("hidden_states", "residual")[: TENSORS[setting.framework] if streams == 1 else 1]
    found = []
    for name in names:
        width = -(-before // block) if block and name == "residual" else streams
        is_divisible = setting.local_tokens * setting.shape.hidden * width % tp == 0
        is_scattered = setting.workload.sequence_parallel and (setting.framework == "megatron" or name == "residual")
        is_gathered = setting.framework in SLICED and tp > 1 and is_divisible and not is_scattered
        parts = tp if is_scattered or is_gathered else 1
        found.append(Sent(name=name, width=width, parts=parts, is_gathered=is_gathered))
    return tuple(found)


def _gathers(setting: Setting) -> tuple[int, int]:
    """Return how many tensors a stage gathers, and the width of a residual that is none of them but apart (0: none)."""
    first, *others = sent_tensors(setting)
    alike = [tensor for tensor in (first, *others) if tensor.is_gathered and tensor.width == first.width]
    apart = [tensor for tensor in others if tensor.parts > 1 and tensor not in alike]
    return len(alike), max((tensor.width for tensor in apart), default=0)


def receive_calls(setting: Setting) -> Calls:
    """Return what a stage calls once it got its input: gathers of sliced tensors, vLLM's of a scattered residual."""
    alike, apart = _gathers(setting)
    calls = (("pp.all_gather", alike), ("pp.residual_gather", int(apart > 0)))
    return tuple((name, count) for name, count in calls if count)


def sample_calls(setting: Setting) -> Calls:
    """Return what stages call behind the last layer: Megatron-Core gives each of them the logits, and each samples."""
    return (("pp.logits", 1),) if setting.framework == "megatron" and setting.layout.pp > 1 else ()


def last_stage_first(setting: Setting) -> Groups:
    """Return the groups of a pipeline with the last stage first: the source of a broadcast."""
    return tuple(group[::-1] for group in setting.groups["pp"])


def boundary_bytes(setting: Setting) -> tuple[int, ...]:
    """Return bytes that each rank of a stage sends over each boundary, in the order in which tokens pass them."""
    return tuple(
        sum(tensor.width * setting.hidden_bytes // tensor.parts for tensor in sent_tensors(setting, chunk.start))
        for chunk in setting.chunks[1:]
    )


def _boundary_rule(setting: Setting, sizes: tuple[int, ...]) -> ByteRule:
    """Return who sends how much to whom; chunks make a ring of the stages, and then all boundaries are alike."""
    num_stages = len(setting.stages)
    if len(setting.chunks) > num_stages:
        return Ring(num_bytes=sizes[0])
    if len(set(sizes)) <= 1:
        return Chain(num_bytes=max(sizes, default=0))
    rows = (tuple(size if column == row + 1 else 0 for column in range(num_stages)) for row, size in enumerate(sizes))
    return Explicit(bytes=((*rows, (0,) * num_stages),))


def _factor(setting: Setting) -> str:
    """Return what the states of a token that cross a boundary are, as the head of a formula."""
    block = setting.shape.residual_block_layers
    if block and TENSORS[setting.framework] > 1:
        return f"(1 + ceil(layers before / {block})) * "
    width = sum(tensor.width for tensor in sent_tensors(setting))
    return "" if width == 1 else f"{width} * "


def pipeline_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the boundary transfer of each rank of a stage, and what the receivers gather of it.

    With interleaved chunks the last stage sends to the first one: the boundaries are a ring. Where boundaries differ
    (Kimi-K3), payloads are those of the last one, the largest.
    """
    first, whole, sizes = sent_tensors(setting)[0], setting.hidden_bytes, boundary_bytes(setting)
    size, (alike, apart) = max(sizes, default=0), _gathers(setting)
    num_chunks = len(setting.chunks) // len(setting.stages)
    chunks = f", {num_chunks} chunks of layers a stage" if num_chunks > 1 else ""
    source = SOURCES[setting.framework]
    activation = make_stream(
        setting,
        order,
        name=BOUNDARY,
        op="send_recv",
        groups=setting.groups["pp"],
        payload_bytes=size,
        formula=f"{_factor(setting)}T * H * b{' / TP' if first.parts > 1 else ''} a boundary and rank{chunks}",
        source=source,
        rule=_boundary_rule(setting, sizes),
    )
    gather = make_stream(
        setting,
        order,
        name="pp.all_gather",
        op="all_gather",
        groups=setting.tensor_groups,
        payload_bytes=first.width * whole,
        formula=f"{'' if first.width == 1 else f'{first.width} * '}T * H * b, for each of {alike} tensors",
        source=source,
    )
    is_sequence = setting.workload.sequence_parallel
    residual = make_stream(
        setting,
        order,
        name="pp.residual_gather",
        op="all_gather",
        groups=setting.tensor_groups,
        payload_bytes=apart * whole,
        formula="T * H * b, the residual that sequence parallelism had scattered"
        if is_sequence
        else f"{apart} * T * H * b, the residual of the last stage",
        source=f"{SOURCES['vllm']}, v1/worker/gpu_model_runner.py sync_and_gather_intermediate_tensors"
        if is_sequence
        else source,
    )
    rows = sampled_tokens(setting)
    logits = make_stream(
        setting,
        order,
        name="pp.logits",
        op="broadcast",
        groups=last_stage_first(setting),
        payload_bytes=rows
        * vocab_shard(setting.shape.vocab, setting.tp, setting.framework)
        * setting.tp
        * setting.element_bytes,
        formula="T_s * V_padded * b from the last stage, each stage samples",
        source="Megatron-LM @ d98e8a64ddf3 core/inference/text_generation_controllers/text_generation_controller.py "
        "broadcast_from_last_pipeline_stage",
    )
    return (*activation, *gather, *residual, *logits)
