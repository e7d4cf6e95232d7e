"""Cutting prompts over context-parallel ranks so that causal attention is even: who holds which tokens, how many rows.

Two chunks a rank, one early and one late ("dual chunk", "zig-zag"): a prompt is cut into 2 x P chunks, and rank r holds
chunks r and 2 x P - 1 - r. Engines differ in what they do with a prompt that does not divide.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Cut = Literal["padded", "ceil", "even", "contiguous"]

# How an engine cuts a prompt that 2 x P does not divide.
CUTS: Mapping[str, Cut] = {"megatron": "padded", "vllm": "ceil", "sglang": "even", "tensorrt_llm": "contiguous"}


def chunks_of(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the two chunks, of 2 x num_ranks, that a rank holds.

    >>> [chunks_of(rank, 4) for rank in range(4)]
    [(0, 7), (1, 6), (2, 5), (3, 4)]

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py get_seq_chunk_ids_for_reordering_before_attn; vLLM
    @ 017e9f4448b7 v1/worker/gpu/pcp_manager.py PCPManager; SGLang @ 6ed5780c4fd3 srt/layers/cp/zigzag.py.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank must be from 0 to {num_ranks - 1}: {rank}")
    return rank, 2 * num_ranks - 1 - rank


def padded_tokens(num_tokens: int, num_ranks: int) -> int:
    """Return the tokens of a prompt padded to a multiple of 2 x num_ranks, so that all chunks are equal.

    >>> padded_tokens(17, 4), padded_tokens(16, 4)
    (24, 16)

    Source: TransformerEngine @ d0067d0da6cb context_parallel.py attn_forward_func_with_cp (cu_seqlens divisible by
    2 x cp_size) and pad_thd_sequences_for_cp.
    """
    return -(-num_tokens // (2 * num_ranks)) * 2 * num_ranks


def check_length(num_tokens: int, num_ranks: int) -> None:
    """Raise ValueError for a prompt that is too short to give each rank two chunks."""
    if num_tokens < 2 * num_ranks:
        raise ValueError(
            "zig-zag context parallelism gives each rank two chunks of every prompt: a prompt of "
            f"{num_tokens} tokens is shorter than 2 x cp = {2 * num_ranks}"
        )


def chunk_sizes(num_tokens: int, num_ranks: int, cut: Cut = "ceil") -> tuple[int, ...]:
    """Return the tokens of each of the 2 x num_ranks chunks of one prompt.

    ceil: chunks of ceil(S / 2P), the last ones shorter or empty (vLLM). padded: as ceil, and padding fills the prompt
    up (TransformerEngine). even: sizes differ by at most one, the first ones larger (SGLang). contiguous: two
    consecutive chunks make up ceil(S / P) tokens a rank, padding included (TensorRT-LLM, which has no zig-zag).

    >>> chunk_sizes(9, 2, "ceil"), chunk_sizes(9, 2, "even"), chunk_sizes(9, 2, "padded")
    ((3, 3, 3, 0), (3, 2, 2, 2), (3, 3, 3, 3))

    Source: vLLM @ 017e9f4448b7 v1/worker/gpu/pcp_manager.py _get_rank_segments; SGLang @ 6ed5780c4fd3
    srt/layers/cp/zigzag.py build_metadata; TensorRT-LLM cpp/tensorrt_llm/common/attentionOp.cpp
    ulyssesContextPreprocess.
    """
    num_chunks = 2 * num_ranks
    if cut == "even":
        least, rest = divmod(num_tokens, num_chunks)
        return tuple(least + int(chunk < rest) for chunk in range(num_chunks))
    if cut == "contiguous":
        share = -(-num_tokens // num_ranks)
        return (share - share // 2, share // 2) * num_ranks
    size = -(-num_tokens // num_chunks)
    if cut == "padded":
        return (size,) * num_chunks
    return tuple(min(size, max(0, num_tokens - chunk * size)) for chunk in range(num_chunks))


def token_ranks(num_tokens: int, num_ranks: int, cut: Cut = "ceil") -> npt.NDArray[np.int64]:
    """Return the rank of each token of one prompt, ``[num_tokens]``.

    >>> token_ranks(9, 2).tolist(), token_ranks(4, 2, "contiguous").tolist()
    ([0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1])
    """
    sizes = chunk_sizes(num_tokens, num_ranks, cut)
    chunk = np.repeat(np.arange(2 * num_ranks, dtype=np.int64), sizes)[:num_tokens]
    if cut == "contiguous":
        return np.asarray(chunk // 2)
    return np.asarray(np.minimum(chunk, 2 * num_ranks - 1 - chunk))


def rank_tokens(lengths: Sequence[int], num_ranks: int, cut: Cut = "ceil") -> tuple[int, ...]:
    """Return the tokens that each rank holds of prompts of these lengths, padding of single prompts included.

    >>> rank_tokens((9, 8), 2), rank_tokens((9, 8), 2, "padded")
    ((7, 10), (10, 10))
    """
    total = np.zeros(num_ranks, dtype=np.int64)
    for length, num_requests in Counter(lengths).items():
        sizes = np.array(chunk_sizes(length, num_ranks, cut), dtype=np.int64)
        halves = sizes.reshape(num_ranks, 2).T if cut == "contiguous" else (sizes[:num_ranks], sizes[num_ranks:][::-1])
        total += num_requests * (halves[0] + halves[1])
    return tuple(total.tolist())


def request_lengths(num_tokens: int, num_requests: int) -> tuple[int, ...]:
    """Return the lengths of requests, as even as possible, that have ``num_tokens`` together; none is empty.

    >>> request_lengths(10, 3), request_lengths(2, 3)
    ((4, 3, 3), (1, 1))
    """
    num_requests = min(num_tokens, num_requests)
    if num_requests == 0:
        return ()
    least, rest = divmod(num_tokens, num_requests)
    return (least + 1,) * rest + (least,) * (num_requests - rest)


def local_rows(num_tokens: int, num_requests: int, num_ranks: int, framework: str) -> int:
    """Return the rows that every rank holds of a batch: those of the fullest rank, to which the others are padded.

    One rank: all tokens, nothing is padded.

    >>> local_rows(16_384, 1, 4, "vllm"), local_rows(17, 1, 4, "megatron"), local_rows(17, 1, 4, "sglang")
    (4096, 6, 5)
    """
    if num_ranks == 1:
        return num_tokens
    return max(rank_tokens(request_lengths(num_tokens, num_requests), num_ranks, CUTS[framework]))


def attention_pairs(num_tokens: int, num_ranks: int, cut: Cut = "ceil", *, num_cached: int = 0) -> tuple[int, ...]:
    """Return the (query, key) pairs of causal attention that each rank computes: a measure of its FLOPs.

    A token at position i of the prompt sees what was cached, and tokens 0 to i. Equal on all ranks where 2 x P divides
    the prompt: chunks r and 2P - 1 - r are as far from the middle as any other pair.

    >>> attention_pairs(8, 2), attention_pairs(8, 2, "contiguous")
    ((18, 18), (10, 26))
    """
    pairs = np.zeros(num_ranks, dtype=np.int64)
    seen = num_cached + 1 + np.arange(num_tokens, dtype=np.int64)
    np.add.at(pairs, token_ranks(num_tokens, num_ranks, cut), seen)
    return tuple(pairs.tolist())
