"""Which layers of a configuration have experts, a window, linear attention, compressed entries or an index."""

from collections.abc import Mapping

from crosstraffic.patterns.config_keys import Config, checked, layer_indices, per_layer, size, whole
from crosstraffic.patterns.config_keys import switch as is_on

# What an entry of layer_types means for the cache. Chunked attention reads one chunk, but vLLM keeps all of the cache.
KINDS: Mapping[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "chunked_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "linear_attention": "linear",
}
# One layer in so many has full attention, where a family's configuration leaves it out.
FULL_EVERY: Mapping[str, int] = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}


def moe_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers with routed experts of a model that has some.

    Raises:
        ValueError: a value is no layer, no step, or out of range.

    Source: vLLM @ 017e9f4448b7, models deepseek_v2.py (first_k_dense_replace, moe_layer_freq), qwen3_moe.py
    (decoder_sparse_step, mlp_only_layers), llama4.py (interleave_moe_layer_step), ernie45_moe.py (moe_layer_interval).
    """
    types = per_layer(config, "mlp_layer_types", num_layers)
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
    if isinstance(config.get("moe_layer_freq"), list):
        flags = per_layer(config, "moe_layer_freq", num_layers) or []
        return tuple(layer for layer, flag in enumerate(flags) if checked("moe_layer_freq", flag, most=1))
    if isinstance(config.get("moe_layers"), list):
        return layer_indices(config, "moe_layers", num_layers)
    frequency = whole(config, "moe_layer_freq", least=1) or 1
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    step = next((found for found in (whole(config, key, least=1) for key in steps) if found), 1)
    dense = set(layer_indices(config, "mlp_only_layers", num_layers))
    first = size(config, "first_dense") or 0
    if first > num_layers:
        raise ValueError(f"first_k_dense_replace must be at most the {num_layers} layers: {first}")
    return tuple(
        layer
        for layer in range(first, num_layers)
        if layer % frequency == 0 and (layer + 1) % step == 0 and layer not in dense
    )


def _kinds(config: Config, num_layers: int) -> list[str] | None:
    """Return what each layer is, where the configuration says it layer by layer or in a period."""
    types = per_layer(config, "layer_types", num_layers)
    if types is not None:
        unknown = sorted({str(kind) for kind in types if str(kind) not in KINDS})
        if unknown:
            raise ValueError(f"layer_types has {', '.join(unknown)}; allowed: {', '.join(KINDS)}")
        return [KINDS[kind] for kind in types]
    interval = whole(config, "full_attention_interval", least=1)
    if interval:
        return ["full" if (layer + 1) % interval == 0 else "linear" for layer in range(num_layers)]
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        return ["full" if pattern[layer % len(pattern)] == "G" else "sliding" for layer in range(num_layers)]
    every = FULL_EVERY.get(str(config.get("model_type")))
    if pattern is not None:
        every = checked("sliding_window_pattern", pattern, least=1)
    if every is None:
        return None
    return ["full" if (layer + 1) % every == 0 else "sliding" for layer in range(num_layers)]


def attention_layers(config: Config, num_layers: int) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    """Return the window, the layers that have only it, and the layers with linear attention.

    Raises:
        ValueError: a kind of layer that is not known, or windows of no size.

    Source: vLLM @ 017e9f4448b7, models gpt_oss.py, qwen3_next.py, gemma3.py, kimi_linear.py; Qwen2: layers from
    max_window_layers on have the window, where use_sliding_window is true.
    """
    linear_config = config.get("linear_attn_config")
    if linear_config is not None:
        if not isinstance(linear_config, Mapping):
            raise ValueError(f"linear_attn_config must be an object: {linear_config!r:.60}")
        linear = layer_indices(linear_config, "kda_layers", num_layers, first=1)
        full = layer_indices(linear_config, "full_attn_layers", num_layers, first=1)
        if sorted(linear + full) != list(range(num_layers)):
            raise ValueError(f"kda_layers and full_attn_layers must name each of {num_layers} layers once")
        return None, (), linear
    window = whole(config, "sliding_window", least=1)
    if compress_ratios(config, num_layers):
        return window, (), ()
    kinds = _kinds(config, num_layers)
    has_window = is_on(config, "use_sliding_window", default=True)
    if kinds is None:
        first = 0 if "use_sliding_window" not in config else whole(config, "max_window_layers") or 0
        kinds = ["sliding" if window and has_window and layer >= first else "full" for layer in range(num_layers)]
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding")
    linear = tuple(layer for layer, kind in enumerate(kinds) if kind == "linear")
    if sliding and window is None:
        raise ValueError("layers have sliding attention, and sliding_window is missing")
    return (window if sliding else None), sliding, linear


def compress_ratios(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return of how many tokens each layer makes one entry (DeepSeek-V4; 0: none beyond the window); empty: no such.

    Raises:
        ValueError: not a list with an entry a layer, or a ratio other than 0, 4 and 128.

    Source: vLLM @ 017e9f4448b7, models/deepseek_v4/attention.py and compressor.py.
    """
    ratios = per_layer(config, "compress_ratios", num_layers) or ()
    for ratio in ratios:
        if checked("compress_ratios", ratio) not in (0, 1, 4, 128):
            raise ValueError(f"compress_ratios must be 0, 4 or 128: {ratio}")
    return tuple(0 if ratio == 1 else ratio for ratio in ratios)


def indexer_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers that keep an index of their own (sparse attention); others use that of an earlier layer.

    Raises:
        ValueError: a pattern that is too short.

    Source: vLLM @ 017e9f4448b7, models/deepseek_v32/attention.py (index_topk_freq, index_topk_pattern, skip offset
    2) and models/deepseek_v4/attention.py (only layers that compress 4 tokens into one).
    """
    ratios = compress_ratios(config, num_layers)
    if ratios:
        return tuple(layer for layer, ratio in enumerate(ratios) if ratio == 4)
    types = per_layer(config, "indexer_types", num_layers)
    if types is not None:
        return tuple(layer for layer, kind in enumerate(types) if kind != "shared")
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        letters = list(pattern) if isinstance(pattern, str) else pattern
        flags = per_layer({"index_topk_pattern": letters}, "index_topk_pattern", num_layers) or []
        return tuple(layer for layer, flag in enumerate(flags) if flag != "S")
    every = whole(config, "index_topk_freq", least=1) or 1
    offset = whole(config, "index_skip_topk_offset")
    skipped = 2 if offset is None else offset
    return tuple(layer for layer in range(num_layers) if max(layer - skipped + 1, 0) % every == 0)
