"""ModelShape: the sizes of a model that decide its traffic; from the catalogue or any Hugging Face config.json."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

CATALOG = Path(__file__).parent / "catalog"
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}
DTYPE_NAMES: Mapping[str, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3",
    "float8": "float8_e4m3",
    "float8_e4m3fn": "float8_e4m3",
}

KV_FORMATS: tuple[str, ...] = ("fp8_ds_mla",)  # layouts of a cache entry that are no plain dtype

# What each size is called in the config.json files of different families, the first name the usual one.
KEYS: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "num_kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "intermediate": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"),
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
    "vocab": ("vocab_size", "padded_vocab_size"),
    "first_dense": ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
}


def dtype_bytes(dtype: str) -> int:
    """Return bytes of one element.

    >>> dtype_bytes("bfloat16"), dtype_bytes("fp8")
    (2, 1)

    Raises:
        ValueError: unknown dtype.
    """
    return DTYPE_BYTES[dtype_name(dtype)]


def dtype_name(dtype: str) -> str:
    """Return the full name of a dtype: ``bf16`` is ``bfloat16``.

    Raises:
        ValueError: unknown dtype.
    """
    name = DTYPE_NAMES.get(dtype.lower(), dtype.lower())
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype: {dtype!r}; allowed: {', '.join([*DTYPE_BYTES, *DTYPE_NAMES])}")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention: the cache holds one latent vector and one rotary key per token and layer."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    @property
    def latent_dim(self) -> int:
        """Elements cached per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Sparse attention's index (DSA): one small key per cached token and layer chooses the ``top_k`` that are read."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Linear attention (Gated DeltaNet, KDA): a state per request instead of a cache that grows."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of one model. ``moe_layers`` are the indices of layers with routed experts, empty for a dense model.

    A token's experts come from ``topk_groups`` of ``num_expert_groups`` (node-limited routing). ``routed_hidden`` is
    the width of a row that goes to an expert where it is not ``hidden``; ``residual_streams`` hidden states of a token
    cross a pipeline boundary; ``num_mtp_layers`` layers predict further tokens.

    ``sliding_layers`` cache at most ``sliding_window`` tokens; ``linear_layers`` cache none (a state per request).
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype: str
    source: str
    mla: Mla | None = None
    num_experts: int = 0
    top_k: int = 0
    num_shared_experts: int = 0
    moe_intermediate: int = 0
    moe_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    linear_layers: tuple[int, ...] = ()
    num_expert_groups: int = 1
    topk_groups: int = 1
    routed_hidden: int | None = None
    residual_streams: int = 1
    num_mtp_layers: int = 0
    indexer: Indexer | None = None
    linear_attention: LinearAttention | None = None
    compress_ratios: tuple[int, ...] = ()
    shared_intermediate: int = 0
    tied_embeddings: bool = False
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "vocab"):
            if getattr(self, field) < 1:
                raise ValueError(f"{self.name}: {field} must be positive: {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.name}: {self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )
        if self.moe_layers and not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"{self.name}: top_k must be between 1 and {self.num_experts} experts: {self.top_k}")
        dtype_bytes(self.dtype)

    @property
    def expert_row(self) -> int:
        """Elements of a token's row on its way to an expert and back."""
        return self.routed_hidden or self.hidden

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts."""
        return len(self.moe_layers)

    @property
    def kv_heads_stored(self) -> int:
        """Pieces that a token's KV of one layer can be cut into: KV heads, or 1 latent for MLA."""
        return 1 if self.mla else self.num_kv_heads

    @property
    def kv_elements_per_head(self) -> int:
        """Elements of one such piece, K and V together (MLA: latent and rotary key)."""
        return self.mla.latent_dim if self.mla else 2 * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one more token adds to the KV cache of the whole model, nothing replicated, in ``dtype``."""
        return self.kv_bytes(1)

    def kv_bytes(self, num_tokens: int, dtype: str | None = None) -> int:
        """Return bytes of the KV cache of one request of ``num_tokens``, nothing replicated, states left out."""
        from crosstraffic.patterns.kv_cache import cache_bytes

        return cache_bytes(self, num_tokens, dtype or self.dtype)


def _number(config: Mapping[str, Any], field: str) -> int | None:
    for key in KEYS[field]:
        value = config.get(key)
        if isinstance(value, bool) or (value is not None and not isinstance(value, int | list)):
            raise ValueError(f"{key} must be a whole number: {value!r}")
        if isinstance(value, list):
            value = value[0] if value and all(item == value[0] for item in value) else None
        if value is not None:
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{key} must be a whole number from 0: {value!r}")
            return value
    return None


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    first_dense = _number(config, "first_dense") or 0
    frequency = config.get("moe_layer_freq", 1)
    for key in ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step"):
        value = config.get(key)
        if not (value is None or isinstance(value, int) or (key == "moe_layer_freq" and isinstance(value, list))):
            raise ValueError(f"{key} must be a whole number: {value!r}")
    if not isinstance(config.get("mlp_only_layers") or [], list):
        raise ValueError(f"mlp_only_layers must be a list: {config['mlp_only_layers']!r}")
    if isinstance(frequency, list):
        return tuple(layer for layer, is_moe in enumerate(frequency[:num_layers]) if is_moe)
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    return tuple(
        layer
        for layer in range(first_dense, num_layers)
        if layer % (frequency or 1) == 0 and (layer + 1) % step == 0 and layer not in dense
    )


def _attention_layers(
    config: Mapping[str, Any], num_layers: int
) -> tuple[int | None, tuple[int, ...], tuple[int, ...]]:
    """Return the window, the layers that have it, and the layers with linear attention."""
    kinds = config.get("layer_types")
    interval = config.get("full_attention_interval")
    if not isinstance(kinds, list) and isinstance(interval, int) and interval > 0:
        kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(num_layers)]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if isinstance(kinds, list):
        sliding = tuple(layer for layer, kind in enumerate(kinds[:num_layers]) if "sliding" in str(kind))
        linear = tuple(layer for layer, kind in enumerate(kinds[:num_layers]) if "linear" in str(kind))
        if sliding and not isinstance(window, int):
            raise ValueError("layer_types has sliding_attention, and sliding_window is missing")
        return (window if sliding else None), sliding, linear
    if isinstance(window, int) and "use_sliding_window" not in config:
        return window, tuple(range(num_layers)), ()
    return None, (), ()


def model_from_config(config: Mapping[str, Any], *, name: str, source: str) -> ModelShape:
    """Read the shape out of a Hugging Face config; a multimodal one's ``text_config`` (or ``llm_config``) is taken.

    Raises:
        ValueError: needed keys are missing (named), or a value is wrong.
    """
    for nested in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(config.get(nested), Mapping):
            outer = {key: value for key, value in config.items() if key in ("torch_dtype", "dtype")}
            return model_from_config({**outer, **config[nested]}, name=name, source=source)
    found = {field: _number(config, field) for field in KEYS}
    needed = ["num_layers", "hidden", "num_heads", "vocab"]
    num_experts = found["num_experts"] or 0
    needed.append("top_k" if num_experts > 1 else "intermediate")
    missing = [" or ".join(KEYS[field][:2]) for field in needed if found[field] is None]
    mla_keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    is_mla = config.get("kv_lora_rank") is not None
    if is_mla:
        missing += [key for key in mla_keys if not isinstance(config.get(key), int)]
    if missing:
        raise ValueError(f"{name}: the configuration lacks {', '.join(missing)}")
    num_layers, hidden, num_heads = (found[field] or 0 for field in ("num_layers", "hidden", "num_heads"))
    mla = Mla(**{key: config[key] for key in mla_keys}, q_lora_rank=config.get("q_lora_rank")) if is_mla else None
    head_dim = found["head_dim"] or (hidden // num_heads if num_heads else 0)
    if mla:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    is_moe = num_experts > 1
    window, sliding, linear = _attention_layers(config, num_layers)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads if mla else (found["num_kv_heads"] or num_heads),
        head_dim=head_dim,
        intermediate=found["intermediate"] or 0,
        vocab=found["vocab"] or 0,
        dtype=dtype_name(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")),
        source=source,
        mla=mla,
        num_experts=num_experts if is_moe else 0,
        top_k=(found["top_k"] or 0) if is_moe else 0,
        num_shared_experts=(found["num_shared_experts"] or 0) if is_moe else 0,
        moe_intermediate=(found["moe_intermediate"] or found["intermediate"] or 0) if is_moe else 0,
        moe_layers=_moe_layers(config, num_layers) if is_moe else (),
        sliding_window=window,
        sliding_layers=sliding,
        linear_layers=linear,
    )


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable JSON file: {error}") from error
    if not isinstance(data, Mapping):
        raise ValueError(f"{path}: not a JSON object")
    return data


@lru_cache(maxsize=1)
def _catalog() -> Mapping[str, Path]:
    names: dict[str, Path] = {}
    for path in sorted(CATALOG.glob("*.json")):
        names[path.stem.lower()] = path
        for alias in _read(path).get("aliases", ()):
            names[alias.lower()] = path
    return names


def catalog_names() -> tuple[str, ...]:
    """Return the names of the models that come with the package."""
    return tuple(path.stem for path in sorted(CATALOG.glob("*.json"), key=lambda path: path.stem.lower()))


def load_model(name_or_path: str) -> ModelShape:
    """Load a catalogue model by name (case does not matter, an owner in front neither), or a config.json by path.

    Raises:
        ValueError: no such model or file, or a configuration without what is needed.
    """
    path = Path(name_or_path)
    catalog = _catalog()
    if path.suffix != ".json" and not path.is_dir():
        short = name_or_path.rsplit("/", 1)[-1].lower()
        for name in (short, short.removesuffix("-instruct")):
            if name in catalog:
                entry = _read(catalog[name])
                return model_from_config(entry["config"], name=entry["name"], source=entry["source"])
        if not path.is_file():
            raise ValueError(
                f"unknown model: {name_or_path!r}; allowed: {', '.join(catalog_names())}, "
                "or the path of a Hugging Face config.json"
            )
    file = path / "config.json" if path.is_dir() else path
    config = _read(file)
    own_name = config.get("_name_or_path")
    fallback = file.resolve().parent.name if file.name == "config.json" else file.stem
    return model_from_config(
        config, name=own_name if isinstance(own_name, str) and own_name else fallback, source=str(name_or_path)
    )


def layer_runs(layers: Sequence[int], moe_layers: Sequence[int]) -> tuple[tuple[bool, int], ...]:
    """Group consecutive layers of one kind: (has experts, how many).

    >>> layer_runs(range(5), (3, 4))
    ((False, 3), (True, 2))
    """
    experts = set(moe_layers)
    runs: list[tuple[bool, int]] = []
    for layer in layers:
        is_moe = layer in experts
        if runs and runs[-1][0] == is_moe:
            runs[-1] = (is_moe, runs[-1][1] + 1)
        else:
            runs.append((is_moe, 1))
    return tuple(runs)
