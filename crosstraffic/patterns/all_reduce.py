"""All-reduce: which algorithm an engine runs for one call, by size, number of ranks and GPU.

>>> all_reduce_algorithm("vllm", "H100", 8, 2**20).algorithm
'symm_mem'
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crosstraffic.patterns import all_reduce_vllm as vllm
from crosstraffic.patterns.all_reduce_call import (
    ALIGNMENT,
    NCCL_CHOICE,
    Call,
    Step,
    Switches,
    architecture,
    nccl,
    tables,
)
from crosstraffic.patterns.model import dtype_bytes, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is run: the algorithm, its kernel (one_shot, two_shot, multimem ...), why this and none tried before it."""

    algorithm: str
    kernel: str
    why: str
    source: str


def all_reduce_algorithm(
    framework: str,
    gpu: str,
    num_ranks: int,
    num_bytes: int,
    *,
    group: str = "tp",
    dtype: str = "bfloat16",
    nvlink: bool | None = None,
    num_nodes: int = 1,
    multicast: bool | None = None,
    switches: Switches | None = None,
) -> Choice:
    """Return what an engine runs for an all-reduce of ``num_bytes`` (the buffer of one rank).

    ``nvlink``: all ranks see each other over NVLink or XGMI; by default as the GPU has it. ``multicast``: they lie in
    one NVLink domain with multicast; by default where there is NVLink and one node (NVL72: say True).

    >>> [all_reduce_algorithm("vllm", gpu, 8, 2**20).algorithm for gpu in ("H100", "A100", "MI300X")]
    ['symm_mem', 'custom_all_reduce', 'custom_all_reduce']

    Raises:
        ValueError: unknown framework, GPU or dtype, fewer than 2 ranks, or no bytes.
    """
    if framework not in ENGINES:
        raise ValueError(f"unknown framework: {framework!r}; allowed: {', '.join(ENGINES)}")
    for what, value, least in (("num_ranks", num_ranks, 2), ("num_bytes", num_bytes, 1), ("num_nodes", num_nodes, 1)):
        if value < least:
            raise ValueError(f"{what} must be a whole number from {least}: {value}")
    arch, name = architecture(gpu), dtype_name(dtype)
    if num_bytes % dtype_bytes(name):
        raise ValueError(f"num_bytes must be whole elements of {name}: {num_bytes}")
    has_nvlink = arch != "sm89" if nvlink is None else nvlink
    has_multicast = has_nvlink and num_nodes == 1 if multicast is None else multicast
    call = Call(
        arch=arch,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        group=group,
        dtype=name,
        nvlink=has_nvlink,
        multicast=has_multicast and arch not in ("sm80", "sm89") and not arch.startswith("gfx"),
        one_node=num_nodes == 1,
        switches=switches or Switches(),
    )
    passed: list[str] = []
    for algorithm, where, step in ENGINES[framework]:
        kernel, why = step(call)
        if kernel is not None:
            source = f"{tables()[framework]['source']} {where}"
            return Choice(algorithm=algorithm, kernel=kernel, why="; ".join([*passed, why]), source=source)
        if why:
            passed.append(f"not {algorithm}: {why}")
    raise AssertionError("NCCL takes every call")


def _sglang_other_group(call: Call) -> Step:
    if call.group == "tp":
        return None, ""
    return NCCL_CHOICE, f"group {call.group} is made with use_custom_allreduce=False"


def _sglang_nccl_symmetric(call: Call) -> Step:
    return (NCCL_CHOICE, "--enable-symm-mem") if call.switches.nccl_symmetric else (None, "")


def _sglang_custom(call: Call) -> Step:
    table, size = tables()["sglang"], call.num_bytes
    if call.is_amd:
        raise ValueError(f"SGLang's all-reduces on AMD GPUs are AITER's, and not described: {call.arch}")
    if not call.switches.custom:
        return None, "off"
    if not (call.one_node or call.multicast) or size % ALIGNMENT:
        return None, "the group spans NVLink domains" if size % ALIGNMENT == 0 else f"{size} bytes: not whole 16 bytes"
    if not call.nvlink:  # the older kernel, for two ranks
        most: int = tables()["vllm"]["custom"]["max_bytes"]
        is_taken = call.num_ranks == 2 and size <= most
        return "one_shot" if is_taken else None, f"without NVLink for two ranks, up to {most} bytes: {size}"
    tuned = table.get("sm100" if call.arch.startswith("sm10") else call.arch)
    row = (
        table["other"] if tuned is None else tuned["graph" if call.switches.graph else "eager"].get(str(call.num_ranks))
    )
    if row is None or call.num_ranks > 16:
        return None, f"not tuned for {call.num_ranks} ranks on {call.arch}"
    push, pull, two_shot, *multicast = (min(bound, table["workspace_bytes"]) for bound in row)
    if size <= pull:
        return "one_shot", f"{size} bytes are within {pull} ({'push' if size <= push else 'pull'})"
    is_multicast = bool(multicast) and call.multicast and tuned is not None and call.num_ranks in tuned["multicast"]
    if is_multicast and multicast[0] <= size <= multicast[1]:
        return "multimem", f"{size} bytes are from {multicast[0]} to {multicast[1]}"
    return "two_shot" if size <= two_shot else None, f"{size} bytes, two_shot up to {two_shot}"


