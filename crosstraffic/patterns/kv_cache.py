"""What a request leaves in the KV cache of each layer: bytes of an entry, how many entries, and constant states.

Everything is of the whole model: nothing is cut over ranks and nothing replicated.

An entry is what one token leaves, or several (DeepSeek-V4 makes one entry of 4 or of 128 tokens and keeps a window of
single ones). Sparse attention (DSA) keeps an index key beside each entry. ``fp8_ds_mla`` is DeepSeek's own layout and
counts these keys; a plain dtype counts the attention cache alone, as published sizes do, and ``index_bytes`` has the
keys. Linear attention has a state per request: the recurrent one (``state_bytes``) and the last inputs of its short
convolution (``conv_bytes``).
"""

from crosstraffic.patterns.model import KV_FORMATS, LinearAttention, ModelShape, dtype_bytes

LATENT_BYTES = 512 + 4 * 4 + 64 * 2  # fp8_ds_mla: 512 fp8, four float32 scales, 64 bfloat16 of the rotary key
COMPRESSED_BYTES = 448 + 64 * 2 + 8  # fp8_ds_mla of DeepSeek-V4: 448 fp8, 64 bfloat16, 7 scales and a pad byte
INDEX_BLOCK = 128  # fp8 elements of an index key that share one float32 scale
LATENT_RANK, COMPRESSED_HEAD = 512, 512  # the sizes that these layouts are made for


def check_kv_dtype(shape: ModelShape, kv_dtype: str) -> None:
    """Raise ValueError for a dtype of the cache that does not exist, or does not fit the model.

    Source: vLLM @ 017e9f4448b7 models/deepseek_v32/common/kernels.py (fp8_ds_mla requires kv_lora_rank == 512) and
    models/deepseek_v4/sparse_mla.py.
    """
    if kv_dtype not in KV_FORMATS:
        try:
            dtype_bytes(kv_dtype)
        except ValueError as error:
            raise ValueError(f"{error}; for latent attention (MLA) also {', '.join(KV_FORMATS)}") from None
    elif shape.mla is None:
        raise ValueError(
            f"{shape.name}: {kv_dtype} is a layout of latent attention (MLA), which the model does not have"
        )
    elif shape.compress_ratios and shape.head_dim != COMPRESSED_HEAD:
        raise ValueError(f"{shape.name}: {kv_dtype} requires head_dim == {COMPRESSED_HEAD}: {shape.head_dim}")
    elif not shape.compress_ratios and (shape.mla.kv_lora_rank, shape.mla.qk_rope_head_dim) != (LATENT_RANK, 64):
        raise ValueError(
            f"{shape.name}: {kv_dtype} requires kv_lora_rank == {LATENT_RANK} and qk_rope_head_dim == 64: "
            f"{shape.mla.kv_lora_rank} and {shape.mla.qk_rope_head_dim}"
        )


def _check_layer(shape: ModelShape, layer: int) -> None:
    if not 0 <= layer < shape.num_layers:
        raise ValueError(f"{shape.name}: layer must be from 0 to {shape.num_layers - 1}: {layer}")


def index_bytes(shape: ModelShape, layer: int) -> int:
    """Return bytes of the index key of one entry: fp8 elements and a float32 scale for 128 of them; 0 without an index.

    >>> from crosstraffic.patterns.model import load_model
    >>> index_bytes(load_model("DeepSeek-V3.2"), 0)
    132

    Source: vLLM @ 017e9f4448b7 models/deepseek_v4/attention.py DeepseekV4Indexer (the same cache as V3.2's). With
    attention_config.use_fp4_indexer_cache it would be 68.
    """
    _check_layer(shape, layer)
    if shape.indexer is None or layer not in shape.indexer_layers:
        return 0
    return shape.indexer.head_dim + shape.indexer.head_dim // INDEX_BLOCK * 4


def index_entries(shape: ModelShape, layer: int, num_tokens: int) -> int:
    """Return the index keys that a request has in one layer: one a token, or one a compressed entry (DeepSeek-V4)."""
    if not index_bytes(shape, layer):
        return 0
    return num_tokens // shape.compress_ratios[layer] if shape.compress_ratios else num_tokens


