"""What a request leaves in the KV cache of each layer: bytes of an entry, how many entries, and constant states.

Everything is of the whole model: nothing is cut over ranks and nothing replicated.
"""

from crosstraffic.patterns.model import KV_FORMATS, ModelShape, dtype_bytes

LATENT_BYTES = 656  # fp8_ds_mla: 512 fp8, four fp32 scales, 64 bfloat16 of the rotary key
INDEX_SCALE_BYTES = 4
COMPRESSED_BYTES = 584  # DeepSeek-V4: 448 fp8, 64 bfloat16 of the rotary key, 8 scales
COMPRESSED_WINDOW = 128


def check_kv_dtype(shape: ModelShape, kv_dtype: str) -> None:
    """Raise ValueError for a dtype of the cache that does not exist, or does not fit the model."""
    if kv_dtype not in KV_FORMATS:
        dtype_bytes(kv_dtype)
    elif shape.mla is None and not shape.compress_ratios:
        raise ValueError(
            f"{shape.name}: {kv_dtype} is a layout of latent attention (MLA), which the model does not have"
        )


def indexer_bytes(shape: ModelShape, layer: int) -> int:
    """Return bytes of the sparse-attention key of one entry: fp8 elements and one fp32 scale; 0 without an indexer."""
    return shape.indexer.head_dim + INDEX_SCALE_BYTES if shape.indexer and layer not in shape.linear_layers else 0


def token_bytes(shape: ModelShape, layer: int, kv_dtype: str) -> int:
    """Return bytes of one cached entry of one layer, all KV heads."""
    check_kv_dtype(shape, kv_dtype)
    if layer in shape.linear_layers:
        return 0
    if shape.compress_ratios:
        return COMPRESSED_BYTES
    if kv_dtype in KV_FORMATS:
        return LATENT_BYTES + indexer_bytes(shape, layer)
    return shape.kv_heads_stored * shape.kv_elements_per_head * dtype_bytes(kv_dtype)


def cached_entries(shape: ModelShape, layer: int, num_tokens: int) -> int:
    """Return the entries that a request of ``num_tokens`` has in one layer."""
    if layer in shape.linear_layers:
        return 0
    if shape.compress_ratios:
        ratio = shape.compress_ratios[layer]
        return min(num_tokens, COMPRESSED_WINDOW) + (num_tokens // ratio if ratio else 0)
    if layer in shape.sliding_layers and shape.sliding_window is not None:
        return min(num_tokens, shape.sliding_window)
    return num_tokens


def state_elements(shape: ModelShape, layer: int) -> int:
    """Return elements of the recurrent state that one request has in one layer; 0 but in linear-attention layers."""
    linear = shape.linear_attention
    if linear is None or layer not in shape.linear_layers:
        return 0
    return linear.num_value_heads * linear.key_head_dim * linear.value_head_dim


def state_bytes(shape: ModelShape, layer: int, kv_dtype: str) -> int:
    """Return bytes of the state that one request has in a linear-attention layer, however long it is."""
    check_kv_dtype(shape, kv_dtype)
    return state_elements(shape, layer) * dtype_bytes("float32")


def cache_bytes(shape: ModelShape, num_tokens: int, kv_dtype: str) -> int:
    """Return bytes of what grows with the tokens of one request, all layers."""
    return sum(
        cached_entries(shape, layer, num_tokens) * token_bytes(shape, layer, kv_dtype)
        for layer in range(shape.num_layers)
    )


def request_bytes(shape: ModelShape, num_tokens: int, kv_dtype: str) -> int:
    """Return bytes of everything that one request of ``num_tokens`` has cached: entries and states, all layers."""
    states = sum(state_bytes(shape, layer, kv_dtype) for layer in shape.linear_layers)
    return cache_bytes(shape, num_tokens, kv_dtype) + states
