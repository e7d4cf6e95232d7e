"""Encoder disaggregation: embeddings of images or audio move from encoder ranks to the ranks that prefill."""

from collections.abc import Sequence

from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.matrix import Sparse
from crosstraffic.patterns.model import ModelShape, dtype_bytes, dtype_name
from crosstraffic.patterns.reshard import make_pool
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.workload import Workload

_SOURCES = {
    "vllm": "vLLM @ 017e9f4448b7 distributed/ec_transfer",
    "sglang": "SGLang @ 6ed5780c4fd3 disaggregation/encode_server.py",
}


def embedding_bytes(num_tokens: int, hidden: int, dtype: str = "bfloat16", num_deepstack: int = 0) -> int:
    """Return the bytes of the embeddings of a request: N_mm * H_out * b * (1 + n_deepstack).

    ``num_deepstack`` is how many inner layers of the language model get embeddings of their own (Qwen3-VL: 3).

    >>> embedding_bytes(576, 4096), embedding_bytes(16_384, 3584)
    (4718592, 117440512)

    Raises:
        ValueError: negative numbers, or an unknown dtype.

    Source: SGLang @ 6ed5780c4fd3 disaggregation/encode_server.py (H_out * (1 + len(deepstack)) a token).
    """
    for name, value in (("num_tokens", num_tokens), ("hidden", hidden), ("num_deepstack", num_deepstack)):
        if value < 0:
            raise ValueError(f"{name} must not be negative: {value}")
    return num_tokens * hidden * dtype_bytes(dtype) * (1 + num_deepstack)


