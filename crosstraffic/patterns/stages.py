"""Stages: which layers of a model lie on which stage of a pipeline."""

from collections.abc import Callable, Mapping
from itertools import accumulate

from crosstraffic.patterns.layout import Layout

# Which stage gets the next layer of those that do not divide: of pp stages, the n-th layer left over (from 0).
LEFT_OVER: Mapping[str, Callable[[int, int], int]] = {
    "vllm": lambda pp, extra: pp - 2 - extra,
    "sglang": lambda pp, extra: pp - 1 - extra,
    "tensorrt_llm": lambda pp, extra: extra,
}


def check_virtual(virtual_stages: int, pp: int, framework: str) -> None:
    """Raise ValueError, with the engine's rule, for chunks of layers that an engine does not interleave.

    Source: Megatron-LM @ d98e8a64ddf3 core/parallel_state.py initialize_model_parallel.
    """
    if virtual_stages == 1:
        return
    if framework != "megatron":
        raise ValueError(
            f"{framework} does not interleave chunks of layers (virtual_stages={virtual_stages}): megatron does"
        )
    if pp == 1:
        raise ValueError(
            "pipeline-model-parallel size should be greater than 1 with interleaved schedule: "
            f"pp={pp}, virtual_stages={virtual_stages}"
        )


def model_chunks(
    num_layers: int,
    layout: Layout,
    framework: str,
    *,
    virtual_stages: int = 1,
    partition: tuple[int, ...] = (),
) -> tuple[range, ...]:
    """Return the layers of each chunk of a model, in the order in which tokens pass; chunk i is on stage i % pp.

    vLLM gives what does not divide to the later stages but the last one, SGLang to the last ones, TensorRT-LLM to the
    first ones; Megatron-Core refuses it. ``partition`` names the layers of each stage (VLLM_PP_LAYER_PARTITION,
    SGLANG_PP_LAYER_PARTITION, TensorRT-LLM's pp_partition).

    Several chunks a stage are Megatron-Core's interleaved schedule of forward passes; its inference engine has one.

    >>> [len(chunk) for chunk in model_chunks(61, Layout(pp=4), "vllm")]
    [15, 15, 16, 15]
    >>> model_chunks(8, Layout(pp=2), "megatron", virtual_stages=2)
    (range(0, 2), range(2, 4), range(4, 6), range(6, 8))

    Raises:
        ValueError: more stages than layers, a partition that does not fit, or chunks that the engine does not make.

    Source: vLLM @ 017e9f4448b7 distributed/utils.py get_pp_indices; SGLang @ 6ed5780c4fd3 distributed/utils.py
    get_pp_indices; TensorRT-LLM mapping.py pp_layers; Megatron-LM @ d98e8a64ddf3 core/parallel_state.py.
    """
    pp = layout.pp
    check_virtual(virtual_stages, pp, framework)
    count = pp * virtual_stages
    if count > num_layers:
        raise ValueError(f"more pipeline stages ({count}) than layers ({num_layers})")
    if partition:
        sizes = _partition(num_layers, pp, framework, partition)
    else:
        sizes, rest = [num_layers // count] * count, num_layers % count
        if rest and framework == "megatron":
            chunks = f" x {virtual_stages} chunks of layers" if virtual_stages > 1 else ""
            raise ValueError(
                f"Number of layers should be divisible by the pipeline-model-parallel size: {num_layers} layers, "
                f"pp={pp}{chunks}"
            )
        for extra in range(rest):
            sizes[LEFT_OVER[framework](pp, extra)] += 1
    return tuple(range(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))


def _partition(num_layers: int, pp: int, framework: str, partition: tuple[int, ...]) -> list[int]:
    if framework == "megatron":
        raise ValueError(f"Megatron-Core takes a layout string instead of a partition of layers: {partition}")
    if len(partition) != pp:
        raise ValueError(f"len(partitions)={len(partition)} does not match pp_size={pp}.")
    if sum(partition) != num_layers:
        raise ValueError(f"sum(partitions)={sum(partition)} does not match num_hidden_layers={num_layers}.")
    if min(partition) < 1:
        raise ValueError(f"a stage needs a layer: {partition}")
    return list(partition)


def stage_layers(num_layers: int, layout: Layout, framework: str) -> tuple[range, ...]:
    """Return the layers of each pipeline stage as the engine cuts them by itself: see ``model_chunks``."""
    return model_chunks(num_layers, layout, framework)


def interleaved_stages(chunks: tuple[range, ...], pp: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each pipeline stage, chunk after chunk.

    >>> interleaved_stages((range(0, 2), range(2, 4), range(4, 6), range(6, 8)), 2)
    ((0, 1, 4, 5), (2, 3, 6, 7))
    """
    return tuple(tuple(layer for chunk in chunks[stage::pp] for layer in chunk) for stage in range(pp))
