"""Pipeline parallelism: hidden states over each stage boundary."""

from collections.abc import Mapping

from crosstraffic.patterns.matrix import Chain
from crosstraffic.patterns.setting import BOUNDARY, Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

# Tensors of T x H that cross a boundary: hidden states and residual, or their sum.
TENSORS: Mapping[str, int] = {"vllm": 2, "sglang": 2, "megatron": 1, "tensorrt_llm": 2}
SLICED = frozenset({"vllm", "sglang"})
_SOURCES: Mapping[str, str] = {
    "vllm": "vLLM @ 017e9f4448b7 distributed/parallel_state.py isend_tensor_dict",
    "sglang": "SGLang @ 6ed5780c4fd3 PPProxyTensors",
    "megatron": "Megatron-LM @ d98e8a64ddf3 core/inference/communication_utils.py",
    "tensorrt_llm": "TensorRT-LLM mapping.py; hidden states and residual as in vLLM",
}


def is_sliced(setting: Setting) -> bool:
    """Tell whether each TP rank sends 1 / TP of a tensor, and the receivers gather it again."""
    elements = setting.local_tokens * setting.shape.hidden
    return setting.framework in SLICED and setting.tp > 1 and elements % setting.tp == 0


def receive_calls(setting: Setting) -> Calls:
    """Return what a stage calls once it got its input."""
    return (("pp.all_gather", TENSORS[setting.framework]),) if is_sliced(setting) else ()


def pipeline_control(setting: Setting) -> tuple[Stream, ...]:
    """Return the small messages of a pipeline: what each send announces, and sampled token ids on their way back."""
    return ()


def pipeline_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the boundary transfer of each rank of a stage, and the gather behind it where the engine slices."""
    tensors, sliced = TENSORS[setting.framework], is_sliced(setting)
    cut = setting.tp if sliced or setting.workload.sequence_parallel else 1
    size = tensors * setting.hidden_bytes // cut
    factor = "" if tensors == 1 else f"{tensors} * "
    activation = make_stream(
        setting,
        order,
        name=BOUNDARY,
        op="send_recv",
        groups=setting.groups["pp"],
        payload_bytes=size,
        formula=f"{factor}T * H * b{' / TP' if cut > 1 else ''} a boundary and rank",
        source=_SOURCES[setting.framework],
        rule=Chain(num_bytes=size),
    )
    gather = make_stream(
        setting,
        order,
        name="pp.all_gather",
        op="all_gather",
        groups=setting.tensor_groups,
        payload_bytes=setting.hidden_bytes,
        formula=f"T * H * b, for each of {tensors} tensors",
        source=_SOURCES[setting.framework],
    )
    return (*activation, *gather)
