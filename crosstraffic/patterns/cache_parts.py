"""Parts of what a request has cached: layers alike, with the pieces that ranks can share out and their bytes."""

from dataclasses import dataclass, replace
from math import gcd

from crosstraffic.patterns.kv_cache import (
    cached_entries,
    check_kv_dtype,
    conv_bytes,
    index_bytes,
    index_entries,
    state_bytes,
    token_bytes,
)
from crosstraffic.patterns.model import KV_FORMATS, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that each of ``layers`` holds of a request: ``num_entries`` entries of ``num_heads`` equal pieces.

    ``regions`` are the bytes of one piece of an entry, by the memory regions that they lie in (K and V; a latent and
    its index key); all of an entry, if heads cannot be told apart, is one piece that every tensor-parallel rank holds.
    ``last`` entries are only known when the prompt is at its end: a window, a state. ``is_latest`` says that entries
    are those of the latest tokens; ``is_state`` that there is one a request, which ranks that cut tokens all hold;
    ``is_packed_page`` that a page of all layers is one piece of memory.
    """

    name: str
    layers: tuple[int, ...]
    num_heads: int
    regions: tuple[int, ...]
    num_entries: int
    last: int = 0
    is_latest: bool = False
    is_state: bool = False
    is_packed_page: bool = False

    @property
    def head_bytes(self) -> int:
        """Bytes of one piece of one entry."""
        return sum(self.regions)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, all pieces and entries."""
        return self.num_heads * self.num_entries * self.head_bytes


def _entry_regions(shape: ModelShape, layer: int, kv_dtype: str) -> tuple[int, ...]:
    """Return the bytes of one piece of an entry by region: K and V, or a latent and its index key."""
    whole = token_bytes(shape, layer, kv_dtype) // shape.kv_heads_stored
    if shape.mla is None:
        return (whole // 2, whole // 2)
    if kv_dtype in KV_FORMATS and not shape.compress_ratios and index_bytes(shape, layer):
        return (whole - index_bytes(shape, layer), index_bytes(shape, layer))
    return (whole,)


def _layer_parts(shape: ModelShape, layer: int, num_tokens: int, kv_dtype: str) -> list[Part]:
    state, conv, linear = state_bytes(shape, layer, kv_dtype), conv_bytes(shape, layer), shape.linear_attention
    if layer in shape.linear_layers and linear is not None:
        common = gcd(linear.num_key_heads, linear.num_value_heads)
        keys, values = (
            heads // common * dim
            for heads, dim in (
                (linear.num_key_heads, linear.key_head_dim),
                (linear.num_value_heads, linear.value_head_dim),
            )
        )
        element = conv // (common * (2 * keys + values))
        whole = Part(name="state", layers=(layer,), num_heads=linear.num_value_heads, regions=(), num_entries=1, last=1)
        return [
            replace(whole, regions=(state // linear.num_value_heads,), is_state=True),
            replace(
                whole,
                name="convolution",
                num_heads=common,
                regions=(keys * element, keys * element, values * element),
                is_state=True,
            ),
        ]
    num_entries = cached_entries(shape, layer, num_tokens)
    window = min(num_tokens, shape.sliding_window or 0)
    is_window = layer in shape.sliding_layers and not shape.compress_ratios
    parts = [
        Part(
            name="window" if is_window else "entries",
            layers=(layer,),
            num_heads=shape.kv_heads_stored,
            regions=_entry_regions(shape, layer, kv_dtype),
            num_entries=num_entries,
            last=window if is_window or shape.compress_ratios else 0,
            is_latest=is_window,
            is_packed_page=bool(shape.compress_ratios),
        )
    ]
    if shape.compress_ratios and kv_dtype in KV_FORMATS:
        parts.append(
            Part(
                name="index",
                layers=(layer,),
                num_heads=1,
                regions=(index_bytes(shape, layer),),
                num_entries=index_entries(shape, layer, num_tokens),
                is_packed_page=True,
            )
        )
    return [part for part in parts if part.layer_bytes]


def cache_parts(shape: ModelShape, num_tokens: int, kv_dtype: str) -> tuple[Part, ...]:
    """Return the parts of what a request of ``num_tokens`` has cached; together they are its ``request_bytes``.

    >>> from crosstraffic.patterns.model import load_model
    >>> [(part.name, len(part.layers), part.num_entries, part.regions)
    ...  for part in cache_parts(load_model("gpt-oss-20b"), 1000, "bfloat16")]
    [('window', 12, 128, (128, 128)), ('entries', 12, 1000, (128, 128))]

    Raises:
        ValueError: a dtype that does not exist or does not fit the model, or a state whose size is unknown.

    Source: sizes as in ``kv_cache``; the heads of a state: Megatron-LM @ d98e8a64ddf3
    core/inference/disaggregation/ssm_reshard.py (recurrent state by head, convolution by its bands' heads).
    """
    check_kv_dtype(shape, kv_dtype)
    alike: dict[Part, list[int]] = {}
    for layer in range(shape.num_layers):
        for part in _layer_parts(shape, layer, num_tokens, kv_dtype):
            key = replace(part, layers=())
            alike.setdefault(key, []).append(layer)
    return tuple(replace(part, layers=tuple(layers)) for part, layers in alike.items())
