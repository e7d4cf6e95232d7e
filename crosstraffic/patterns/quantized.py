"""Quantised all-reduce: bytes on the wire of an all-reduce whose values are sent in fewer bits, and when it happens."""

from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.patterns.all_reduce_call import ALIGNMENT, tables
from crosstraffic.patterns.all_reduce_vllm import quick_reduce_min_bytes
from crosstraffic.patterns.model import dtype_bytes

# TensorRT-LLM: of a warp's 32 threads 31 send 16 fp8 values each, the last one the scale in a slot of the same size.
WARP_ELEMENTS = 31 * 16
WARP_BYTES = 32 * 16
_QUICK_REDUCE = "vLLM @ 017e9f4448b7 quick_all_reduce.py, csrc/quickreduce/quick_reduce_impl.cuh"
_LOW_PRECISION = "TensorRT-LLM @ 01e2c3612da7 low-precision-allreduce.md, cpp/tensorrt_llm/thop/allreduceOp.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Values of ``bits``, each ``group`` of them with one scale of ``scale_bits``."""

    bits: int
    scale_bits: int
    group: int
    dtype: str


# Bits of a scale and values that share it: kThreadGroupSize threads send two float16 scales for 64 values.
FORMATS: Mapping[str, Mapping[str, Format]] = {
    "vllm": {
        "int8": Format(bits=8, scale_bits=16, group=32, dtype="int8"),
        "int6": Format(bits=6, scale_bits=16, group=32, dtype="int6"),
        "int4": Format(bits=4, scale_bits=16, group=32, dtype="int4"),
        "int3": Format(bits=3, scale_bits=16, group=32, dtype="int3"),
    },
    "tensorrt_llm": {
        "fp8": Format(bits=8, scale_bits=128, group=WARP_ELEMENTS, dtype="float8_e4m3"),
    },
}
UNQUANTISED = "fp"  # QuickReduce's own kernel in full precision
ALIASES: Mapping[str, str] = {"lowprecision": "fp8", "low_precision": "fp8", "float8_e4m3": "fp8"}
REFUSED: Mapping[str, str] = {
    "sglang": "SGLang's quant_all_reduce is for NPUs only",
    "megatron": "Megatron-Core reduces in the dtype of the activations",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnWire:
    """What an all-reduce puts on the wire: bytes of the buffer as sent, dtype, and how that comes about."""

    payload_bytes: int
    dtype: str
    formula: str
    source: str


def scaled_bytes(num_elements: int, bits: int, scale_bits: int, group: int) -> int:
    """Return bytes of values of ``bits`` with a scale for each ``group``, the last group sent whole.

    Of 2-byte values that is the share bits / 16 + scale_bits / (16 * group).

    >>> scaled_bytes(2**20, bits=4, scale_bits=16, group=32) / (2 * 2**20)
    0.28125
    """
    return -(-num_elements // group) * (group * bits + scale_bits) // 8


def format_of(framework: str, name: str) -> str:
    """Return the name of a format of an engine: ``lowprecision`` is TensorRT-LLM's ``fp8``.

    Raises:
        ValueError: the engine has no such format, or none at all.
    """
    if framework in REFUSED:
        raise ValueError(f"{framework} does not quantise all-reduces: {REFUSED[framework]}: {name!r}")
    if framework not in FORMATS:
        raise ValueError(f"unknown framework: {framework!r}; allowed: {', '.join([*FORMATS, *REFUSED])}")
    wanted = ALIASES.get(name.lower(), name.lower())
    allowed = (*FORMATS[framework], UNQUANTISED) if framework == "vllm" else tuple(FORMATS[framework])
    if wanted not in allowed:
        raise ValueError(f"{framework} has no all-reduce in {name!r}; allowed: {', '.join(allowed)}")
    return wanted


def quantized_wire_bytes(framework: str, name: str, num_bytes: int, *, element_bytes: int = 2) -> int:
    """Return bytes of the buffer as it is sent, of ``num_bytes`` before; on the wire as any all-reduce of that size.

    QuickReduce works in tiles of 32 KiB of input and sends the last one whole, which is not counted.

    >>> quantized_wire_bytes("vllm", "int4", 2**20), quantized_wire_bytes("tensorrt_llm", "fp8", 2 * 496 * 10)
    (294912, 5120)

    Raises:
        ValueError: the engine has no such format, or bytes are no whole elements.

    Source: vLLM @ 017e9f4448b7 csrc/quickreduce/quick_reduce_impl.cuh CodecQ8, CodecQ6, CodecQ4, CodecQ3; TensorRT-LLM
    @ 01e2c3612da7 docs low-precision-allreduce.md.
    """
    wanted = format_of(framework, name)
    elements, rest = divmod(num_bytes, element_bytes)
    if rest:
        raise ValueError(f"num_bytes must be whole elements of {element_bytes} bytes: {num_bytes}")
    if wanted == UNQUANTISED:
        return num_bytes
    found = FORMATS[framework][wanted]
    return scaled_bytes(elements, found.bits, found.scale_bits, found.group)


def quantized_all_reduce(
    framework: str, name: str, num_bytes: int, *, num_ranks: int, dtype: str, cast_to_float16: bool = True
) -> OnWire:
    """Return what an all-reduce of ``num_bytes`` puts on the wire where an engine is asked to quantise.

    An engine that finds the buffer too small, or not fit for its kernel, reduces it as it is: then the bytes are those
    before and the formula says why. ``cast_to_float16``: QuickReduce turns bfloat16 into float16 first
    (VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16, on by default), and its bounds are those of float16.

    Raises:
        ValueError: the engine does not quantise so, or never on that many ranks or in that dtype.
    """
    wanted = format_of(framework, name)
    if dtype not in ("float16", "bfloat16"):
        raise ValueError(f"{framework} quantises all-reduces of float16 and bfloat16 only: {dtype}")
    quantised = OnWire(
        payload_bytes=quantized_wire_bytes(framework, wanted, num_bytes, element_bytes=dtype_bytes(dtype)),
        dtype=dtype if wanted == UNQUANTISED else FORMATS[framework][wanted].dtype,
        formula=_formula(framework, wanted),
        source=_QUICK_REDUCE if framework == "vllm" else _LOW_PRECISION,
    )
    why = _too_small(framework, wanted, num_bytes, num_ranks, dtype, cast_to_float16)
    if why is None:
        return quantised
    return OnWire(
        payload_bytes=num_bytes, dtype=dtype, formula=f"T * H * b, not in {wanted}: {why}", source=quantised.source
    )


def _formula(framework: str, wanted: str) -> str:
    if wanted == UNQUANTISED:
        return "T * H * b, QuickReduce in full precision"
    found = FORMATS[framework][wanted]
    if framework == "vllm":
        share = f"{found.bits} / 16 + {found.scale_bits} / (16 * {found.group})"
        return f"T * H * b * ({share}), QuickReduce in {wanted}"
    return f"T * H * b / 2 * {WARP_BYTES} / {WARP_ELEMENTS}, LOWPRECISION in fp8, for GPUs without NVLink"


def _too_small(
    framework: str, wanted: str, num_bytes: int, num_ranks: int, dtype: str, cast_to_float16: bool
) -> str | None:
    """Say why the engine leaves a buffer as it is, None where it quantises."""
    if framework == "tensorrt_llm":
        least: int = tables()["tensorrt_llm"]["low_precision_min_elements"]
        elements = num_bytes // dtype_bytes(dtype)
        return f"{elements} elements, fewer than {least}" if elements < least else None
    works_in = "float16" if cast_to_float16 else dtype
    least = quick_reduce_min_bytes(num_ranks, wanted, works_in)
    most: int = tables()["vllm"]["quick_reduce"]["max_bytes"]
    if num_bytes % ALIGNMENT:
        return f"{num_bytes} bytes, not whole {ALIGNMENT} bytes"
    if num_bytes < least:
        return f"{num_bytes} bytes, QuickReduce takes {num_ranks} ranks' {works_in} from {least} bytes"
    return f"{num_bytes} bytes, more than {most}" if num_bytes > most else None
