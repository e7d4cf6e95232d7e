"""How weights are stored: bits of an element, what share a scale, and what a quantization_config says."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from crosstraffic.patterns.config_keys import Config
from crosstraffic.patterns.model import DTYPE_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format of weights: each block of ``block_rows`` x ``block_columns`` elements has ``scale_bytes`` of scale."""

    bits: int
    block_rows: int = 1
    block_columns: int = 1
    scale_bytes: int = 0


# Source: DeepSeek-V3 and Qwen3 FP8 (weight_block_size 128 x 128, fp32 scales); NVFP4: 16 elements, one fp8 scale;
# OCP MX 1.0: 32 elements, one exponent byte; compressed-tensors INT4 of Kimi-K2: group 32, bfloat16 scale.
FORMATS: Mapping[str, WeightFormat] = {
    "float32": WeightFormat(bits=32),
    "bfloat16": WeightFormat(bits=16),
    "float16": WeightFormat(bits=16),
    "float8_e4m3": WeightFormat(bits=8, block_rows=128, block_columns=128, scale_bytes=4),
    "int8": WeightFormat(bits=8),
    "nvfp4": WeightFormat(bits=4, block_columns=16, scale_bytes=1),
    "mxfp4": WeightFormat(bits=4, block_columns=32, scale_bytes=1),
    "int4": WeightFormat(bits=4, block_columns=32, scale_bytes=2),
}
FORMAT_NAMES: Mapping[str, str] = {**DTYPE_NAMES, "fp4": "nvfp4", "float4": "nvfp4"}
# What quant_method, quant_algo or expert_dtype of a configuration call a format.
METHODS: Mapping[str, str] = {
    "fp8": "float8_e4m3",
    "fbgemm_fp8": "float8_e4m3",
    "deepseek_v4_fp8": "float8_e4m3",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "awq": "int4",
    "gptq": "int4",
}


def weight_format(dtype: str) -> WeightFormat:
    """Return the format of a name: ``fp8``, ``fp4`` (NVFP4), ``bf16`` ...

    Raises:
        ValueError: unknown name.
    """
    name = FORMAT_NAMES.get(dtype.lower(), dtype.lower())
    if name not in FORMATS:
        raise ValueError(f"unknown weight dtype: {dtype!r}; allowed: {', '.join([*FORMATS, *FORMAT_NAMES])}")
    return FORMATS[name]


def weight_bytes(num_parameters: int, dtype: str) -> int:
    """Return bytes of so many elements, scales left out; a half byte at the end counts whole.

    >>> weight_bytes(3, "bf16"), weight_bytes(3, "fp8"), weight_bytes(3, "fp4")
    (6, 3, 2)

    Raises:
        ValueError: unknown dtype, or a negative number.
    """
    if num_parameters < 0:
        raise ValueError(f"num_parameters must not be negative: {num_parameters}")
    return -(-num_parameters * weight_format(dtype).bits // 8)


def scale_bytes(rows: int, columns: int, dtype: str) -> int:
    """Return bytes of the scales of a matrix: one for each started block.

    >>> scale_bytes(2048, 7168, "fp8")
    3584
    """
    form = weight_format(dtype)
    return -(-rows // form.block_rows) * -(-columns // form.block_columns) * form.scale_bytes


def _of_group(weights: Mapping[str, Any]) -> str | None:
    """Return the format that compressed-tensors or ModelOpt describe by bits, type and group size."""
    if weights.get("num_bits") == 8:
        return "float8_e4m3" if weights.get("type") == "float" else "int8"
    if weights.get("num_bits") == 4 and weights.get("type") == "float":
        return "nvfp4" if weights.get("group_size") == 16 else "mxfp4"
    return "int4" if weights.get("num_bits") == 4 else None


def _named(quantization: Config) -> Iterator[str | None]:
    """Yield the formats that a quantization_config speaks of, the most telling entry first."""
    yield METHODS.get(str(quantization.get("quant_algo")).lower())
    if quantization.get("moe_quant_algo") is not None:  # the groups speak of the experts alone
        yield METHODS.get(str(quantization.get("quant_method")).lower())
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            yield _of_group(group["weights"])
    yield METHODS.get(str(quantization.get("quant_method")).lower())


def stored_formats(config: Config) -> tuple[str | None, str | None]:
    """Return the format in which a checkpoint keeps its quantised weights, and that of routed experts if it differs.

    None where nothing is quantised, or nothing differs. ``expert_dtype`` fp4 of DeepSeek-V4 is MXFP4 (one exponent
    byte for 32 values).
    """
    quantization = config.get("quantization_config")
    named = str(config.get("expert_dtype")).lower()
    expert = "mxfp4" if named == "fp4" else METHODS.get(named)
    found = None
    if isinstance(quantization, Mapping):
        expert = METHODS.get(str(quantization.get("moe_quant_algo")).lower(), expert)
        found = next((name for name in _named(quantization) if name), None)
    return found, (expert if expert != found else None)
