"""What vLLM tries for an all-reduce, one function an algorithm: the kernel if it takes the call, and why or why not.

Source: vLLM @ 017e9f4448b7 distributed/device_communicators/cuda_communicator.py all_reduce, and the files named in
``all_reduce.ENGINES``.
"""

from crosstraffic.patterns.all_reduce_call import ALIGNMENT, NCCL_CHOICE, Call, Step, tables


def fused(call: Call) -> Step:
    if not call.switches.fused_norm:
        return None, ""
    return _flashinfer(call)


def flashinfer(call: Call) -> Step:
    return _flashinfer(call) if call.switches.flashinfer else (None, "")


def _flashinfer(call: Call) -> Step:
    most = tables()["vllm"]["flashinfer"].get(call.arch, {}).get(str(call.num_ranks))
    if call.group != "tp":
        return None, f"for the group tp only, not {call.group}"
    if most is None:
        return None, f"no bound for {call.num_ranks} ranks on {call.arch}"
    if call.num_bytes > most:
        return None, f"{call.num_bytes} bytes are more than {most}"
    return "one_shot or two_shot", f"{call.num_bytes} bytes are within {most}"


def nccl_symmetric(call: Call) -> Step:
    if not call.switches.nccl_symmetric or call.is_amd:
        return None, ""
    table = tables()["vllm"]["nccl_symmetric"]
    between = table["not_between"].get(str(call.num_ranks))
    if between is None:
        above: int = table["above_ranks"]
        return (
            (NCCL_CHOICE, f"more than {above} ranks") if call.num_ranks > above else (None, f"{call.num_ranks} ranks")
        )
    low, high = between
    if low < call.num_bytes < high:
        return None, f"{call.num_bytes} bytes lie between {low} and {high}"
    return NCCL_CHOICE, f"{call.num_bytes} bytes are not between {low} and {high}"


def quick_reduce_min_bytes(num_ranks: int, quick_format: str, dtype: str = "float16") -> int:
    """Return the fewest bytes that vLLM gives to QuickReduce; ``dtype`` is what its kernel works in.

    >>> quick_reduce_min_bytes(8, "int4") // 2**20, quick_reduce_min_bytes(8, "int4", "bfloat16") // 2**20
    (2, 2048)

    Raises:
        ValueError: a format, number of ranks or dtype that QuickReduce does not have.
    """
    table = tables()["vllm"]["quick_reduce"]
    if quick_format not in table["formats"]:
        raise ValueError(f"unknown QuickReduce format: {quick_format!r}; allowed: {', '.join(table['formats'])}")
    if num_ranks not in table["num_ranks"]:
        raise ValueError(f"unsupported world size: {num_ranks}. Supported world sizes: {table['num_ranks']}.")
    if quick_format == "int3" and num_ranks != 2:
        raise ValueError(
            f"INT3 quantization is only supported for TP2 (world_size == 2), but world_size is {num_ranks}"
        )
    if dtype not in table["min_bytes"]:
        raise ValueError(f"QuickReduce supports {', '.join(table['min_bytes'])} only: {dtype}")
    least: int = table["min_bytes"][dtype][str(num_ranks)][table["formats"].index(quick_format)]
    return least


def quick_reduce(call: Call) -> Step:
    wanted = call.switches.quick_reduce
    if wanted is None or not call.is_amd:
        return None, "" if wanted is None else "only supported on ROCm MI300 series"
    if call.group != "tp" or not call.one_node or not call.switches.custom:
        return None, "for the group tp within one node, where custom all-reduces are on"
    if call.num_ranks > 2 and not call.nvlink:
        return None, "not supported on more than two PCIe-only GPUs"
    is_cast = call.dtype == "bfloat16" and call.switches.cast_to_float16
    try:
        least = quick_reduce_min_bytes(call.num_ranks, wanted.lower(), "float16" if is_cast else call.dtype)
    except ValueError as error:
        return None, str(error)
    most: int = tables()["vllm"]["quick_reduce"]["max_bytes"]
    if call.num_bytes % ALIGNMENT or not least <= call.num_bytes <= most:
        return None, f"{call.num_bytes} bytes are not whole 16 bytes from {least} to {most}"
    return "two_shot", f"{wanted.lower()}, {call.num_bytes} bytes are at least {least}"


def aiter(call: Call) -> Step:
    if not call.switches.aiter or not call.is_amd:
        return None, ""
    most: int = tables()["vllm"]["aiter_max_bytes"]
    if call.group != "tp" or not call.one_node or call.num_bytes % ALIGNMENT or call.num_bytes > most:
        return None, f"for the group tp within one node, up to {most} bytes: {call.num_bytes}"
    return "one_shot or two_shot", f"{call.num_bytes} bytes are within {most}"


def symm_mem_bound(call: Call) -> int | None:
    """Return the most bytes of torch symmetric memory, None where it is off."""
    is_on = call.switches.symm_mem is not False and call.multicast and call.group == "tp"
    most: int | None = tables()["vllm"]["symm_mem"]["max_bytes"].get(call.arch, {}).get(str(call.num_ranks))
    return most if is_on else None


def custom(call: Call) -> Step:
    table, num_ranks = tables()["vllm"]["custom"], call.num_ranks
    if call.group != "tp" or not call.switches.custom or (call.switches.aiter and call.is_amd):
        return None, f"for the group tp only, not {call.group}" if call.group != "tp" else ""
    if num_ranks not in table["num_ranks"]:
        return None, f"{num_ranks} ranks are none of {table['num_ranks']}"
    if not call.one_node:
        return None, "the group spans nodes"
    if num_ranks > 2 and not call.nvlink:
        return None, "more than two PCIe-only GPUs"
    if call.num_bytes % ALIGNMENT:
        return None, f"{call.num_bytes} bytes are not whole 16 bytes"
    bound: int = table["max_bytes"]
    if symm_mem_bound(call) is not None:
        bound = min(bound, table["with_symm_mem"].get(call.arch, {}).get(str(num_ranks), bound))
    if call.num_bytes >= bound:
        return None, f"{call.num_bytes} bytes are not below {bound}"
    is_one_shot = num_ranks == 2 or call.num_bytes < table["one_shot_below"][str(num_ranks)]
    return "one_shot" if is_one_shot else "two_shot", f"{call.num_bytes} bytes are below {bound}"


def symm_mem(call: Call) -> Step:
    bound = symm_mem_bound(call)
    if bound is None:
        return None, f"off, no multicast, or no bound for {call.num_ranks} ranks on {call.arch} in group {call.group}"
    if call.dtype != "bfloat16":
        return None, f"bfloat16 only: {call.dtype}"
    if call.num_bytes % 4 or call.num_bytes > bound:
        return None, f"{call.num_bytes} bytes are not whole 4 bytes up to {bound}"
    multimem = tables()["vllm"]["symm_mem"]["multimem"][call.arch]
    return "multimem" if call.num_ranks in multimem else "two_shot", f"{call.num_bytes} bytes are within {bound}"
