"""Combinations of degrees that take all of a number of GPUs, as each engine counts them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from crosstraffic.patterns.layout import Layout, check_framework, expert_tp
from crosstraffic.patterns.model import ModelShape


def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(one for one in range(1, number + 1) if number % one == 0)


def _vllm(num_gpus: int, shape: ModelShape, phase: str) -> Iterator[Layout]:
    """Experts are whole over dp x cp x tp, or cut over them; replicas that share none are servers of their own."""
    for replicas in divisors(num_gpus) if shape.moe_layers else (1,):
        each = num_gpus // replicas
        for tp in divisors(each):
            for pp in divisors(each // tp):
                for cp in divisors(each // tp // pp) if phase == "prefill" else (1,):
                    dp = each // tp // pp // cp
                    experts = {1, dp * cp * tp} if shape.moe_layers else {1}
                    for dcp in divisors(tp * cp) if phase == "decode" else (1,):
                        for ep in sorted(experts):
                            yield Layout(tp=tp, pp=pp, cp=cp, dp=dp, dcp=dcp, ep=ep, replicas=replicas)


def _megatron(num_gpus: int, shape: ModelShape, phase: str) -> Iterator[Layout]:
    for tp in divisors(num_gpus):
        for pp in divisors(num_gpus // tp):
            for cp in divisors(num_gpus // tp // pp) if phase == "prefill" else (1,):
                dense = Layout(tp=tp, pp=pp, cp=cp, dp=num_gpus // tp // pp // cp)
                if not shape.moe_layers:
                    yield dense
                    continue
                for ep in divisors(num_gpus // pp):
                    for etp in divisors(tp):
                        usual = etp == expert_tp(replace(dense, ep=ep), "megatron")
                        yield replace(dense, ep=ep, etp=None if usual else etp)


def _sglang(num_gpus: int, shape: ModelShape, phase: str) -> Iterator[Layout]:
    """Attention is cut over tp / (dp x cp); replicas are servers behind a router."""
    for replicas in divisors(num_gpus):
        for pp in divisors(num_gpus // replicas):
            tp = num_gpus // replicas // pp
            for cp in divisors(tp) if phase == "prefill" else (1,):
                for dp in divisors(tp // cp):
                    for dcp in divisors(tp // cp // dp) if phase == "decode" else (1,):
                        for ep in divisors(tp) if shape.moe_layers else (1,):
                            for moe_dp in sorted({1, cp}) if shape.moe_layers else (1,):
                                yield Layout(
                                    tp=tp, pp=pp, cp=cp, dp=dp, dcp=dcp, ep=ep, moe_dp=moe_dp, replicas=replicas
                                )


def _tensorrt_llm(num_gpus: int, shape: ModelShape, phase: str) -> Iterator[Layout]:
    for replicas in divisors(num_gpus):
        for tp in divisors(num_gpus // replicas):
            for pp in divisors(num_gpus // replicas // tp):
                cp = num_gpus // replicas // tp // pp
                if cp > 1 and phase == "decode":
                    continue
                for dp in sorted({1, tp}):
                    for ep in divisors(tp) if shape.moe_layers else (1,):
                        yield Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, replicas=replicas)


ENUMERATIONS: Mapping[str, Callable[[int, ModelShape, str], Iterator[Layout]]] = {
    "vllm": _vllm,
    "megatron": _megatron,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
}


def combinations(num_gpus: int, shape: ModelShape, phase: str, framework: str) -> Iterator[Layout]:
    """Yield every combination of degrees that takes all GPUs, whether or not the engine accepts it.

    Context parallelism cuts prompts, so it is varied in prefill; decode context parallelism in decode.

    Raises:
        ValueError: unknown framework.
    """
    check_framework(framework)
    yield from ENUMERATIONS[framework](num_gpus, shape, phase)