def token_bytes(shape: ModelShape, layer: int, kv_dtype: str) -> int:
    """Return bytes of one cached entry of one layer, all KV heads; 0 in layers of linear attention.

    GQA: 2 * K * d * b. MLA: (kv_lora + rope) * b; ``fp8_ds_mla``: 656, and 132 for the index key where the layer has
    one. DeepSeek-V4: (nope + rope) * b; ``fp8_ds_mla``: 584. It has fewer index keys than entries: ``layer_bytes`` adds
    them.

    >>> from crosstraffic.patterns.model import load_model
    >>> token_bytes(load_model("Llama-3.1-70B"), 0, "bfloat16")
    4096
    >>> token_bytes(load_model("DeepSeek-V3.2"), 0, "fp8_ds_mla")
    788

    Raises:
        ValueError: no such layer, or a dtype that does not exist or does not fit the model.

    Source: vLLM @ 017e9f4448b7 v1/kv_cache_interface.py, layers/attention/mla_attention.py (656),
    models/deepseek_v4/attention.py (584).
    """
    check_kv_dtype(shape, kv_dtype)
    _check_layer(shape, layer)
    if layer in shape.linear_layers:
        return 0
    if kv_dtype not in KV_FORMATS:
        return shape.kv_heads_stored * shape.kv_elements_per_head * dtype_bytes(kv_dtype)
    return COMPRESSED_BYTES if shape.compress_ratios else LATENT_BYTES + index_bytes(shape, layer)


