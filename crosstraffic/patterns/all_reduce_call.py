"""One all-reduce as an engine sees it when it picks an algorithm, and the thresholds by which it does.

The thresholds are in ``all_reduce.json``, with the commit at which they were read: engines change them often.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "all_reduce.json"
UNITS: Mapping[str, int] = {"KiB": 2**10, "MiB": 2**20, "MB": 10**6}
ALIGNMENT = 16  # custom kernels move 16 bytes at a time
NCCL_CHOICE = "NCCL's own choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Switches:
    """What an engine can be told about its all-reduces; the defaults are the engines' own.

    ``custom``: vLLM and SGLang without disable_custom_all_reduce. ``symm_mem``: torch symmetric memory
    (VLLM_ALLREDUCE_USE_SYMM_MEM, on; SGLang --enable-torch-symm-mem, off). ``nccl_symmetric``: VLLM_USE_NCCL_SYMM_MEM,
    SGLang --enable-symm-mem. ``flashinfer``: VLLM_ALLREDUCE_USE_FLASHINFER. ``fused_norm``: the all-reduce of a layer
    is one kernel with the norm behind it (vLLM's FlashInfer pass, which -O2 turns on where FlashInfer is installed;
    Megatron-Core's inference layers on NVLS). ``aiter``: VLLM_ROCM_USE_AITER_CUSTOM_AR. ``quick_reduce``:
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION, and ``cast_to_float16`` VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16.
    ``low_precision``: TensorRT-LLM's strategy LOWPRECISION. ``graph``: the call is captured in a CUDA graph.
    """

    custom: bool = True
    symm_mem: bool | None = None
    nccl_symmetric: bool = False
    flashinfer: bool = False
    fused_norm: bool = False
    aiter: bool = False
    quick_reduce: str | None = None
    cast_to_float16: bool = True
    low_precision: bool = False
    graph: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One all-reduce; ``multicast``: the ranks lie in one NVLink domain with multicast (NVSwitch)."""

    arch: str
    num_ranks: int
    num_bytes: int
    group: str
    dtype: str
    nvlink: bool
    multicast: bool
    one_node: bool
    switches: Switches

    @property
    def is_amd(self) -> bool:
        """Tell whether the GPU runs ROCm."""
        return self.arch.startswith("gfx")


Step = tuple[str | None, str]  # the kernel, if the algorithm is taken, and why it is or is not


@lru_cache(maxsize=1)
def tables() -> Mapping[str, Any]:
    """Return the thresholds of all engines; sizes are in bytes."""
    found: Mapping[str, Any] = _in_bytes(json.loads(TABLES.read_text(encoding="utf-8")))
    return found


def _in_bytes(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _in_bytes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_bytes(item) for item in value]
    if isinstance(value, str):
        number, _, unit = value.partition(" ")
        return int(float(number) * UNITS[unit]) if unit in UNITS else value
    return value


def architecture(gpu: str) -> str:
    """Return the architecture of a GPU by name: ``H100`` is ``sm90``; an architecture's own name stays.

    >>> architecture("B300"), architecture("mi300x"), architecture("SM_100")
    ('sm103', 'gfx942', 'sm100')

    Raises:
        ValueError: unknown GPU.
    """
    names: Mapping[str, list[str]] = tables()["architectures"]
    wanted = gpu.lower().replace("_", "").removeprefix("nvidia ").removeprefix("amd ").strip()
    for arch, cards in names.items():
        if wanted == arch or wanted in (card.lower() for card in cards):
            return arch
    allowed = ", ".join(f"{', '.join(cards)} ({arch})" for arch, cards in names.items())
    raise ValueError(f"unknown GPU: {gpu!r}; allowed: {allowed}")


def nccl(call: Call) -> Step:
    return NCCL_CHOICE, "RCCL" if call.is_amd else "NCCL"