def _sglang_symm_mem(call: Call) -> Step:
    table = tables()["sglang"]["symm_mem"]
    family = "sm100" if call.arch.startswith("sm10") else call.arch
    most = table["max_bytes"].get(family, {}).get(str(call.num_ranks))
    if not call.switches.symm_mem or most is None or not call.multicast:
        return None, ""
    if call.dtype != "bfloat16" or call.num_bytes % 4 or call.num_bytes >= most:
        return None, f"bfloat16 below {most} bytes only: {call.dtype}, {call.num_bytes}"
    return "multimem" if call.num_ranks in table["multimem"] else "two_shot", f"{call.num_bytes} bytes are below {most}"


def _megatron_fused(call: Call) -> Step:
    note = "in inference with sequence parallelism: one kernel scatters, adds, norms and gathers on NVLS"
    if not call.switches.fused_norm:
        return None, ""
    if call.dtype != "bfloat16" or not call.multicast or call.num_bytes % (ALIGNMENT * call.num_ranks):
        return None, f"{note}; needs bfloat16, multicast and whole 16 bytes a rank"
    return "multimem", note


def _tensorrt_llm_low_precision(call: Call) -> Step:
    if not call.switches.low_precision:
        return None, ""
    least: int = tables()["tensorrt_llm"]["low_precision_min_elements"]
    elements = call.num_bytes // dtype_bytes(call.dtype)
    if call.nvlink or not call.one_node or elements < least:
        return None, f"needs peers on PCIe without NVLink, and {least} elements: {elements}"
    return "low_precision", f"{elements} elements are at least {least}, no NVLink"


def _tensorrt_llm_one_two_shot(call: Call) -> Step:
    bounds = tables()["tensorrt_llm"]["workspace_bytes"]
    most: int = bounds["2" if call.num_ranks <= 2 else "more"]
    if not call.nvlink or not call.one_node:
        return None, "no NVLink between all peers"
    if call.num_ranks not in (2, 4, 8):
        return None, f"no measured table for {call.num_ranks} ranks"
    if call.num_bytes > most:
        return None, f"{call.num_bytes} bytes are more than {most}"
    return "one_shot, two_shot or NCCL symmetric", f"{call.num_bytes} bytes are within {most}: a measured table decides"


Engine = tuple[tuple[str, str, Callable[[Call], Step]], ...]
_COMM = "distributed/device_communicators/"
# What an engine tries, in its order: the algorithm, where that is written, and whether it takes a call.
ENGINES: Mapping[str, Engine] = {
    "vllm": (
        ("flashinfer_fused", "compilation/passes/fusion/allreduce_rms_fusion.py", vllm.fused),
        ("nccl_symmetric", f"{_COMM}all_reduce_utils.py should_nccl_symm_mem_allreduce", vllm.nccl_symmetric),
        ("quick_reduce", f"{_COMM}quick_all_reduce.py should_quick_allreduce", vllm.quick_reduce),
        ("flashinfer", f"{_COMM}flashinfer_all_reduce.py should_use_fi_ar", vllm.flashinfer),
        ("aiter", f"{_COMM}aiter_custom_all_reduce.py", vllm.aiter),
        ("custom_all_reduce", f"{_COMM}custom_all_reduce.py should_custom_ar", vllm.custom),
        ("symm_mem", f"{_COMM}symm_mem.py should_use_symm_mem", vllm.symm_mem),
        ("nccl", f"{_COMM}cuda_communicator.py all_reduce", nccl),
    ),
    "sglang": (
        ("nccl", "distributed/parallel_state.py initialize_model_parallel", _sglang_other_group),
        ("nccl_symmetric", "distributed/parallel_state.py all_reduce", _sglang_nccl_symmetric),
        ("custom_all_reduce", f"{_COMM}configs/custom_all_reduce_v2.py", _sglang_custom),
        ("symm_mem", f"{_COMM}torch_symm_mem.py", _sglang_symm_mem),
        ("nccl", "distributed/parallel_state.py _all_reduce_in_place", nccl),
    ),
    "megatron": (
        ("nvls_fused", "core/tensor_parallel/inference_layers.py _matmul_reduce_scatter", _megatron_fused),
        ("nccl", "core/tensor_parallel/mappings.py _reduce", nccl),
    ),
    "tensorrt_llm": (
        ("low_precision", "cpp/tensorrt_llm/thop/allreduceOp.cpp isUsingLowPrecision", _tensorrt_llm_low_precision),
        ("one_or_two_shot", "cpp/tensorrt_llm/thop/allreduceOp.cpp selectImplementation", _tensorrt_llm_one_two_shot),
        ("nccl", "cpp/tensorrt_llm/thop/allreduceOp.cpp ifFallbackToNCCL", nccl),
    ),
}