def cached_entries(shape: ModelShape, layer: int, num_tokens: int) -> int:
    """Return the entries that a request of ``num_tokens`` has in one layer.

    One a token; in windowed layers at most the window; of DeepSeek-V4 the window and one for each whole group of
    compressed tokens; none in layers of linear attention. Chunked attention (Llama 4) keeps all: vLLM does not free
    what lies before the chunk.

    >>> from crosstraffic.patterns.model import load_model
    >>> [cached_entries(load_model("DeepSeek-V4-Flash"), layer, 1000) for layer in (0, 2, 3)]
    [128, 378, 135]

    Raises:
        ValueError: no such layer, or a negative number of tokens.

    Source: vLLM @ 017e9f4448b7 models/deepseek_v4/attention.py; v1/kv_cache_interface.py MLAAttentionSpec
    (storage_block_size = block_size // compress_ratio).
    """
    _check_layer(shape, layer)
    if num_tokens < 0:
        raise ValueError(f"num_tokens must not be negative: {num_tokens}")
    if layer in shape.linear_layers:
        return 0
    if shape.compress_ratios:
        ratio = shape.compress_ratios[layer]
        return min(num_tokens, shape.sliding_window or 0) + (num_tokens // ratio if ratio else 0)
    if layer in shape.sliding_layers and shape.sliding_window is not None:
        return min(num_tokens, shape.sliding_window)
    return num_tokens


def layer_bytes(shape: ModelShape, layer: int, num_tokens: int, kv_dtype: str) -> int:
    """Return bytes that a request of ``num_tokens`` has in one layer, states left out: entries and index keys."""
    total = cached_entries(shape, layer, num_tokens) * token_bytes(shape, layer, kv_dtype)
    if shape.compress_ratios and kv_dtype in KV_FORMATS:
        total += index_entries(shape, layer, num_tokens) * index_bytes(shape, layer)
    return total


def _linear(shape: ModelShape, layer: int) -> LinearAttention | None:
    """Return the sizes of a layer's linear attention, None if it has another kind of attention."""
    _check_layer(shape, layer)
    if layer not in shape.linear_layers:
        return None
    if shape.linear_attention is None:
        raise ValueError(
            f"{shape.name}: the state of linear attention is unknown: the configuration has neither "
            "linear_num_value_heads, linear_key_head_dim ... nor linear_attn_config"
        )
    return shape.linear_attention


def state_elements(shape: ModelShape, layer: int) -> int:
    """Return elements of the recurrent state of one request in one layer: value heads * key * value dimension.

    >>> from crosstraffic.patterns.model import load_model
    >>> kimi = load_model("Kimi-K3")
    >>> sum(state_elements(kimi, layer) for layer in kimi.linear_layers)
    108527616

    Source: vLLM @ 017e9f4448b7 layers/mamba/mamba_utils.py kda_state_shape, gated_delta_net_state_shape.
    """
    linear = _linear(shape, layer)
    if linear is None:
        return 0
    return linear.num_value_heads * linear.key_head_dim * linear.value_head_dim


def state_bytes(shape: ModelShape, layer: int, kv_dtype: str | None = None, *, state_dtype: str | None = None) -> int:
    """Return bytes of the recurrent state of one request in one layer, however long the request is.

    It keeps its own dtype whatever that of the cache is: float32 in KDA; in Gated DeltaNet mamba_ssm_dtype of the
    configuration (float32 in Qwen3.5), else the dtype of the model. ``state_dtype`` asks for another.

    Raises:
        ValueError: no such layer, or a dtype that does not exist or does not fit the model.

    Source: vLLM @ 017e9f4448b7 layers/mamba/mamba_utils.py kda_state_dtype, gated_delta_net_state_dtype;
    model_executor/models/config.py Qwen3_5ForConditionalGenerationConfig.
    """
    if kv_dtype is not None:
        check_kv_dtype(shape, kv_dtype)
    linear = _linear(shape, layer)
    return state_elements(shape, layer) * dtype_bytes(state_dtype or linear.state_dtype) if linear else 0


def conv_bytes(shape: ModelShape, layer: int) -> int:
    """Return bytes of what the short convolution of linear attention remembers of one request, in the model's dtype.

    (kernel - 1) * (2 * key heads * key dimension + value heads * value dimension).

    Source: vLLM @ 017e9f4448b7 layers/mamba/mamba_utils.py.
    """
    linear = _linear(shape, layer)
    if linear is None:
        return 0
    channels = 2 * linear.num_key_heads * linear.key_head_dim + linear.num_value_heads * linear.value_head_dim
    return (linear.conv_kernel - 1) * channels * dtype_bytes(shape.dtype)


def compressor_bytes(shape: ModelShape, layer: int) -> int:
    """Return bytes of the unfinished groups of DeepSeek-V4's compressors of one request: float32 values and scores.

    Groups of 4 overlap: two groups are kept, of twice the width, and the index has a compressor of its own. In no
    published size of the cache, hence in no sum here.

    Source: vLLM @ 017e9f4448b7 models/deepseek_v4/compressor.py CompressorStateCache.
    """
    _check_layer(shape, layer)
    ratio = shape.compress_ratios[layer] if shape.compress_ratios else 0
    if not ratio:
        return 0
    overlap = 2 if ratio == 4 else 1
    index = shape.indexer.head_dim if shape.indexer and layer in shape.indexer_layers else 0
    return overlap * ratio * 2 * overlap * (shape.head_dim + index) * dtype_bytes("float32")


def cache_bytes(shape: ModelShape, num_tokens: int, kv_dtype: str) -> int:
    """Return bytes of what grows with the tokens of one request, all layers.

    >>> from crosstraffic.patterns.model import load_model
    >>> cache_bytes(load_model("DeepSeek-V3"), 1, "bfloat16"), cache_bytes(load_model("Llama-3.1-405B"), 1, "bfloat16")
    (70272, 516096)

    Raises:
        ValueError: a dtype that does not exist or does not fit the model, or a negative number of tokens.
    """
    return sum(layer_bytes(shape, layer, num_tokens, kv_dtype) for layer in range(shape.num_layers))


def request_bytes(shape: ModelShape, num_tokens: int, kv_dtype: str) -> int:
    """Return bytes of all that one request of ``num_tokens`` has cached: entries, recurrent and convolution states."""
    states = sum(state_bytes(shape, layer, kv_dtype) + conv_bytes(shape, layer) for layer in shape.linear_layers)
    return cache_bytes(shape, num_tokens, kv_dtype) + states
