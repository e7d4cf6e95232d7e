"""How many parameters each layer has, and how many of them lie on a rank.

Left out: norms, biases, sinks, the correction biases of routers and the small mixing matrices of residual streams;
together below 0.1 % of every model of the catalogue.
"""

from dataclasses import dataclass

from crosstraffic.patterns.layout import Layout, expert_tp
from crosstraffic.patterns.model import Mla, ModelShape
from crosstraffic.patterns.placement import attention_tp, stage_layers
from crosstraffic.patterns.weight_format import scale_bytes, weight_bytes

VOCAB_BLOCK = 64  # vLLM and SGLang pad the vocabulary to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Parameters that tensor parallelism cuts: ``units`` (heads, groups) of ``size`` parameters each."""

    units: int
    size: int

    def on_rank(self, tp: int) -> int:
        """Parameters on one of ``tp`` ranks: whole units, at least one (then several ranks hold the same)."""
        return max(1, -(-self.units // tp)) * self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer: ``attention``, ``dense`` MLP, ``shared`` experts, ``router``, routed ``experts``.

    ``replicated`` is the part of attention that tensor parallelism does not cut (latent down-projections, index);
    ``router`` includes the projections around a latent MoE, which no engine cuts either.
    """

    attention: int
    replicated: int
    dense: int
    shared: int
    router: int
    experts: int

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.attention + self.dense + self.shared + self.router + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Parameters on the fullest rank: of pipeline stage ``stage``, by kind."""

    stage: int
    attention: int
    dense: int
    shared: int
    router: int
    experts: int
    embeddings: int

    @property
    def total(self) -> int:
        """All parameters of the rank."""
        return self.attention + self.dense + self.shared + self.router + self.experts + self.embeddings


def _mlp(shape: ModelShape, rows: int, width: int) -> int:
    return (3 if shape.gated_mlp else 2) * rows * width


def expert_parameters(shape: ModelShape) -> int:
    """Return parameters of one routed expert: gate, up and down projection.

    >>> from crosstraffic.patterns.model import load_model
    >>> expert_parameters(load_model("DeepSeek-V3"))
    44040192
    """
    return _mlp(shape, shape.expert_row, shape.moe_intermediate)


def expert_bytes(shape: ModelShape, dtype: str, *, with_scales: bool = True) -> int:
    """Return bytes of one routed expert as it is stored: three matrices and their scales.

    >>> from crosstraffic.patterns.model import load_model
    >>> shape = load_model("DeepSeek-V3")
    >>> expert_bytes(shape, "fp8", with_scales=False), expert_bytes(shape, "fp8"), expert_bytes(shape, "fp4")
    (44040192, 44050944, 24772608)

    Raises:
        ValueError: unknown dtype.

    Source: DeepSeek-V3 config.json (weight_block_size 128 x 128); NVFP4: one scale byte for 16 elements, 4.5 bits
    each. TensorRT-LLM's blog 4 counts 24 MiB an expert.
    """
    row, width, inputs = shape.expert_row, shape.moe_intermediate, 2 if shape.gated_mlp else 1
    scales = inputs * scale_bytes(width, row, dtype) + scale_bytes(row, width, dtype)
    return weight_bytes(expert_parameters(shape), dtype) + (scales if with_scales else 0)


def _linear_attention(shape: ModelShape) -> tuple[int, tuple[Cut, ...]]:
    """Return what of linear attention is replicated and what is cut by heads.

    Source: vLLM @ 017e9f4448b7 layers/mamba/gdn/qwen_gdn_linear_attn.py (q, k, v, z, b, a, convolution, output) and
    kimi_gdn_linear_attn.py (q, k, v, g, f_a, f_b, b, convolutions, output).
    """
    linear, hidden = shape.linear_attention, shape.hidden
    if linear is None:
        raise ValueError(f"{shape.name}: the sizes of linear attention are unknown")
    key, value, kernel = linear.key_head_dim, linear.value_head_dim, linear.conv_kernel
    if linear.kind == "gdn":
        keys = Cut(units=linear.num_key_heads, size=2 * key * (hidden + kernel))
        return 0, (keys, Cut(units=linear.num_value_heads, size=value * (3 * hidden + kernel) + 2 * hidden))
    gate = hidden * value if linear.full_rank_gate else value * value
    head = 3 * value * (hidden + kernel) + gate + value * value + hidden + value * hidden
    replicated = hidden * value * (1 if linear.full_rank_gate else 2)
    return replicated, (Cut(units=linear.num_value_heads, size=head),)


def _index(shape: ModelShape, layer: int, query_rank: int) -> int:
    """Return parameters of the index of sparse attention, whole on each rank: queries, head weights, key."""
    if shape.indexer is None or layer not in shape.indexer_layers:
        return 0
    heads, dim = shape.indexer.num_heads, shape.indexer.head_dim
    key = 4 * dim if shape.compress_ratios else dim  # a compressor of values and scores, two groups wide
    return query_rank * heads * dim + shape.hidden * (heads + key)


def _latent_attention(shape: ModelShape, mla: Mla, layer: int) -> tuple[int, tuple[Cut, ...]]:
    """Return what of MLA is replicated (down-projections, index, compressor) and what is cut by heads.

    Source: vLLM @ 017e9f4448b7 models/deepseek_v2.py, models/deepseek_v4/attention.py and compressor.py,
    models/kimi_k3/nvidia/mla.py; Megatron-LM @ d98e8a64ddf3 multi_latent_attention.py (duplicated down-projections).
    """
    hidden, query_rank = shape.hidden, mla.q_lora_rank or 0
    replicated = hidden * (query_rank + mla.latent_dim) + _index(shape, layer, query_rank)
    query = (query_rank or hidden) * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.o_lora_rank is not None:
        ratio = shape.compress_ratios[layer] if shape.compress_ratios else 0
        width = (2 if ratio == 4 else 1) * shape.head_dim if ratio else 0
        replicated += 2 * width * hidden + ratio * width  # values and scores; the position of a token in its group
        heads = Cut(units=shape.num_heads, size=query + mla.v_head_dim * mla.o_lora_rank)
        return replicated, (heads, Cut(units=mla.o_groups, size=mla.o_lora_rank * hidden))
    expand = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    output = mla.v_head_dim * hidden * (2 if shape.output_gate else 1)
    return replicated, (Cut(units=shape.num_heads, size=query + expand + output),)


def attention_parameters(shape: ModelShape, layer: int) -> tuple[int, tuple[Cut, ...]]:
    """Return the parameters of a layer's attention: those on each rank, and those cut by heads."""
    if layer in shape.linear_layers:
        return _linear_attention(shape)
    if shape.mla is not None:
        return _latent_attention(shape, shape.mla, layer)
    head = shape.hidden * shape.head_dim
    queries = Cut(units=shape.num_heads, size=head * (3 if shape.output_gate else 2))
    return 0, (queries, Cut(units=shape.num_kv_heads, size=2 * head))


def layer_parameters(shape: ModelShape, layer: int) -> LayerParameters:
    """Return the parameters of one layer by kind.

    Raises:
        ValueError: no such layer.
    """
    if not 0 <= layer < shape.num_layers:
        raise ValueError(f"{shape.name}: layer must be from 0 to {shape.num_layers - 1}: {layer}")
    is_moe = layer in shape.moe_layers
    replicated, cuts = attention_parameters(shape, layer)
    return LayerParameters(
        attention=replicated + sum(cut.units * cut.size for cut in cuts),
        replicated=replicated,
        dense=0 if is_moe else _mlp(shape, shape.hidden, shape.intermediate),
        shared=_mlp(shape, shape.hidden, shape.shared_intermediate) if is_moe else 0,
        router=shape.hidden * (shape.num_experts + 2 * (shape.routed_hidden or 0)) if is_moe else 0,
        experts=shape.num_experts * expert_parameters(shape) if is_moe else 0,
    )


def total_parameters(shape: ModelShape) -> int:
    """Return all parameters of a model without its MTP layers: layers, embeddings, output layer unless tied.

    >>> from crosstraffic.patterns.model import load_model
    >>> round(total_parameters(load_model("DeepSeek-V3")) / 1e9)
    671
    """
    tables = (1 if shape.tied_embeddings else 2) * shape.vocab * shape.hidden
    return tables + sum(layer_parameters(shape, layer).total for layer in range(shape.num_layers))


def mtp_parameters(shape: ModelShape) -> int:
    """Return the parameters of all MTP layers: one more layer like the last each, and a projection of 2 H to H.

    They use the embeddings and the output layer of the model.

    Source: DeepSeek-V3 README_WEIGHTS.md (11.5 B unique parameters in its one layer).
    """
    if not shape.num_mtp_layers:
        return 0
    full = [layer for layer in range(shape.num_layers) if layer not in shape.linear_layers]
    return shape.num_mtp_layers * (layer_parameters(shape, full[-1]).total + 2 * shape.hidden**2)


def _mlp_tp(layout: Layout, framework: str) -> int:
    """Return over how many ranks a dense MLP is cut: SGLang gathers the tokens of all replicas for it."""
    return 1 if framework == "tensorrt_llm" and layout.dp > 1 else layout.tp


def _shared_tp(layout: Layout, framework: str, expert_backend: str | None) -> int:
    """Return over how many ranks shared experts are cut; not at all where each rank has tokens of its own.

    Source: vLLM @ 017e9f4448b7 config/parallel.py use_sequence_parallel_moe (expert parallel, tp and dp above 1);
    SGLang @ 6ed5780c4fd3 models/deepseek_v2.py _shared_expert_use_tp1 (DeepEP and other all-to-all backends).
    """
    if framework == "vllm" and layout.ep > 1 and layout.tp > 1 and layout.dp > 1:
        return 1
    if framework == "sglang" and expert_backend is not None and expert_backend != "allgather_reducescatter":
        return 1
    return _mlp_tp(layout, framework)


def _tables(shape: ModelShape, layout: Layout, framework: str) -> tuple[int, int]:
    """Return the embeddings and the output layer on one rank.

    Source: vLLM @ 017e9f4448b7 layers/vocab_parallel_embedding.py; SGLang @ 6ed5780c4fd3 models/deepseek_v2.py
    (embeddings by the attention's tp, the output layer by all of tp).
    """
    heads = attention_tp(layout, framework)
    output = layout.tp if framework == "sglang" else heads
    block = VOCAB_BLOCK if framework in ("vllm", "sglang") else 1
    padded = -(-shape.vocab // block) * block
    return -(-padded // heads) * shape.hidden, -(-padded // output) * shape.hidden


def rank_parameters(
    shape: ModelShape,
    layout: Layout,
    framework: str = "vllm",
    redundant_experts: int = 0,
    *,
    expert_backend: str | None = None,
) -> RankParameters:
    """Return the parameters of the fullest rank of the fullest pipeline stage.

    Attention is cut by whole heads (a KV head on several ranks where tp is larger, down-projections of MLA on all),
    MLPs by columns, routed experts over ep and each by etp, with ``redundant_experts`` replicas (EPLB), tables by
    vocabulary on the first and last stage. MTP layers are not counted.

    >>> from crosstraffic.patterns.layout import Layout
    >>> from crosstraffic.patterns.model import load_model
    >>> shape = load_model("DeepSeek-V3")
    >>> rank_parameters(shape, Layout(dp=32, ep=32), redundant_experts=32).experts // (58 * 44040192)
    9

    Raises:
        ValueError: a negative number of redundant experts, or more stages than layers.
    """
    if redundant_experts < 0:
        raise ValueError(f"redundant_experts must not be negative: {redundant_experts}")
    heads, mlp = attention_tp(layout, framework), _mlp_tp(layout, framework)
    shared = _shared_tp(layout, framework, expert_backend)
    width = -(-shape.moe_intermediate // expert_tp(layout, framework))
    experts = -(-(shape.num_experts + redundant_experts) // layout.ep) * _mlp(shape, shape.expert_row, width)
    router = shape.hidden * (shape.num_experts + 2 * (shape.routed_hidden or 0))
    first, last = _tables(shape, layout, framework)
    stages, experts_in = stage_layers(shape.num_layers, layout, framework), set(shape.moe_layers)
    found: list[RankParameters] = []
    for stage, layers in enumerate(stages):
        num_moe = sum(layer in experts_in for layer in layers)
        is_first, is_last = stage == 0, stage == len(stages) - 1
        both = first + last if not shape.tied_embeddings else max(first, last)
        found.append(
            RankParameters(
                stage=stage,
                attention=sum(_attention_on_rank(shape, layer, heads) for layer in layers),
                dense=(len(layers) - num_moe) * _mlp(shape, shape.hidden, -(-shape.intermediate // mlp)),
                shared=num_moe * _mlp(shape, shape.hidden, -(-shape.shared_intermediate // shared)),
                router=num_moe * router,
                experts=num_moe * experts,
                embeddings=both if is_first and is_last else first * is_first + last * is_last,
            )
        )
    return max(found, key=lambda rank: rank.total)


def _attention_on_rank(shape: ModelShape, layer: int, tp: int) -> int:
    replicated, cuts = attention_parameters(shape, layer)
    return replicated + sum(cut.on_rank(tp) for cut in cuts)
