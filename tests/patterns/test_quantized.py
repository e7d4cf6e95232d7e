from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.quantized import FORMATS, quantized_all_reduce, quantized_wire_bytes, scaled_bytes

MIB = 2**20
# Bytes that a QuickReduce kernel sends for each 4096 bytes of float16: kRankTileStride of its codec.
TILES = {"int8": 2176, "int6": 1664, "int4": 1152, "int3": 896}


@pytest.mark.parametrize(("name", "tile"), TILES.items())
def test_a_quick_reduce_tile(name, tile):
    assert quantized_wire_bytes("vllm", name, 4096) == tile


@pytest.mark.parametrize("name", TILES)
@given(tiles=st.integers(1, 2**20))
@settings(max_examples=50, deadline=None)
def test_the_generic_formula(name, tiles):
    found = FORMATS["vllm"][name]
    share = Fraction(found.bits, 16) + Fraction(found.scale_bits, 16 * found.group)
    assert quantized_wire_bytes("vllm", name, 64 * tiles) == 64 * tiles * share


def test_low_precision_sends_512_bytes_for_496_values():
    num_bytes = 2 * 496 * 10_000
    assert quantized_wire_bytes("tensorrt_llm", "fp8", num_bytes) == num_bytes // 2 * 512 // 496
    assert quantized_wire_bytes("tensorrt_llm", "lowprecision", 128 * MIB) / (128 * MIB) == pytest.approx(
        0.516, abs=1e-3
    )


@given(elements=st.integers(1, 10**6), bits=st.integers(1, 16), group=st.integers(1, 512))
@settings(max_examples=50, deadline=None)
def test_the_last_group_is_sent_whole(elements, bits, group):
    whole = scaled_bytes(elements, bits * 8, 8, group)
    assert whole == scaled_bytes(-(-elements // group) * group, bits * 8, 8, group)
    assert whole >= elements * bits


@pytest.mark.parametrize(
    ("framework", "name", "num_bytes", "num_ranks", "options", "payload", "says"),
    [
        pytest.param("vllm", "int4", 128 * MIB, 8, {}, 128 * MIB * 9 // 32, "QuickReduce in int4", id="int4"),
        pytest.param("vllm", "int8", MIB, 8, {}, MIB, "from 4194304 bytes", id="too small"),
        pytest.param(
            "vllm", "int8", 128 * MIB, 8, {"cast_to_float16": False}, 128 * MIB, "8 ranks' bfloat16", id="bfloat16 TP8"
        ),
        pytest.param("vllm", "fp", 128 * MIB, 8, {}, 128 * MIB, "full precision", id="fp"),
        pytest.param("vllm", "int8", 64 * MIB + 2, 2, {}, 64 * MIB + 2, "not whole 16 bytes", id="odd size"),
        pytest.param("tensorrt_llm", "fp8", 4 * MIB - 2, 2, {}, 4 * MIB - 2, "fewer than 2097152", id="too few values"),
        pytest.param("tensorrt_llm", "fp8", 4 * MIB, 2, {}, -(-2 * MIB // 496) * 512, "LOWPRECISION", id="enough"),
    ],
)
def test_what_is_sent(framework, name, num_bytes, num_ranks, options, payload, says):
    found = quantized_all_reduce(framework, name, num_bytes, num_ranks=num_ranks, dtype="bfloat16", **options)
    assert found.payload_bytes == payload
    assert says in found.formula
    assert "@" in found.source
    assert found.dtype == ("bfloat16" if payload == num_bytes else FORMATS[framework][name].dtype)


@pytest.mark.parametrize(
    ("framework", "name", "num_ranks", "dtype", "message"),
    [
        ("sglang", "int8", 8, "bfloat16", "NPUs only"),
        ("megatron", "fp8", 8, "bfloat16", "does not quantise"),
        ("vllm", "fp8", 8, "bfloat16", "allowed: int8, int6, int4, int3, fp"),
        ("tensorrt_llm", "int4", 8, "bfloat16", "allowed: fp8"),
        ("vllm", "int3", 8, "bfloat16", "INT3 quantization is only supported for TP2"),
        ("vllm", "int8", 6, "bfloat16", r"unsupported world size: 6. Supported world sizes: \[2, 4, 8\]"),
        ("vllm", "int8", 8, "float32", "float16 and bfloat16 only: float32"),
        ("llama.cpp", "int8", 8, "bfloat16", "unknown framework"),
    ],
)
def test_what_engines_refuse(framework, name, num_ranks, dtype, message):
    with pytest.raises(ValueError, match=message):
        quantized_all_reduce(framework, name, 128 * MIB, num_ranks=num_ranks, dtype=dtype)


def test_bytes_must_be_whole_elements():
    with pytest.raises(ValueError, match="whole elements of 2 bytes: 3"):
        quantized_wire_bytes("vllm", "int8", 3)
