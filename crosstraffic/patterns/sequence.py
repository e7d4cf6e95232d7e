"""Sequence parallelism in Megatron's sense: gather and scatter on the TP group in place of each all-reduce."""

from crosstraffic.patterns.all_reduce_call import architecture, tables
from crosstraffic.patterns.setting import Order, Setting, make_stream
from crosstraffic.patterns.stream import Op, Stream

_MEGATRON = "Megatron-LM @ d98e8a64ddf3 core/tensor_parallel/mappings.py"
_VLLM = "vLLM @ 017e9f4448b7 compilation/passes/fusion/sequence_parallelism.py"


def sequence_pass_tokens(hidden: int, element_bytes: int, tp: int, gpu: str) -> int | None:
    """Return from how many tokens on vLLM's pass turns all-reduces into scatter and gather; None: it never does.

    The hidden size must be 8192 or more, and the buffer 8 MiB (sm90) or 32 MiB (Blackwell) for each TP rank.

    >>> sequence_pass_tokens(8192, 2, 8, "H100"), sequence_pass_tokens(8192, 2, 8, "B200")
    (4096, 16384)
    >>> sequence_pass_tokens(4096, 2, 8, "H100") is None
    True

    Source: vLLM @ 017e9f4448b7 compilation/passes/fusion/sequence_parallelism.py get_sequence_parallelism_threshold.
    """
    arch = architecture(gpu)
    rule = tables()["vllm"]["sequence_parallelism"].get("sm100" if arch.startswith("sm10") else arch)
    if tp == 1 or rule is None or hidden < rule["min_hidden"]:
        return None
    least: int = rule["min_bytes_per_rank"] * tp // (hidden * element_bytes)
    return least


def sequence_pass_applies(hidden: int, num_tokens: int, element_bytes: int, tp: int, gpu: str = "H100") -> bool:
    """Tell whether vLLM's pass turns the all-reduces of a step into scatter and gather: see ``sequence_pass_tokens``.

    >>> sequence_pass_applies(8192, 8192, 2, 8), sequence_pass_applies(8192, 64, 2, 8)
    (True, False)
    """
    least = sequence_pass_tokens(hidden, element_bytes, tp, gpu)
    return least is not None and num_tokens >= least


def why_no_sequence_pass(hidden: int, num_tokens: int, element_bytes: int, tp: int, gpu: str = "H100") -> str | None:
    """Say why vLLM's pass leaves the all-reduces of a step as they are; None where it does not.

    >>> why_no_sequence_pass(8192, 64, 2, 8)
    'vLLM scatters and gathers from 4096 tokens on (tp=8, H100): 64 tokens keep all-reduces'
    """
    if tp == 1:
        return "Sequence Parallelism requires TP>1, disabling"
    least = sequence_pass_tokens(hidden, element_bytes, tp, gpu)
    if least is None:
        rule = tables()["vllm"]["sequence_parallelism"]
        known = ", ".join(f"{arch} from hidden size {row['min_hidden']}" for arch, row in rule.items())
        return f"vLLM's pass is for {known}: {gpu}, hidden size {hidden}"
    if num_tokens >= least:
        return None
    return f"vLLM scatters and gathers from {least} tokens on (tp={tp}, {gpu}): {num_tokens} tokens keep all-reduces"


def sequence_note(setting: Setting, gpu: str = "H100") -> str | None:
    """Say what vLLM would do by itself where a setting asks for sequence parallelism; None where it would do as asked.

    Its threshold is a heuristic: pass_config.sp_min_token_num overrides it, so streams are as asked.
    """
    if setting.framework != "vllm" or not setting.workload.sequence_parallel:
        return None
    return why_no_sequence_pass(setting.shape.hidden, setting.local_tokens, setting.element_bytes, setting.tp, gpu)


def sequence_streams(setting: Setting, order: Order) -> tuple[Stream, ...]:
    """Return what sequence parallelism makes of the all-reduces: gather and scatter of the same bytes, same group.

    A ring all-reduce is a scatter and a gather, so a layer has four calls for two and the same bytes on the wire.
    vLLM's pass leaves the last all-reduce of a pipeline stage, which no norm follows, as it is; here it is counted as
    the scatter at the end of that stage and the gather at the start of the next one.
    """
    is_vllm, formula = setting.framework == "vllm", "T * H * b, T padded to a multiple of TP"
    sources = {
        "all_gather": _VLLM if is_vllm else f"{_MEGATRON} _gather_along_first_dim",
        "reduce_scatter": _VLLM if is_vllm else f"{_MEGATRON} _reduce_scatter_along_first_dim",
    }
    calls: tuple[tuple[str, Op, str], ...] = (
        ("sp.all_gather", "all_gather", ""),
        ("sp.reduce_scatter", "reduce_scatter", ""),
        ("sp.embedding", "reduce_scatter", ""),
        ("sp.output", "all_gather", ": before the output layer"),
    )
    return tuple(
        stream
        for name, op, where in calls
        for stream in make_stream(
            setting,
            order,
            name=name,
            op=op,
            groups=setting.tensor_groups,
            payload_bytes=setting.hidden_bytes,
            formula=f"{formula}{where}",
            source=sources[op],
        )
    )
