"""Where a layout puts the heads and layers of a model, and whether an engine runs the model that way."""

from crosstraffic.patterns.layout import Layout, check_layout
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.rank_order import Rules
from crosstraffic.patterns.stages import stage_layers as stage_layers


def attention_tp(layout: Layout, framework: str) -> int:
    """Return over how many ranks the heads of one replica are cut."""
    if framework == "sglang":
        return layout.tp // (layout.dp * layout.cp)
    return 1 if framework == "tensorrt_llm" and layout.dp > 1 else layout.tp


def check_model(shape: ModelShape, layout: Layout, framework: str, redundant_experts: int = 0) -> None:
    """Raise ValueError, with the engine's rule, when a layout cannot run a model.

    ``redundant_experts`` replicas of hot experts are placed beside the model's own (EPLB).

    Source: vLLM @ 017e9f4448b7 config/model.py verify_with_parallel_config, v1/worker/gpu/pcp_manager.py; Megatron-LM
    @ d98e8a64ddf3 core/transformer/transformer_config.py, training/arguments.py; SGLang @ 6ed5780c4fd3 server_args.py.
    """
    check_layout(layout, framework)
    head_rules, layer_rules = _head_rules(shape, layout, framework), _layer_rules(shape, layout, framework)
    for holds, rule in (*head_rules, *layer_rules, *_expert_rules(shape, layout, framework, redundant_experts)):
        if not holds:
            raise ValueError(f"{framework} cannot run {shape.name} as {layout}: {rule}")


def _head_rules(shape: ModelShape, layout: Layout, framework: str) -> Rules:
    """Yield (holds, rule) of attention heads, KV heads and context parallelism."""
    tp, heads, kv_heads = attention_tp(layout, framework), shape.num_heads, shape.kv_heads_stored
    whole = f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({tp})."
    shared = f"KV heads ({kv_heads}) and tensor parallel size ({tp}): one must divide the other"
    if framework == "megatron":
        whole = f"num_attention_heads ({heads}) must be a multiple of tensor_model_parallel_size ({tp})."
        shared = f"num_query_groups ({kv_heads}) must be a multiple or divisor of tensor_model_parallel_size ({tp})."
    yield heads % tp == 0, whole
    yield shape.mla is not None or kv_heads % tp == 0 or tp % kv_heads == 0, shared
    if framework != "vllm" or shape.mla is not None:
        return
    dcp, queries = layout.dcp, heads // shape.num_kv_heads
    no_mla = "MRV2 PCP (prefill context parallelism) currently supports MLA models only."
    few = f"`--tensor-parallel-size` ({tp}) to be greater than the model's total number of KV heads ({kv_heads})"
    many = f"exceeds the maximum supported value ({tp // kv_heads}) for `--tensor-parallel-size` ({tp}) and {kv_heads}"
    uneven = f"query heads per KV head ({queries}) must be divisible by `--decode-context-parallel-size` ({dcp})"
    yield layout.cp == 1, no_mla
    yield dcp == 1 or tp > kv_heads, f"Decode context parallelism for GQA/MQA requires {few}."
    yield dcp == 1 or dcp * kv_heads <= tp, f"`--decode-context-parallel-size` ({dcp}) {many} model KV heads."
    yield dcp == 1 or queries % dcp == 0, f"The model's number of {uneven} for GQA/MQA."


def _layer_rules(shape: ModelShape, layout: Layout, framework: str) -> Rules:
    """Yield (holds, rule) of layers and experts."""
    pp, ep, layers, experts = layout.pp, layout.ep, shape.num_layers, shape.num_experts
    yield pp <= layers, f"more pipeline stages ({pp}) than layers ({layers})"
    evenly = f"the number of layers ({layers}) must be divisible by the pipeline stages ({pp})"
    yield framework != "megatron" or layers % pp == 0, evenly
    dense = "Number of experts in the model must be greater than 0 when expert parallelism is enabled."
    if framework == "megatron":
        dense = f"num_moe_experts must be non None to use expert-parallel (greater than 0 when ep is {ep})."
    yield ep == 1 or shape.num_moe_layers > 0, dense
    multiple = (
        f"number of experts ({experts}) must be divisible by expert parallel size ({ep}): "
        "Number of experts should be a multiple of expert model parallel_size."
    )
    yield framework != "megatron" or experts % ep == 0, multiple


def _expert_rules(shape: ModelShape, layout: Layout, framework: str, redundant: int) -> Rules:
    """Yield (holds, rule) of experts and their replicas.

    Source: vLLM @ 017e9f4448b7 config/parallel.py, layers/fused_moe/layer.py FusedMoEFactory.
    """
    ep, placed = layout.ep, shape.num_experts + redundant
    yield ep <= max(1, placed), f"expert parallel size ({ep}) is larger than the number of experts ({placed})"
    yield redundant == 0 or framework != "megatron", f"there is no expert load balancer: {redundant} redundant experts"
    off = f"enable_expert_parallel must be True to use EPLB: {redundant} redundant experts"
    yield redundant == 0 or ep > 1, off
    uneven = f"EPLB currently only supports even distribution of experts across ranks: {placed} experts, {ep} EP ranks."
    yield redundant == 0 or placed % ep == 0, uneven
    most = shape.num_experts * (ep - 1)
    yield redundant <= most, f"every rank would hold an expert twice: {redundant} redundant experts, at most {most}"
