"""ModelShape: the sizes of a model that decide its traffic; from the catalogue or any Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

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
    """Multi-head latent attention: the cache holds one latent vector and one rotary key per token and layer.

    ``o_lora_rank`` and ``o_groups`` are of DeepSeek-V4, whose heads share one vector as key and value and whose output
    goes through a low rank by groups of heads.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    o_lora_rank: int | None = None
    o_groups: int = 1

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
    """Linear attention, Gated DeltaNet (``gdn``) or KDA: a state per request instead of a cache that grows.

    ``state_dtype`` is that of the recurrent state; ``full_rank_gate`` says that KDA's output gate is no low rank.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    state_dtype: str = "float32"
    kind: Literal["gdn", "kda"] = "gdn"
    full_rank_gate: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of one model. ``moe_layers`` are the indices of layers with routed experts, empty for a dense model.

    MLP. ``intermediate`` is the width of a dense layer's, 0 where every layer has experts; ``shared_intermediate`` that
    of all shared experts together. A token's experts come from ``topk_groups`` of ``num_expert_groups`` (node-limited
    routing). ``routed_hidden`` is the width of a row that goes to an expert where it is not ``hidden``.

    Attention. ``sliding_layers`` cache at most ``sliding_window`` tokens; ``linear_layers`` cache none (a state per
    request, of the sizes in ``linear_attention``); ``compress_ratios`` says of how many tokens each layer makes one
    entry (DeepSeek-V4; 0: the window alone). ``indexer_layers`` keep the keys of ``indexer``.

    Pipeline. ``residual_streams`` hidden states of a token cross a boundary between stages; where
    ``residual_block_layers`` is given, one more for each started block of so many layers before it (Kimi-K3).
    ``num_mtp_layers`` layers predict further tokens.

    Encoder. ``has_encoder``: images or audio become embeddings before the language model, which the other fields
    describe; ``num_deepstack`` of its inner layers get embeddings of their own.

    Weights. ``weight_dtype`` is the format of a checkpoint's quantised weights, ``expert_dtype`` that of routed experts
    where it differs; None: not quantised, the same. ``gated_mlp`` is three matrices, else two; ``output_gate`` one more
    of attention's width.
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
    residual_block_layers: int | None = None
    indexer: Indexer | None = None
    indexer_layers: tuple[int, ...] = ()
    linear_attention: LinearAttention | None = None
    compress_ratios: tuple[int, ...] = ()
    shared_intermediate: int = 0
    tied_embeddings: bool = False
    gated_mlp: bool = True
    output_gate: bool = False
    weight_dtype: str | None = None
    expert_dtype: str | None = None
    has_encoder: bool = False
    num_deepstack: int = 0

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
        if self.moe_layers and self.num_experts % self.num_expert_groups:
            raise ValueError(
                f"{self.name}: {self.num_experts} experts do not divide over {self.num_expert_groups} groups (n_group)"
            )
        if not 1 <= self.topk_groups <= self.num_expert_groups:
            raise ValueError(
                f"{self.name}: topk_group must be between 1 and {self.num_expert_groups} groups: {self.topk_groups}"
            )
        for field in ("moe_layers", "sliding_layers", "linear_layers", "indexer_layers"):
            outside = [layer for layer in getattr(self, field) if not 0 <= layer < self.num_layers]
            if outside:
                raise ValueError(f"{self.name}: {field} must be layers from 0 to {self.num_layers - 1}: {outside[0]}")
        if self.compress_ratios and len(self.compress_ratios) != self.num_layers:
            raise ValueError(
                f"{self.name}: compress_ratios must be one for each of {self.num_layers} layers: "
                f"{len(self.compress_ratios)}"
            )
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
    def kv_dtype(self) -> str:
        """What the cache is stored in unless asked otherwise: ``dtype``; DeepSeek-V4 has a layout of its own."""
        return "fp8_ds_mla" if self.compress_ratios else self.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the KV cache of one token of the whole model, nothing replicated, in ``kv_dtype``.

        Each further token adds as many, but in windowed layers and where tokens are compressed.
        """
        return self.kv_bytes(1)

    def kv_bytes(self, num_tokens: int, dtype: str | None = None) -> int:
        """Return bytes of the KV cache of one request of ``num_tokens``, nothing replicated.

        What does not grow (states of linear attention) is left out; ``kv_cache.request_bytes`` has all.

        Raises:
            ValueError: a dtype that does not exist or does not fit the model.
        """
        from crosstraffic.patterns.kv_cache import cache_bytes

        return cache_bytes(self, num_tokens, dtype or self.kv_dtype)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    from crosstraffic.patterns.config import model_from_config

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
