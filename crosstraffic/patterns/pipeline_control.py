"""Small messages of a pipeline: what is announced before each transfer, and sampled tokens on their way back."""

from collections.abc import Callable, Mapping

from crosstraffic.patterns.matrix import Chain, Ring
from crosstraffic.patterns.pipeline import SOURCES, last_stage_first, sent_tensors
from crosstraffic.patterns.setting import Setting, make_control
from crosstraffic.patterns.stream import Stream

SIZE_BYTES = 8  # int64 length of the pickled description of what follows
DESCRIPTION_BYTES = (
    103,
    37,
)  # of the pickled list, and of each tensor in it: names, dtype, shape; a few bytes more or less
# Families that run on vLLM's second model runner where nothing else is said.
SECOND_RUNNER: tuple[str, ...] = ("deepseek-v2", "deepseek-v4", "granite", "inkling", "kimi-k3", "longcat", "qwen2-moe")
_VLLM = "vLLM @ 017e9f4448b7"
_SGLANG = "SGLang @ 6ed5780c4fd3"


def model_runner(setting: Setting) -> str:
    """Return vLLM's model runner: as asked, else the second one for the families that it is the default for.

    Source: vLLM @ 017e9f4448b7 config/vllm.py DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, use_v2_model_runner.
    """
    if setting.workload.model_runner is not None:
        return setting.workload.model_runner
    is_second = any(family in setting.shape.name.lower() for family in SECOND_RUNNER)
    return "v2" if is_second and not setting.workload.sequence_parallel else "v1"


def _metadata(setting: Setting) -> tuple[Stream, ...]:
    """Return what goes over the host before each transfer: a length, and that many bytes of a pickled list."""
    fixed, each = DESCRIPTION_BYTES
    described = fixed + each * len(sent_tensors(setting))
    sizes = {"pp.metadata_size": SIZE_BYTES, "pp.metadata": described}
    return tuple(
        stream
        for name, num_bytes in sizes.items()
        for stream in make_control(
            setting,
            name=name,
            op="send_recv",
            groups=setting.groups["pp"],
            payload_bytes=num_bytes,
            formula="8 bytes: the length of the list that follows; Gloo on the host"
            if name == "pp.metadata_size"
            else f"about {fixed} + {each} bytes a tensor: pickled keys, dtypes and shapes; Gloo on the host",
            source=f"{SOURCES[setting.framework]} send_object",
            dtype="int64" if name == "pp.metadata_size" else "uint8",
            calls=setting.boundary_calls,
            rule=Chain(num_bytes=num_bytes),
        )
    )


def _vllm_control(setting: Setting) -> tuple[Stream, ...]:
    """Return sampled tokens for all stages, as asynchronous scheduling sends them.

    Without it, and with drafts in the first model runner, they come by way of the scheduler.
    """
    requests, drafts = setting.workload.pass_requests, setting.workload.num_speculative
    sent = [("pp.token_ids", 4 * requests, "4 * B: int32 [B, 1]", "int32", "v1/worker/gpu_model_runner.py")]
    if model_runner(setting) == "v2":
        file = "v1/worker/gpu/pp_utils.py PPHandler, on a communicator and a stream of their own"
        sent = [
            ("pp.token_ids", 8 * requests * (1 + drafts), "8 * B * (1 + drafts): int64", "int64", file),
            ("pp.token_counts", 4 * 2 * requests, "4 * 2 * B: int32, sampled and rejected", "int32", file),
        ]
    elif drafts:
        sent = []
    return (
        *_metadata(setting),
        *(
            stream
            for name, num_bytes, formula, dtype, file in sent
            for stream in make_control(
                setting,
                name=name,
                op="broadcast",
                groups=last_stage_first(setting),
                payload_bytes=num_bytes,
                formula=f"{formula}, from the last stage",
                source=f"{_VLLM} {file}",
                dtype=dtype,
                calls=setting.num_passes,
            )
        ),
    )


def _sglang_control(setting: Setting) -> tuple[Stream, ...]:
    """Return sampled tokens, from the last stage to the first and on from stage to stage, sliced as all tensors are."""
    requests = setting.workload.pass_requests
    is_sliced = setting.tp > 1 and requests % setting.tp == 0
    num_bytes = 4 * requests // (setting.tp if is_sliced else 1)
    source = f"{_SGLANG} managers/scheduler_pp_mixin.py _pp_send_output_to_next_stage"
    ids = make_control(
        setting,
        name="pp.token_ids",
        op="send_recv",
        groups=setting.groups["pp"],
        payload_bytes=num_bytes,
        formula=f"4 * B{' / TP' if is_sliced else ''} around the stages: int32 (int64 where all are greedy)",
        source=source,
        dtype="int32",
        calls=setting.num_passes,
        rule=Ring(num_bytes=num_bytes),
    )
    gather = make_control(
        setting,
        name="pp.token_ids_gather",
        op="all_gather",
        groups=setting.tensor_groups,
        payload_bytes=4 * requests,
        formula="4 * B",
        source=source,
        dtype="int32",
        calls=setting.num_passes,
    )
    return (*_metadata(setting), *ids, *(gather if is_sliced else ()))


CONTROL: Mapping[str, Callable[[Setting], tuple[Stream, ...]]] = {"vllm": _vllm_control, "sglang": _sglang_control}


def pipeline_control(setting: Setting) -> tuple[Stream, ...]:
    """Return the small messages of a pipeline: what each send announces, and sampled tokens on their way back.

    Megatron-Core announces nothing (shapes are known) and broadcasts logits, which are no small message; what
    TensorRT-LLM's stages tell each other is not described.
    """
    make = CONTROL.get(setting.framework)
    return make(setting) if make and setting.layout.pp > 1 else ()
