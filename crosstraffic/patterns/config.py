"""A Hugging Face config.json read into a ModelShape: nested parts, the names of each family, values checked."""

from collections.abc import Mapping
from dataclasses import replace

from crosstraffic.patterns.config_keys import KEYS, Config, names_of, needed, per_layer, size, switch, whole
from crosstraffic.patterns.layer_kinds import attention_layers, compress_ratios, indexer_layers, moe_layers
from crosstraffic.patterns.model import Indexer, LinearAttention, Mla, ModelShape, dtype_name
from crosstraffic.patterns.weight_format import stored_formats

NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
OUTER = ("architectures", "model_type", "torch_dtype", "dtype", "tie_word_embeddings", "quantization_config")
ENCODERS = ("vision_config", "audio_config", "visual", "vit_config", "vision_tower", "mm_vision_tower", "sound_config")
MLA_KEYS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
COMPRESSED_KEYS = ("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "sliding_window")
LINEAR_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
# Families whose embeddings are tied where the configuration does not say it, and whose MLP has no gate.
TIED = ("gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2", "gpt2", "opt", "falcon")
NOT_GATED = (
    "gpt2",
    "gpt_neox",
    "gptj",
    "gpt_bigcode",
    "opt",
    "falcon",
    "bloom",
    "mpt",
    "phi",
    "starcoder2",
    "nemotron",
)
# Keys of models whose layers differ in ways that a ModelShape does not hold.
NOT_DESCRIBED: Mapping[str, str] = {
    "hybrid_override_pattern": "Mamba layers",
    "hybrid_layer_pattern": "KV heads that differ by layer",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "block_configs": "layers that differ one by one",
    "global_head_dim": "KV heads that differ by layer",
    "cross_attention_layers": "cross attention",
    "moe_layers_enum": "experts in layers named by a text",
    "num_kv_shared_layers": "layers that share a KV cache",
    "is_encoder_decoder": "an encoder and a decoder",
}


def _language_part(config: Config) -> Config:
    """Return the part that describes the language model, at any depth, with what only an outer part says."""
    if size(config, "num_layers") is None or isinstance(config.get("text_config"), Mapping):
        for name in NESTED:
            inner = config.get(name)
            if isinstance(inner, Mapping) and inner:
                outer = {key: config[key] for key in OUTER if config.get(key) is not None}
                found = _language_part({**outer, **{key: value for key, value in inner.items() if value is not None}})
                if size(found, "num_layers") is not None:
                    return found
    return config


def _encoder(config: Config) -> tuple[bool, int]:
    """Tell whether something turns images or audio into embeddings, and how many inner layers get some (deepstack).

    A configuration with a part for the language model has other parts, even where a copy left them out.

    Raises:
        ValueError: deepstack_visual_indexes is no list.

    Source: Qwen3-VL's config.json (vision_config.deepstack_visual_indexes).
    """
    levels = [config]
    for level in levels:
        levels += [part for name in NESTED if isinstance(part := level.get(name), Mapping) and part]
    parts = [part for level in levels for name in ENCODERS if (part := level.get(name))]
    layers = [part.get("deepstack_visual_indexes") or [] for part in parts if isinstance(part, Mapping)]
    for named in layers:
        if not isinstance(named, list):
            raise ValueError(f"deepstack_visual_indexes must be a list of layers: {named!r:.60}")
    return len(levels) > 1 or bool(parts), max(map(len, layers), default=0)


def _architecture(config: Config) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(config.get("model_type") or "not named")


def _mla(config: Config, what: str) -> Mla | None:
    """Return the sizes of latent attention; DeepSeek-V4's single head of key and value counts as such a latent."""
    if config.get("kv_lora_rank") is not None:
        latent, rope, nope, value = needed(config, MLA_KEYS, what)
        return Mla(
            kv_lora_rank=latent,
            qk_rope_head_dim=rope,
            qk_nope_head_dim=nope,
            v_head_dim=value,
            q_lora_rank=whole(config, "q_lora_rank", least=1),
        )
    if config.get("compress_ratios") is None:
        return None
    head, rope, query, output, groups, _ = needed(config, COMPRESSED_KEYS, what)
    if rope >= head:
        raise ValueError(f"qk_rope_head_dim must be less than head_dim {head}: {rope}")
    return Mla(
        kv_lora_rank=head - rope,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=head - rope,
        v_head_dim=head,
        q_lora_rank=query,
        o_lora_rank=output,
        o_groups=groups,
    )


def _dtype(config: Config, *keys: str) -> str:
    """Return the dtype under the first key that the configuration has, bfloat16 if none."""
    for key in keys:
        if config.get(key) is not None:
            try:
                return dtype_name(str(config[key]).removeprefix("torch."))
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    return "bfloat16"


def _linear(config: Config, dtype: str, what: str) -> LinearAttention | None:
    """Return the sizes of linear attention: KDA of Kimi, or Gated DeltaNet of Qwen3-Next and Qwen3.5; else None.

    Source: vLLM @ 017e9f4448b7 layers/mamba/mamba_utils.py: the state of KDA is float32, that of DeltaNet what
    mamba_ssm_dtype says, else the dtype of the model.
    """
    kda = config.get("linear_attn_config")
    if isinstance(kda, Mapping):
        heads, head_dim, kernel = needed(kda, ("num_heads", "head_dim", "short_conv_kernel_size"), what)
        return LinearAttention(
            num_key_heads=heads,
            num_value_heads=heads,
            key_head_dim=head_dim,
            value_head_dim=head_dim,
            conv_kernel=kernel,
            state_dtype="float32",
            kind="kda",
            full_rank_gate=switch(kda, "use_full_rank_gate", default=False),
        )
    if all(config.get(key) is None for key in LINEAR_KEYS):
        return None
    key_heads, value_heads, key_dim, value_dim, kernel = needed(config, LINEAR_KEYS, what)
    return LinearAttention(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        conv_kernel=kernel,
        state_dtype=_dtype({**config, "dtype": dtype}, "mamba_ssm_dtype", "dtype"),
    )


def _num_mtp_layers(config: Config) -> int:
    modules, layers = whole(config, "num_mtp_modules"), whole(config, "mtp_transformer_layers")
    if modules is not None and layers is not None and switch(config, "use_mtp", default=True):
        return modules * layers
    return size(config, "num_mtp_layers") or 0


def _shared_experts(config: Config, moe_intermediate: int) -> tuple[int, int]:
    """Return how many shared experts a layer has, and how wide they are together. Llama 4 has one, not configured."""
    number, width = size(config, "num_shared_experts"), size(config, "shared_intermediate")
    if number is None:
        number = 1 if width or str(config.get("model_type")).startswith("llama4") else 0
    return number, (width if number and width else number * moe_intermediate)


def model_from_config(config: Config, *, name: str, source: str) -> ModelShape:
    """Read the shape out of a Hugging Face config; of a multimodal one its language part, however deep.

    Raises:
        ValueError: needed keys are missing (all named, with the other names they may have and the architecture), a
            value is wrong, or the layers differ in a way that is not described.
    """
    try:
        has_encoder, num_deepstack = _encoder(config)
        shape = _shape(_language_part(config), name, source)
        return replace(shape, has_encoder=has_encoder, num_deepstack=num_deepstack)
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(f"{name}:") else f"{name}: {error}") from error


