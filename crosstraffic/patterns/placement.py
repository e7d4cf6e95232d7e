"""Where a layout puts the heads and layers of a model, and whether an engine runs the model that way."""

import numpy as np

from crosstraffic.patterns.layout import Layout, process_groups
from crosstraffic.patterns.model import ModelShape


def attention_tp(layout: Layout, framework: str) -> int:
    """Return over how many ranks the heads of one replica are cut."""
    if framework == "sglang":
        return layout.tp // (layout.dp * layout.cp)
    return 1 if framework == "tensorrt_llm" and layout.dp > 1 else layout.tp


def check_model(shape: ModelShape, layout: Layout, framework: str) -> None:
    """Raise ValueError, with the engine's rule, when a layout cannot run a model.

    Source: vLLM @ 017e9f4448b7 config/model.py; Megatron-LM @ d98e8a64ddf3; SGLang @ 6ed5780c4fd3 server_args.py.
    """
    process_groups(layout, framework)
    tp, kv_heads = attention_tp(layout, framework), shape.kv_heads_stored
    group_heads = shape.num_heads // shape.num_kv_heads
    is_vllm_gqa_dcp = framework == "vllm" and layout.dcp > 1 and shape.mla is None
    evenly = "Total number of attention heads ({}) must be divisible by tensor parallel size ({})."
    too_many = "decode context parallel size ({}) exceeds tensor parallel size / KV heads ({} / {})"
    rules = (
        (shape.num_heads % tp == 0, evenly.format(shape.num_heads, tp)),
        (
            shape.mla is not None or kv_heads % tp == 0 or tp % kv_heads == 0,
            f"KV heads ({kv_heads}) and tensor parallel size ({tp}): one must divide the other",
        ),
        (layout.pp <= shape.num_layers, f"more pipeline stages ({layout.pp}) than layers ({shape.num_layers})"),
        (
            framework != "megatron" or shape.num_layers % layout.pp == 0,
            f"the number of layers ({shape.num_layers}) must be divisible by the pipeline stages ({layout.pp})",
        ),
        (
            layout.ep == 1 or shape.num_moe_layers > 0,
            "Number of experts in the model must be greater than 0 when expert parallelism is enabled.",
        ),
        (
            layout.ep <= max(1, shape.num_experts),
            f"expert parallel size ({layout.ep}) is larger than the number of experts ({shape.num_experts})",
        ),
        (
            framework != "megatron" or shape.num_experts % layout.ep == 0,
            f"number of experts ({shape.num_experts}) must be divisible by expert parallel size ({layout.ep})",
        ),
        (
            framework != "vllm" or layout.cp == 1 or shape.mla is not None,
            "prefill context parallelism currently supports MLA models only",
        ),
        (
            not is_vllm_gqa_dcp or tp > kv_heads,
            f"decode context parallelism for GQA/MQA needs tensor parallel size ({tp}) above the KV heads ({kv_heads})",
        ),
        (not is_vllm_gqa_dcp or layout.dcp * kv_heads <= tp, too_many.format(layout.dcp, tp, kv_heads)),
        (
            not is_vllm_gqa_dcp or group_heads % layout.dcp == 0,
            f"query heads per KV head ({group_heads}) must be divisible by decode context parallel size ({layout.dcp})",
        ),
    )
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"{framework} cannot run {shape.name} as {layout}: {rule}")


def stage_layers(num_layers: int, layout: Layout, framework: str) -> tuple[range, ...]:
    """Return the layers of each pipeline stage.

    vLLM and SGLang give what does not divide to the later stages but the last; TensorRT-LLM to the first ones;
    Megatron-Core refuses it.

    >>> [len(stage) for stage in stage_layers(61, Layout(pp=4), "vllm")]
    [15, 15, 16, 15]

    Source: vLLM @ 017e9f4448b7 distributed/utils.py get_pp_indices; TensorRT-LLM mapping.py pp_layers.
    """
    pp = layout.pp
    if pp > num_layers:
        raise ValueError(f"more pipeline stages ({pp}) than layers ({num_layers})")
    sizes, rest = [num_layers // pp] * pp, num_layers % pp
    for extra in range(rest):
        sizes[extra if framework == "tensorrt_llm" else pp - 2 - extra] += 1
    ends = np.cumsum(sizes).tolist()
    return tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))
