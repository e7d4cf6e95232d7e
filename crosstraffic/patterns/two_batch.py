"""Two half batches in one step (vLLM's DBO, SGLang's TBO): one half computes while the other communicates."""

from collections.abc import Sequence
from dataclasses import replace

from crosstraffic.patterns.expert import backend, expert_path
from crosstraffic.patterns.setting import BOUNDARY, Order, Setting, held_tokens, step_tokens

DECODE_TOKENS = 32  # vLLM: dbo_decode_token_threshold
PREFILL_TOKENS = 512  # vLLM: dbo_prefill_token_threshold
_VLLM_BACKENDS = ("deepep_low_latency", "deepep_high_throughput")


def whole_streams(order: Order, framework: str) -> frozenset[str]:
    """Return the streams of the whole batch: what comes before and after what is split.

    vLLM splits the forward pass of a stage, the embedding included; SGLang its layers.
    """
    outside = {name for name, _ in (*order.receive, *order.last)} | {BOUNDARY}
    if framework == "sglang":
        return frozenset(outside | {name for name, _ in order.first})
    return frozenset(outside - {"sp.output"})


def split(setting: Setting) -> tuple[Setting, str | None]:
    """Return the setting of one half batch and what that means, or the same setting and why the step stays whole.

    Messages halve (the second half is the larger one), calls double. SGLang's dense layers in front of the first one
    with experts stay whole in its DeepSeek models; here all layers are split.

    Raises:
        ValueError: the engine has no half batches, or not with this backend, in its words.

    Source: vLLM @ 017e9f4448b7 config/vllm.py, v1/worker/dp_utils.py, v1/worker/ubatch_utils.py; SGLang
    @ 6ed5780c4fd3 server_args.py _check_two_batch_overlap, batch_overlap/two_batch_overlap.py.
    """
    workload, layout = setting.workload, setting.layout
    if not workload.two_batch:
        return setting, None
    _check(setting)
    tokens = step_tokens(setting.shape, workload, layout, setting.framework)
    if why := _why_whole(setting, tokens):
        return setting, f"off, the step is not split: {why}"
    if setting.framework == "vllm":
        tokens = (max(tokens),) * len(tokens)
    tp, framework = setting.tp, setting.framework
    held = tuple(held_tokens(workload, layout, tp, -(-count // 2), framework) for count in tokens)
    half = replace(setting, local_tokens=max(held), replica_tokens=held, num_batches=2)
    return half, (
        f"two half batches of up to {-(-max(tokens) // 2)} tokens: messages halve, calls double; all-reduces of one "
        "half may run beside dispatch and combine of the other, on two streams and two communicators"
    )


def _check(setting: Setting) -> None:
    """Raise ValueError where the engine refuses two half batches."""
    framework, chosen = setting.framework, backend(setting)
    if framework not in ("vllm", "sglang"):
        raise ValueError(
            f"{framework} does not run two half batches against each other: two_batch is vllm's or sglang's"
        )
    if not setting.shape.moe_layers:
        raise ValueError(f"two_batch hides the exchange of experts, and {setting.shape.name} has none")
    if framework == "vllm" and not chosen.startswith(_VLLM_BACKENDS):
        raise ValueError(
            "vLLM: Microbatching currently only supports the deepep_low_latency, deepep_high_throughput, and nixl_ep "
            f"all2all backends. {chosen} is not supported. (ep={setting.layout.ep})"
        )
    if framework == "sglang" and chosen == "allgather_reducescatter" and setting.layout.dp == 1:
        raise ValueError(
            "SGLang: When enabling two batch overlap without an EP a2a backend (moe_a2a_backend='none'), "
            f"--enable-dp-attention is required: {setting.layout}"
        )


def _why_whole(setting: Setting, tokens: Sequence[int]) -> str:
    """Say why an engine does not split this step though it is asked to; nothing if it does."""
    is_decode = setting.workload.phase == "decode"
    if setting.framework == "sglang":
        if expert_path(setting) == "all_to_all" and not is_decode and "low_latency" in backend(setting):
            return "SGLang does not split a prefill whose tokens go through low-latency dispatch"
        return ""
    if setting.layout.dp == 1:
        return "vLLM splits where data-parallel replicas agree on it: dp=1"
    threshold, option = (DECODE_TOKENS, "decode") if is_decode else (PREFILL_TOKENS, "prefill")
    if min(tokens) < threshold:
        return f"a replica has {min(tokens)} tokens, vLLM's dbo_{option}_token_threshold is {threshold}"
    if max(tokens) // 2 >= min(tokens):
        return f"the second half of a replica of {min(tokens)} tokens, padded to {max(tokens)}, would be empty"
    return ""
