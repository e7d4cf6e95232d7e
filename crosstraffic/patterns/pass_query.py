"""Pass-Q: a ring in which queries travel instead of keys and values, and partial outputs go back at the end."""

from typing import Literal

from crosstraffic.patterns.heads import Heads, rank_heads
from crosstraffic.patterns.matrix import Ring
from crosstraffic.patterns.setting import Calls, Order, Setting, make_stream
from crosstraffic.patterns.stream import Stream

LSE_BYTES = 4
_PAPER = "arXiv 2411.01783 @ v3, ring pass-Q attention (Yang et al., MLSys 2025)"


def hop_bytes(local_tokens: int, heads: Heads, element_bytes: int) -> int:
    """Return what one hop of pass-Q carries: the queries of a rank's new tokens, (T / P) * D * e.

    >>> hop_bytes(1_024, Heads(query_heads=16, kv_heads=1, key_dim=128, value_dim=128), 2)
    4194304
    """
    return local_tokens * heads.query_elements * element_bytes


def partial_bytes(local_tokens: int, heads: Heads, num_ranks: int, element_bytes: int) -> int:
    """Return what a rank has to give back: an output and a log-sum-exp of each head, for the tokens of all ranks.

    The all-to-all hands each rank its own tokens' partial outputs; (P - 1) / P of this is sent.

    >>> partial_bytes(1_024, Heads(query_heads=16, kv_heads=1, key_dim=128, value_dim=128), 4, 2)
    17039360
    """
    per_token = heads.output_elements * element_bytes + heads.query_heads * LSE_BYTES
    return num_ranks * local_tokens * per_token


def pass_kv_threshold(num_heads: int, num_kv_heads: int) -> float:
    """Return the share of new tokens, T / (T + P), from which on passing KV carries no more than passing Q.

    >>> pass_kv_threshold(128, 8)
    0.125

    Source: arXiv 2411.01783, T / (T + P) >= 2 * N_KV / N_H.
    """
    return 2 * num_kv_heads / num_heads


def choose_pass(num_new: int, num_cached: int, num_heads: int, num_kv_heads: int) -> Literal["pass_kv", "pass_q"]:
    """Return what travels with fewer bytes around the ring: keys and values of all tokens, or queries of the new ones.

    >>> choose_pass(16_000, 112_000, 128, 8), choose_pass(15_999, 112_001, 128, 8)
    ('pass_kv', 'pass_q')

    Source: arXiv 2411.01783, 2 * (T + P) * D * e * N_KV / N_H against T * D * e.
    """
    if min(num_new, num_heads, num_kv_heads) < 1 or num_cached < 0:
        raise ValueError(
            "new tokens and heads must be whole numbers from 1, cached tokens from 0: "
            f"{num_new} new, {num_cached} cached, {num_heads} heads, {num_kv_heads} KV heads"
        )
    return "pass_kv" if num_new * num_heads >= 2 * num_kv_heads * (num_new + num_cached) else "pass_q"


def pass_query_calls(num_ranks: int) -> Calls:
    """Return the calls of one layer: hops of the queries, then the outputs."""
    return (("cp.query_ring", num_ranks - 1), ("cp.partial_output", 1))


def pass_query_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return the ring of queries and the all-to-all of partial outputs; cached tokens stay where they are."""
    groups, heads = setting.groups["cp"], rank_heads(setting.shape, setting.tp)
    hop = hop_bytes(setting.local_tokens, heads, setting.element_bytes)
    return (
        *make_stream(
            setting,
            order,
            name="cp.query_ring",
            op="send_recv",
            groups=groups,
            payload_bytes=hop,
            formula="(T / P) * (Hq / TP) * d * b a hop, P - 1 hops a layer",
            source=_PAPER,
            rule=Ring(num_bytes=hop),
        ),
        *make_stream(
            setting,
            order,
            name="cp.partial_output",
            op="all_to_all",
            groups=groups,
            payload_bytes=partial_bytes(setting.local_tokens, heads, len(groups[0]), setting.element_bytes),
            formula="T * (Hq / TP) * (d * b + 4): outputs and log-sum-exps of all ranks' tokens",
            source=_PAPER,
        ),
    )
