"""How many parameters each layer has, and how many of them lie on a rank. Norms and biases are left out."""

from dataclasses import dataclass

from crosstraffic.patterns.layout import Layout, expert_tp
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.placement import attention_tp, stage_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer: ``attention``, ``dense`` MLP, ``shared`` experts, ``router``, routed ``experts``.

    ``replicated`` is the part of attention that tensor parallelism does not cut (latent down-projections).
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


def expert_parameters(shape: ModelShape) -> int:
    """Return parameters of one routed expert: gate, up and down projection."""
    return 3 * shape.expert_row * shape.moe_intermediate


def layer_parameters(shape: ModelShape, layer: int) -> LayerParameters:
    """Return the parameters of one layer."""
    is_moe = layer in shape.moe_layers
    heads, hidden, mla, replicated = shape.num_heads, shape.hidden, shape.mla, 0
    if mla is not None:
        query = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        replicated = hidden * (mla.latent_dim + (mla.q_lora_rank or 0))
        attention = replicated + (mla.q_lora_rank or hidden) * heads * query
        attention += (
            mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim) + heads * mla.v_head_dim * hidden
        )
    else:
        attention = 2 * hidden * shape.head_dim * (heads + shape.num_kv_heads)
    shared = 3 * hidden * (shape.shared_intermediate or shape.num_shared_experts * shape.moe_intermediate)
    return LayerParameters(
        attention=attention,
        replicated=replicated,
        dense=0 if is_moe else 3 * hidden * shape.intermediate,
        shared=shared if is_moe else 0,
        router=hidden * shape.num_experts if is_moe else 0,
        experts=shape.num_experts * expert_parameters(shape) if is_moe else 0,
    )


def rank_parameters(
    shape: ModelShape, layout: Layout, framework: str = "vllm", redundant_experts: int = 0
) -> RankParameters:
    """Return the parameters of the fullest rank."""
    tp = attention_tp(layout, framework)
    experts = -(-(shape.num_experts + redundant_experts) // layout.ep)
    one_expert = -(-expert_parameters(shape) // expert_tp(layout, framework))
    table = -(-shape.vocab // tp) * shape.hidden
    kv_copies = max(1, tp // shape.num_kv_heads) if shape.mla is None else 1
    found = []
    stages = stage_layers(shape.num_layers, layout, framework)
    for stage, layers in enumerate(stages):
        parts = [layer_parameters(shape, layer) for layer in layers]
        kv = 2 * shape.hidden * shape.head_dim * shape.num_kv_heads if shape.mla is None else 0
        ends = [table] * (stage == 0) + [table] * (stage == len(stages) - 1)
        found.append(
            RankParameters(
                stage=stage,
                attention=sum(
                    part.replicated + (part.attention - part.replicated + kv * (kv_copies - 1)) // tp for part in parts
                ),
                dense=sum(part.dense // tp for part in parts),
                shared=sum(part.shared // tp for part in parts),
                router=sum(part.router for part in parts),
                experts=sum(experts * one_expert for part in parts if part.experts),
                embeddings=table if shape.tied_embeddings and ends else sum(ends),
            )
        )
    return max(found, key=lambda rank: rank.total)