def _shape(config: Config, name: str, source: str) -> ModelShape:
    what = f"{name}: the configuration (architecture {_architecture(config)})"
    found = {field: size(config, field) for field in KEYS}
    is_moe = (found["num_experts"] or 0) > 1
    wanted = ["num_layers", "hidden", "num_heads", "vocab", "top_k" if is_moe else "intermediate"]
    missing = [names_of(field) for field in wanted if found[field] is None]
    if is_moe and found["moe_intermediate"] is None and found["intermediate"] is None:
        missing.append(names_of("moe_intermediate"))
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    for key, feature in NOT_DESCRIBED.items():
        if config.get(key) not in (None, [], "", 0):
            raise ValueError(f"{what} has {key}: {feature} are not described")
    if 0 in (per_layer(config, "attn_type_list", found["num_layers"] or 0) or ()):
        raise ValueError(f"{what} has 0 in attn_type_list: lightning attention is not described")
    num_layers, hidden, num_heads, vocab = (
        found[field] or 0 for field in ("num_layers", "hidden", "num_heads", "vocab")
    )
    dtype = _dtype(config, "torch_dtype", "dtype")
    mla = _mla(config, what)
    experts = moe_layers(config, num_layers) if is_moe else ()
    has_dense = len(experts) < num_layers
    dense = found["dense_intermediate"] or found["intermediate"]
    if has_dense and dense is None:
        raise ValueError(f"{what} lacks {names_of('intermediate')}: layers without experts have it")
    moe_intermediate = (found["moe_intermediate"] or found["intermediate"] or 0) if is_moe else 0
    num_shared, shared_intermediate = _shared_experts(config, moe_intermediate) if is_moe else (0, 0)
    window, sliding, linear = attention_layers(config, num_layers)
    weight_dtype, expert_dtype = stored_formats(config)
    has_index = config.get("index_topk") is not None and mla is not None
    index = needed(config, ("index_n_heads", "index_head_dim", "index_topk"), what) if has_index else None
    head_dim = found["head_dim"] or hidden // num_heads
    family = str(config.get("model_type"))
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=found["num_kv_heads"] or num_heads,
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else head_dim,
        intermediate=(dense or 0) if has_dense else 0,
        vocab=vocab,
        dtype=dtype,
        source=source,
        mla=mla,
        num_experts=(found["num_experts"] or 0) if is_moe else 0,
        top_k=(found["top_k"] or 0) if is_moe else 0,
        num_shared_experts=num_shared,
        moe_intermediate=moe_intermediate,
        moe_layers=experts,
        sliding_window=window,
        sliding_layers=sliding,
        linear_layers=linear,
        num_expert_groups=(found["num_expert_groups"] or 1) if is_moe else 1,
        topk_groups=(found["topk_groups"] or 1) if is_moe else 1,
        routed_hidden=found["routed_hidden"] if is_moe else None,
        residual_streams=found["residual_streams"] or 1,
        residual_block_layers=found["residual_block_layers"],
        num_mtp_layers=_num_mtp_layers(config),
        indexer=Indexer(num_heads=index[0], head_dim=index[1], top_k=index[2]) if index else None,
        indexer_layers=indexer_layers(config, num_layers) if index else (),
        linear_attention=_linear(config, dtype, what) if linear else None,
        compress_ratios=compress_ratios(config, num_layers),
        shared_intermediate=shared_intermediate,
        tied_embeddings=switch(config, "tie_word_embeddings", default=family in TIED),
        gated_mlp=family not in NOT_GATED,
        output_gate=switch(config, "attn_output_gate", default=False)
        or switch(config, "mla_use_output_gate", default=False),
        weight_dtype=weight_dtype,
        expert_dtype=expert_dtype if is_moe else None,
    )
