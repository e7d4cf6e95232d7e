"""The names that sizes have in the config.json files of different families, and how one value is read and checked."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
MOST = 10_000_000  # no size of a model comes near; larger ones would only cost time and memory

# What each size is called, the usual name first.
KEYS: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"),
    "dense_intermediate": ("intermediate_size_mlp", "dense_intermediate_size"),
    "moe_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok",
        "experts_per_token",
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    ),
    "num_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_intermediate": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
    ),
    "num_expert_groups": ("n_group", "num_expert_group"),
    "topk_groups": ("topk_group",),
    "routed_hidden": ("routed_expert_hidden_size",),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    "num_mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "residual_streams": ("hc_mult",),
    "residual_block_layers": ("attn_res_block_size",),
}
AT_LEAST_ONE = frozenset(
    (
        "num_layers",
        "hidden",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "vocab",
        "num_expert_groups",
        "topk_groups",
        "routed_hidden",
        "residual_streams",
        "residual_block_layers",
    )
)
LIMITS: Mapping[str, int] = {"num_layers": 1_000, "num_experts": 100_000, "num_mtp_layers": 100}


def names_of(field: str) -> str:
    """Return the accepted names of a size, for a message.

    >>> names_of("hidden")
    'hidden_size (or n_embd, d_model)'
    """
    first, *others = KEYS[field]
    return f"{first} (or {', '.join(others)})" if others else first


def whole(config: Config, key: str, *, least: int = 0, most: int = MOST) -> int | None:
    """Return the whole number of a key; None if it is absent or null.

    Raises:
        ValueError: anything but a whole number from ``least`` to ``most``; booleans, text and fractions are none.
    """
    return None if config.get(key) is None else checked(key, config[key], least=least, most=most)


def checked(key: str, value: object, *, least: int = 0, most: int = MOST) -> int:
    """Return a value that is a whole number from ``least`` to ``most``, or raise ValueError that names its key."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{key} must be a whole number from {least} to {most}: {value!r:.60}")
    return value


def size(config: Config, field: str) -> int | None:
    """Return a size under whichever of its names the configuration has; a list of one repeated value counts as it.

    Raises:
        ValueError: not a whole number, or out of range.
    """
    for key in KEYS[field]:
        value = config.get(key)
        if isinstance(value, list):
            if len(set(map(str, value))) != 1:
                raise ValueError(f"{key} must be a whole number, or a list of one that repeats: {value!r:.60}")
            value = value[0]
        if value is not None:
            return checked(key, value, least=int(field in AT_LEAST_ONE), most=LIMITS.get(field, MOST))
    return None


def needed(config: Config, keys: tuple[str, ...], what: str) -> tuple[int, ...]:
    """Return the positive numbers of keys that must all be there.

    Raises:
        ValueError: some are missing (all of these are named), or a value is wrong.
    """
    found = {key: whole(config, key, least=1) for key in keys}
    missing = [key for key, value in found.items() if value is None]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}")
    return tuple(value for value in found.values() if value is not None)


def switch(config: Config, key: str, *, default: bool) -> bool:
    """Return a key that is true or false; ``default`` if it is absent or null.

    Raises:
        ValueError: anything else.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false: {value!r:.60}")
    return value


def per_layer(config: Config, key: str, num_layers: int) -> list[Any] | None:
    """Return a list that has one entry a layer; entries after the last layer (of MTP) are dropped. None if absent.

    Raises:
        ValueError: not a list, or too short.
    """
    value = config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) < num_layers:
        length = f" of {len(value)}" if isinstance(value, list) else ""
        raise ValueError(f"{key} must be a list with an entry for each of {num_layers} layers: {value!r:.60}{length}")
    return value[:num_layers]


def layer_indices(config: Config, key: str, num_layers: int, *, first: int = 0) -> tuple[int, ...]:
    """Return the layers that a list names, counted from 0; ``first`` is the index that the list gives the first layer.

    Raises:
        ValueError: not a list, or an index that is no layer.
    """
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"{key} must be a list of layers: {value!r:.60}")
    return tuple(sorted({checked(key, layer, least=first, most=num_layers - 1 + first) - first for layer in value}))
