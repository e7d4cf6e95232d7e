"""Formats of weights: bits, scales, and what configurations call them."""

import pytest

from crosstraffic.patterns.weight_format import FORMATS, scale_bytes, stored_formats, weight_bytes, weight_format


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("fp32", 28), ("bf16", 14), ("fp8", 7), ("int8", 7), ("fp4", 4), ("mxfp4", 4), ("int4", 4)]
)
def test_bytes_of_seven_elements(dtype, num_bytes):
    assert weight_bytes(7, dtype) == num_bytes
    assert weight_bytes(0, dtype) == 0


def test_large_numbers_are_exact():
    assert weight_bytes(10**18 + 1, "fp4") == 5 * 10**17 + 1


@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "num_bytes"),
    [
        ("fp8", 2048, 7168, 16 * 56 * 4),
        ("fp8", 129, 128, 2 * 4),
        ("fp4", 2048, 7168, 2048 * 448),
        ("fp4", 3, 17, 3 * 2),
        ("mxfp4", 3, 64, 6),
        ("bf16", 2048, 7168, 0),
    ],
)
def test_scales(dtype, rows, columns, num_bytes):
    assert scale_bytes(rows, columns, dtype) == num_bytes


def test_wrong_formats_and_numbers():
    with pytest.raises(ValueError, match=r"unknown weight dtype: 'fp3'; allowed: float32, .*nvfp4.*fp8"):
        weight_format("fp3")
    with pytest.raises(ValueError, match="num_parameters must not be negative: -1"):
        weight_bytes(-1, "fp8")


def group(bits, kind, size=None):
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits, "type": kind, "group_size": size}}}}


@pytest.mark.parametrize(
    ("quantization", "expert_dtype", "expected"),
    [
        (None, None, (None, None)),
        ({}, None, (None, None)),
        ("fp8", None, (None, None)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, ("float8_e4m3", None)),
        ({"quant_method": "fp8"}, "fp8", ("float8_e4m3", None)),
        ({"quant_method": "fp8"}, "fp4", ("float8_e4m3", "mxfp4")),
        ({"quant_method": "mxfp4"}, None, ("mxfp4", None)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, ("nvfp4", None)),
        ({"quant_method": "modelopt", "quant_algo": "MIXED", **group(4, "float", 16)}, None, ("nvfp4", None)),
        (
            {"quant_method": "fp8", "moe_quant_algo": "NVFP4", **group(4, "float", 16)},
            "fp4",
            ("float8_e4m3", "nvfp4"),
        ),
        ({"quant_method": "compressed-tensors", **group(4, "int", 32)}, None, ("int4", None)),
        ({"quant_method": "compressed-tensors", **group(4, "float", 32)}, None, ("mxfp4", None)),
        ({"quant_method": "compressed-tensors", **group(8, "float")}, None, ("float8_e4m3", None)),
        ({"quant_method": "compressed-tensors", **group(8, "int")}, None, ("int8", None)),
        ({"quant_method": "gptq", "bits": 4}, None, ("int4", None)),
        ({"quant_method": "of tomorrow"}, None, (None, None)),
    ],
    ids=[
        "none",
        "empty",
        "text",
        "DeepSeek-V3",
        "same",
        "DeepSeek-V4",
        "gpt-oss",
        "NVFP4",
        "mixed",
        "DeepSeek-V4 NVFP4",
        "Kimi-K2.5",
        "Kimi-K3",
        "fp8 groups",
        "int8 groups",
        "GPTQ",
        "unknown",
    ],
)
def test_what_configurations_say(quantization, expert_dtype, expected):
    found = stored_formats({"quantization_config": quantization, "expert_dtype": expert_dtype})
    assert found == expected
    assert all(name is None or name in FORMATS for name in found)