def encoder_handoff(
    *,
    encoder_ranks: Sequence[int],
    prefill_ranks: Sequence[int],
    ranks_per_replica: int,
    num_tokens: int,
    hidden: int,
    num_requests: int = 1,
    dtype: str = "bfloat16",
    num_deepstack: int = 0,
    framework: str = "vllm",
    through_first: bool = False,
) -> tuple[Stream, ...]:
    """Return the stream ``epd.embeddings``: requests of ``num_tokens`` embeddings, encoders and replicas in turn.

    Request i is encoded by encoder i mod E and prefilled by replica i mod R, whose ranks all read the embeddings: each
    tensor-parallel rank needs them whole. ``encoder_ranks`` are those that send, the first of each encoder (the others
    have the same output), ``prefill_ranks`` those of the first pipeline stage.

    With ``through_first`` (SGLang's zmq_to_tokenizer) one copy goes to the host of a replica's first rank, and with the
    request from there to the others: ``epd.broadcast``, a call for each request. Nothing is returned where nothing
    moves.

    Raises:
        ValueError: an engine without encoder disaggregation or without that way, ranks on both sides, or ranks that
            make no whole replicas.

    Source: SGLang @ 6ed5780c4fd3 disaggregation/encode_server.py _send, encode_receiver.py (receive_count = tp_size),
    server_args.py resolve_encoder_transfer_backend; vLLM @ 017e9f4448b7 distributed/ec_transfer/ec_connector/cpu/worker
    (one rank saves, every rank loads).
    """
    if framework not in _SOURCES:
        raise ValueError(f"{framework} has no encoder disaggregation described here; allowed: {', '.join(_SOURCES)}")
    if through_first and framework != "sglang":
        raise ValueError(f"embeddings go through the first rank of a replica in sglang only: {framework}")
    if ranks_per_replica < 1 or len(prefill_ranks) % ranks_per_replica or not prefill_ranks:
        raise ValueError(f"{len(prefill_ranks)} prefill ranks make no replicas of {ranks_per_replica}")
    if not encoder_ranks or len({*encoder_ranks, *prefill_ranks}) != len(encoder_ranks) + len(prefill_ranks):
        raise ValueError("there must be encoder ranks, and no rank twice or on both sides")
    if num_requests < 1:
        raise ValueError(f"num_requests must be a whole number from 1: {num_requests}")
    each = embedding_bytes(num_tokens, hidden, dtype, num_deepstack)
    if each == 0:
        return ()
    num_replicas = len(prefill_ranks) // ranks_per_replica
    cells: dict[tuple[int, int], int] = {}
    for request in range(num_requests):
        source = request % len(encoder_ranks)
        first = len(encoder_ranks) + request % num_replicas * ranks_per_replica
        for destination in range(first, first + (1 if through_first else ranks_per_replica)):
            cells[source, destination] = cells.get((source, destination), 0) + each
    sent = [sum(amount for (source, _), amount in cells.items() if source == one) for one in range(len(encoder_ranks))]
    replicas = tuple(
        tuple(prefill_ranks[first : first + ranks_per_replica])
        for first in range(0, len(prefill_ranks), ranks_per_replica)
    )[:num_requests]
    whole = "N_mm * H_out * b * (1 + n_deepstack)"
    embeddings = Stream(
        name="epd.embeddings",
        pattern="epd",
        op="kv_transfer",
        phase="handoff",
        groups=((*encoder_ranks, *prefill_ranks),),
        payload_bytes=max(sent),
        calls_per_step=1,
        dtype=dtype_name(dtype),
        formula=f"{whole} to {'the first' if through_first else 'each'} rank of a replica",
        source=_SOURCES[framework],
        rule=Sparse(cells=(tuple((*place, amount) for place, amount in sorted(cells.items())),)),
    )
    if not through_first or ranks_per_replica == 1:
        return (embeddings,)
    broadcast = Stream(
        name="epd.broadcast",
        pattern="epd",
        op="broadcast",
        phase="handoff",
        groups=replicas,
        payload_bytes=each,
        calls_per_step=-(-num_requests // num_replicas),
        dtype=dtype_name(dtype),
        formula=f"{whole} with each request, on the host",
        source="SGLang @ 6ed5780c4fd3 managers/scheduler_components/request_receiver.py",
        after=("epd.embeddings",),
    )
    return (embeddings, broadcast)


def encoder_streams(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    *,
    num_tokens: int,
    encoder_ranks: Sequence[int],
    prefill_ranks: Sequence[int],
    framework: str,
    prefill_instances: int = 1,
    through_first: bool = False,
) -> tuple[Stream, ...]:
    """Return what encoders send for the batch of a handoff, ``num_tokens`` embeddings of each request.

    ``prefill_ranks`` are the world ranks of the prefill pool, instance after instance in the order of ``layout``: those
    of the first pipeline stage of the replica that prefills a request get its embeddings, in ``workload.dtype``.

    Raises:
        ValueError: see ``encoder_handoff``; a model without an encoder, more embeddings than a request has tokens, or
            ranks that do not fit the layout.
    """
    if not shape.has_encoder:
        raise ValueError(f"{shape.name} has no encoder: no embeddings are handed over")
    most = -(-workload.num_tokens // workload.batch)
    if not 1 <= num_tokens <= most:
        raise ValueError(f"embeddings of a request must be from 1 to its {most} tokens: {num_tokens}")
    needed = prefill_instances * world_size(layout, framework)
    if len(prefill_ranks) != needed:
        raise ValueError(f"prefill: {layout} takes {needed} ranks, {len(prefill_ranks)} are given")
    pool = make_pool(shape, layout, framework, prefill_instances)
    first_stage = pool.ranks[:, pool.stage == 0]
    return encoder_handoff(
        encoder_ranks=encoder_ranks,
        prefill_ranks=[prefill_ranks[rank] for rank in first_stage.ravel().tolist()],
        ranks_per_replica=first_stage.shape[1],
        num_tokens=num_tokens,
        hidden=shape.hidden,
        num_requests=workload.batch * pool.num_replicas,
        dtype=workload.dtype or shape.dtype,
        num_deepstack=shape.num_deepstack,
        framework=framework,
        through_first=through_first,
    )
