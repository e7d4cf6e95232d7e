"""Pipeline parallelism: hidden states over each stage boundary, and what the receivers gather of them."""

from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.patterns.layout import Groups
from crosstraffic.patterns.matrix import Chain, Ring
from crosstraffic.patterns.setting import BOUNDARY, Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.tensor import sampled_tokens, vocab_shard

# Tensors of T x H that cross a boundary: hidden states and residual, or their sum.
TENSORS: Mapping[str, int] = {"vllm": 2, "sglang": 2, "megatron": 1, "tensorrt_llm": 2}
SLICED = frozenset({"vllm", "sglang"})
_VLLM = "vLLM @ 017e9f4448b7"
SOURCES: Mapping[str, str] = {
    "vllm": f"{_VLLM} distributed/parallel_state.py isend_tensor_dict",
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


def sent_tensors(setting: Setting) -> tuple[Sent, ...]:
    """Return the tensors that cross a boundary.

    Hidden states and residual, or one tensor where the engine adds them up before (Megatron-Core), or where the model
    carries several residual streams, all of them in the hidden states (DeepSeek-V4).

    vLLM and SGLang send a tensor in TP parts where its elements divide by TP, and gather it again. What sequence
    parallelism has scattered stays as it is: vLLM's residual, Megatron-Core's hidden states.

    Source: vLLM @ 017e9f4448b7 distributed/parallel_state.py _should_use_all_gather, models/deepseek_v4 make_empty_
    intermediate_tensors; SGLang @ 6ed5780c4fd3 models/deepseek_v4.py; Megatron-LM @ d98e8a64ddf3
    abstract_model_inference_wrapper.py _allocate_recv_buffer.
    """
    streams, tp = setting.shape.residual_streams, setting.tp
    names: tuple[str, ...] = ("hidden_states", "residual")[: TENSORS[setting.framework] if streams == 1 else 1]
    is_divisible = setting.local_tokens * setting.shape.hidden * streams % tp == 0
    found = []
    for name in names:
        is_scattered = setting.workload.sequence_parallel and (setting.framework == "megatron" or name == "residual")
        is_gathered = setting.framework in SLICED and tp > 1 and is_divisible and not is_scattered
        parts = tp if is_scattered or is_gathered else 1
        found.append(Sent(name=name, width=streams, parts=parts, is_gathered=is_gathered))
    return tuple(found)


def receive_calls(setting: Setting) -> Calls:
    """Return what a stage calls once it got its input: gathers of sliced tensors, vLLM's of a scattered residual."""
    tensors = sent_tensors(setting)
    gathered = sum(tensor.is_gathered for tensor in tensors)
    scattered = sum(tensor.parts > 1 and not tensor.is_gathered for tensor in tensors)
    calls: list[tuple[str, int]] = [("pp.all_gather", gathered)] if gathered else []
    if scattered and setting.framework == "vllm":
        calls.append(("pp.residual_gather", scattered))
    return tuple(calls)


def sample_calls(setting: Setting) -> Calls:
    """Return what stages call behind the last layer: Megatron-Core gives each of them the logits, and each samples."""
    return (("pp.logits", 1),) if setting.framework == "megatron" and setting.layout.pp > 1 else ()


def last_stage_first(setting: Setting) -> Groups:
    """Return the groups of a pipeline with the last stage first: the source of a broadcast."""
    return tuple(group[::-1] for group in setting.groups["pp"])


def pipeline_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the boundary transfer of each rank of a stage, and what the receivers gather of it.

    With interleaved chunks the last stage sends to the first one: the boundaries are a ring.
    """
    tensors, whole = sent_tensors(setting), setting.hidden_bytes
    size = sum(tensor.width * whole // tensor.parts for tensor in tensors)
    width, parts = sum(tensor.width for tensor in tensors), tensors[0].parts
    factor = "" if width == 1 else f"{width} * "
    is_ring = len(setting.chunks) > len(setting.stages)
    chunks = f", {len(setting.chunks) // len(setting.stages)} chunks of layers a stage" if is_ring else ""
    source = SOURCES[setting.framework]
    activation = make_stream(
        setting,
        order,
        name=BOUNDARY,
        op="send_recv",
        groups=setting.groups["pp"],
        payload_bytes=size,
        formula=f"{factor}T * H * b{' / TP' if parts > 1 else ''} a boundary and rank{chunks}",
        source=source,
        rule=Ring(num_bytes=size) if is_ring else Chain(num_bytes=size),
    )
    gather = make_stream(
        setting,
        order,
        name="pp.all_gather",
        op="all_gather",
        groups=setting.tensor_groups,
        payload_bytes=tensors[0].width * whole,
        formula=f"{'' if tensors[0].width == 1 else f'{tensors[0].width} * '}T * H * b, for each of "
        f"{sum(tensor.is_gathered for tensor in tensors)} tensors",
        source=source,
    )
    residual = make_stream(
        setting,
        order,
        name="pp.residual_gather",
        op="all_gather",
        groups=setting.tensor_groups,
        payload_bytes=whole,
        formula="T * H * b, the residual that sequence parallelism had scattered",
        source=f"{_VLLM} v1/worker/gpu_model_runner.py sync_and_gather_intermediate_tensors",
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
