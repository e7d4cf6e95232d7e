"""Schedule of a pipeline: how much of it stands still, how many batches are under way, how long a token takes."""

from fractions import Fraction

from crosstraffic.patterns.pipeline_control import model_runner
from crosstraffic.patterns.setting import Setting


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be a whole number from 1: {value}")


def bubble(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> Fraction:
    """Return which part of a stage's time is idle while micro-batches pass once: (p - 1) / (v * m + p - 1).

    All stages take equally long, and transfers no time. The ``virtual_stages`` chunks of each stage shorten the time
    until the last stage has work, and multiply the messages between stages.

    >>> bubble(4, 8), bubble(4, 8, 2)
    (Fraction(3, 11), Fraction(3, 19))

    Raises:
        ValueError: a count below 1, or chunks on one stage, which Megatron-Core refuses.

    Source: GPipe (arXiv 1811.06965) section 2.3; interleaving: Megatron-LM (arXiv 2104.04473) section 2.2. They give
    the idle time over the busy one, (p - 1) / (v * m); this is the idle time over both.
    """
    _check(num_stages=num_stages, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
    if virtual_stages > 1 and num_stages == 1:
        raise ValueError(
            "pipeline-model-parallel size should be greater than 1 with interleaved schedule: "
            f"num_stages=1, virtual_stages={virtual_stages}"
        )
    return Fraction(num_stages - 1, virtual_stages * num_micro_batches + num_stages - 1)


def decode_utilisation(num_stages: int, num_batches: int) -> Fraction:
    """Return which part of a stage's time is busy in steady decoding, ``num_batches`` in flight: min(1, m / p).

    A batch needs its last token before the next one, so it keeps one stage busy at a time.

    >>> decode_utilisation(4, 2), decode_utilisation(4, 6)
    (Fraction(1, 2), Fraction(1, 1))

    Raises:
        ValueError: a count below 1.
    """
    _check(num_stages=num_stages, num_batches=num_batches)
    return min(Fraction(1), Fraction(num_batches, num_stages))


def token_time_s(num_stages: int, stage_s: float, transfer_s: float, *, num_batches: int = 1) -> float:
    """Return the least time of a request between two tokens, s: p * t_stage + (p - 1) * t_p2p.

    A request cannot come round faster than its token passes all stages. With more batches in flight than stages it
    waits for the others: then at least ``num_batches`` * t_stage.

    >>> token_time_s(4, 0.005, 0.001)
    0.023
    >>> token_time_s(4, 0.005, 0.0, num_batches=6)
    0.03

    Raises:
        ValueError: a count below 1, or a negative time.
    """
    _check(num_stages=num_stages, num_batches=num_batches)
    if stage_s < 0 or transfer_s < 0:
        raise ValueError(f"times must not be negative: stage_s {stage_s}, transfer_s {transfer_s}")
    return max(num_stages * stage_s + (num_stages - 1) * transfer_s, num_batches * stage_s)


def batches_in_flight(
    framework: str,
    num_stages: int,
    *,
    model_runner: str = "v1",
    asynchronous: bool = True,
    async_depth: int = 0,
) -> int:
    """Return how many batches an engine has under way at most.

    vLLM: as many as stages; with asynchronous scheduling one more in its second model runner, and two without a
    pipeline. SGLang: stages + ``async_depth`` (pp_async_batch_depth, 0 by default). TensorRT-LLM: one more than stages
    with its overlap scheduler (``asynchronous``). Megatron-Core's inference: one.

    >>> batches_in_flight("vllm", 4), batches_in_flight("vllm", 4, model_runner="v2"), batches_in_flight("megatron", 4)
    (4, 5, 1)

    Raises:
        ValueError: unknown framework or model runner, a count below 1, or a negative depth.

    Source: vLLM @ 017e9f4448b7 config/vllm.py max_concurrent_batches; SGLang @ 6ed5780c4fd3
    managers/scheduler_pp_mixin.py init_pp_loop_state; TensorRT-LLM _torch/pyexecutor/py_executor.py num_micro_batches;
    Megatron-LM @ d98e8a64ddf3 abstract_model_inference_wrapper.py forward_pass_with_pipeline_parallel.
    """
    _check(num_stages=num_stages)
    if async_depth < 0:
        raise ValueError(f"async_depth must not be negative: {async_depth}")
    if model_runner not in ("v1", "v2"):
        raise ValueError(f"unknown model runner: {model_runner!r}; allowed: v1, v2")
    one_more = num_stages + int(asynchronous)
    found = {
        "vllm": one_more if model_runner == "v2" or num_stages == 1 else num_stages,
        "sglang": num_stages + async_depth,
        "megatron": 1,
        "tensorrt_llm": one_more,
    }
    if framework not in found:
        raise ValueError(f"unknown framework: {framework!r}; allowed: {', '.join(found)}")
    return found[framework]


def num_messages(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> int:
    """Return how many messages cross boundaries while micro-batches pass once: m * (p * v - 1).

    >>> num_messages(4, 8), num_messages(4, 8, 2)
    (24, 56)
    """
    _check(num_stages=num_stages, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
    return num_micro_batches * (num_stages * virtual_stages - 1)


def schedule_note(setting: Setting) -> str | None:
    """Say how much of a pipeline stands still in the step; None without a pipeline."""
    num_stages, batches = setting.layout.pp, setting.workload.num_micro_batches
    if num_stages == 1:
        return None
    if setting.workload.phase == "prefill":
        idle = bubble(num_stages, batches, setting.workload.virtual_stages)
        what = f"{batches} micro-batch{'es' if batches > 1 else ''} in {num_stages} stages"
        return (
            f"{what}: a stage is idle {idle} of the time ({float(idle):.0%}) if stages take equally long (the bubble)"
        )
    busy = decode_utilisation(num_stages, batches)
    most = batches_in_flight(setting.framework, num_stages, model_runner=model_runner(setting))
    return (
        f"{batches} batch{'es' if batches > 1 else ''} in flight in {num_stages} stages: a stage is busy {busy} of the "
        f"time ({float(busy):.0%}) if stages take equally long; {setting.framework} has up to {most} in flight"
    )
