"""What one token has in attention on one tensor-parallel rank: query, key, value and output heads and their sizes."""

from dataclasses import dataclass

from crosstraffic.patterns.model import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads of one rank as attention computes them: latent attention (MLA) with its keys and values expanded."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def query_elements(self) -> int:
        """Elements of a token's query; a query is as long as a key."""
        return self.query_heads * self.key_dim

    @property
    def key_elements(self) -> int:
        """Elements of a token's keys."""
        return self.kv_heads * self.key_dim

    @property
    def value_elements(self) -> int:
        """Elements of a token's values."""
        return self.kv_heads * self.value_dim

    @property
    def kv_elements(self) -> int:
        """Elements of a token's keys and values: 2 * K' * d with grouped queries."""
        return self.key_elements + self.value_elements

    @property
    def output_elements(self) -> int:
        """Elements of a token's attention output."""
        return self.query_heads * self.value_dim


def rank_heads(shape: ModelShape, tp: int) -> Heads:
    """Return the heads of one of ``tp`` ranks: Hq / TP and K / TP, at least one KV head (then replicated).

    >>> from crosstraffic.patterns.model import load_model
    >>> heads = rank_heads(load_model("Llama-3.1-405B"), 16)
    >>> heads.query_heads, heads.kv_heads, heads.kv_elements
    (8, 1, 256)

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py (K and V as attention gets them); Megatron-LM
    @ d98e8a64ddf3 core/transformer/multi_latent_attention.py (MLA expands: one key and value per query head).
    """
    query_heads = shape.num_heads // tp
    if shape.mla is not None:
        key_dim = shape.mla.qk_nope_head_dim + shape.mla.qk_rope_head_dim
        return Heads(query_heads=query_heads, kv_heads=query_heads, key_dim=key_dim, value_dim=shape.mla.v_head_dim)
    kv_heads = max(1, shape.num_kv_heads // tp)
    return Heads(query_heads=query_heads, kv_heads=kv_heads, key_dim=shape.head_dim, value_dim=shape.head_dim)
