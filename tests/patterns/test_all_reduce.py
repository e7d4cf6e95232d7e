import json

import pytest

from crosstraffic.patterns.all_reduce import ENGINES, all_reduce_algorithm
from crosstraffic.patterns.all_reduce_call import TABLES, Switches, architecture, tables
from crosstraffic.patterns.all_reduce_vllm import quick_reduce_min_bytes

KIB, MIB = 2**10, 2**20


def vllm(gpu, num_ranks, num_bytes, **options):
    found = all_reduce_algorithm("vllm", gpu, num_ranks, num_bytes, **options)
    return found.algorithm, found.kernel


@pytest.mark.parametrize(
    ("gpu", "num_ranks", "num_bytes", "expected"),
    [
        pytest.param("H100", 8, MIB, ("symm_mem", "multimem"), id="N6 70B B=64"),
        pytest.param("A100", 8, MIB, ("custom_all_reduce", "two_shot"), id="N6 70B B=64 without a symm-mem table"),
        pytest.param("H100", 8, 128 * MIB, ("nccl", "NCCL's own choice"), id="70B prefill of 8192 tokens"),
        pytest.param("H100", 8, 512 * KIB, ("symm_mem", "multimem"), id="8B B=64"),
        pytest.param("H100", 8, 256 * KIB, ("symm_mem", "multimem"), id="custom takes strictly less than its bound"),
        pytest.param("H100", 8, 256 * KIB - 16, ("custom_all_reduce", "one_shot"), id="just below the bound"),
        pytest.param("H100", 8, 64 * MIB, ("symm_mem", "multimem"), id="symm-mem takes its bound"),
        pytest.param("H100", 8, 64 * MIB + 16, ("nccl", "NCCL's own choice"), id="just above it"),
        pytest.param("H100", 2, 8 * MIB - 16, ("custom_all_reduce", "one_shot"), id="the table says 64, the buffer 8"),
        pytest.param("H100", 2, 8 * MIB, ("symm_mem", "two_shot"), id="two ranks have no multimem"),
        pytest.param("H200", 6, 512 * KIB, ("symm_mem", "multimem"), id="six ranks"),
        pytest.param("B200", 4, 2 * MIB, ("symm_mem", "two_shot"), id="multimem from six ranks on Blackwell"),
        pytest.param("B200", 8, MIB - 16, ("custom_all_reduce", "two_shot"), id="sm100 custom"),
        pytest.param("B200", 8, 128 * MIB, ("symm_mem", "multimem"), id="sm100 symm-mem"),
        pytest.param("B300", 8, 4 * MIB - 16, ("custom_all_reduce", "two_shot"), id="sm103 custom"),
        pytest.param("B300", 8, 128 * MIB, ("nccl", "NCCL's own choice"), id="sm103 symm-mem ends at 64 MiB"),
        pytest.param("R100", 6, 8 * MIB - 16, ("custom_all_reduce", "two_shot"), id="sm107 as sm103"),
        pytest.param("A100", 4, 8 * MIB, ("nccl", "NCCL's own choice"), id="sm80 above 8 MiB"),
        pytest.param("A100", 4, 512 * KIB - 16, ("custom_all_reduce", "one_shot"), id="one shot below 512 KiB at TP4"),
        pytest.param("H100", 5, MIB, ("nccl", "NCCL's own choice"), id="five ranks"),
        pytest.param("H100", 16, 8 * KIB, ("nccl", "NCCL's own choice"), id="sixteen ranks: gather and scatter only"),
        pytest.param("H100", 8, 8 * KIB + 8, ("symm_mem", "multimem"), id="not whole 16 bytes"),
        pytest.param("MI300X", 8, MIB, ("custom_all_reduce", "two_shot"), id="MI300X"),
        pytest.param("MI300X", 8, 8 * MIB, ("nccl", "NCCL's own choice"), id="MI300X, RCCL"),
        pytest.param("L40S", 4, 8 * KIB, ("nccl", "NCCL's own choice"), id="more than two PCIe-only GPUs"),
        pytest.param("L40S", 2, 8 * KIB, ("custom_all_reduce", "one_shot"), id="two PCIe-only GPUs"),
    ],
)
def test_what_vllm_runs(gpu, num_ranks, num_bytes, expected):
    assert vllm(gpu, num_ranks, num_bytes) == expected


@pytest.mark.parametrize(
    ("num_bytes", "options", "expected"),
    [
        pytest.param(64 * KIB, {"num_nodes": 2}, "nccl", id="two nodes"),
        pytest.param(MIB, {"num_nodes": 2, "multicast": True}, "symm_mem", id="one NVLink domain over nodes"),
        pytest.param(64 * KIB, {"group": "dp"}, "nccl", id="another group"),
        pytest.param(128 * KIB, {"dtype": "float16"}, "custom_all_reduce", id="float16 below the custom bound"),
        pytest.param(MIB, {"dtype": "float16"}, "nccl", id="symm-mem lowers the bound, but is for bfloat16 only"),
        pytest.param(MIB, {"nvlink": False}, "nccl", id="PCIe"),
        pytest.param(MIB, {"switches": Switches(symm_mem=False)}, "custom_all_reduce", id="without symm-mem: 8 MiB"),
        pytest.param(64 * KIB, {"switches": Switches(custom=False)}, "symm_mem", id="without custom"),
        pytest.param(512 * KIB, {"switches": Switches(fused_norm=True)}, "flashinfer_fused", id="fusion"),
        pytest.param(512 * KIB + 16, {"switches": Switches(fused_norm=True)}, "symm_mem", id="above the fusion bound"),
        pytest.param(512 * KIB, {"switches": Switches(flashinfer=True)}, "flashinfer", id="FlashInfer"),
        pytest.param(16 * KIB, {"switches": Switches(nccl_symmetric=True)}, "nccl_symmetric", id="NCCL symm, small"),
        pytest.param(
            32 * KIB, {"switches": Switches(nccl_symmetric=True)}, "custom_all_reduce", id="NCCL symm, middle"
        ),
        pytest.param(128 * KIB, {"switches": Switches(nccl_symmetric=True)}, "nccl_symmetric", id="NCCL symm, large"),
        pytest.param(2 * MIB, {"switches": Switches(quick_reduce="int4")}, "symm_mem", id="no QuickReduce on NVIDIA"),
    ],
)
def test_what_vllm_can_be_told(num_bytes, options, expected):
    assert vllm("H100", 8, num_bytes, **options)[0] == expected


@pytest.mark.parametrize(
    ("num_ranks", "quick_format", "num_bytes", "cast", "expected"),
    [
        pytest.param(8, "INT4", 2 * MIB, True, "quick_reduce", id="float16 bound"),
        pytest.param(8, "INT4", 2 * MIB - 16, True, "custom_all_reduce", id="below it"),
        pytest.param(8, "INT4", 1024 * MIB, False, "nccl", id="bfloat16 at TP8: off below 2 GiB"),
        pytest.param(8, "INT4", 2048 * MIB, False, "quick_reduce", id="bfloat16 at TP8: 2 GiB exactly"),
        pytest.param(2, "INT3", 8 * MIB, False, "quick_reduce", id="INT3 at TP2"),
        pytest.param(4, "INT3", 64 * MIB, False, "nccl", id="INT3 at TP4"),
        pytest.param(6, "INT8", 64 * MIB, False, "nccl", id="six ranks"),
        pytest.param(4, "FP", 8 * MIB, False, "quick_reduce", id="full precision"),
    ],
)
def test_quick_reduce(num_ranks, quick_format, num_bytes, cast, expected):
    switches = Switches(quick_reduce=quick_format, cast_to_float16=cast)
    assert vllm("MI300X", num_ranks, num_bytes, switches=switches)[0] == expected


def test_quick_reduce_bounds_of_bfloat16():
    found = {
        ranks: [quick_reduce_min_bytes(ranks, name, "bfloat16") // MIB for name in ("fp", "int8", "int6", "int4")]
        for ranks in (2, 4, 8)
    }
    assert found == {2: [2, 8, 8, 8], 4: [8, 64, 64, 16], 8: [16, 2048, 2048, 2048]}
    assert quick_reduce_min_bytes(2, "int3", "bfloat16") == 8 * MIB


@pytest.mark.parametrize("num_ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("gpu", ["A100", "H100", "B200", "B300", "R100", "MI300X"])
def test_larger_buffers_never_go_back_to_a_custom_kernel(gpu, num_ranks):
    order = ["custom_all_reduce", "symm_mem", "nccl"]
    sizes = [2**exponent for exponent in range(10, 30)]
    found = [order.index(vllm(gpu, num_ranks, size)[0]) for size in sizes]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == 2


@pytest.mark.parametrize(
    ("gpu", "num_ranks", "num_bytes", "graph", "expected"),
    [
        pytest.param("H100", 8, 128 * KIB, True, ("custom_all_reduce", "one_shot"), id="push"),
        pytest.param("H100", 8, MIB, True, ("custom_all_reduce", "multimem"), id="multicast from 512 KiB"),
        pytest.param("H100", 8, 256 * KIB, True, ("custom_all_reduce", "two_shot"), id="between"),
        pytest.param("H100", 8, 256 * KIB, False, ("custom_all_reduce", "multimem"), id="eager: multicast at once"),
        pytest.param("H100", 8, 16 * MIB, False, ("custom_all_reduce", "multimem"), id="the workspace is the bound"),
        pytest.param("H100", 8, 16 * MIB + 16, False, ("nccl", "NCCL's own choice"), id="above the workspace"),
        pytest.param("B300", 4, 2 * MIB, True, ("custom_all_reduce", "one_shot"), id="sm103 as sm100"),
        pytest.param("A100", 8, 2 * MIB, True, ("custom_all_reduce", "two_shot"), id="not tuned"),
        pytest.param("H100", 16, 8 * KIB, True, ("nccl", "NCCL's own choice"), id="16 ranks on Hopper"),
        pytest.param("GB200", 16, 256 * KIB, True, ("custom_all_reduce", "one_shot"), id="16 ranks on Blackwell"),
    ],
)
def test_what_sglang_runs(gpu, num_ranks, num_bytes, graph, expected):
    found = all_reduce_algorithm("sglang", gpu, num_ranks, num_bytes, switches=Switches(graph=graph))
    assert (found.algorithm, found.kernel) == expected


@pytest.mark.parametrize("group", ["attn_tp", "ep", "etp", "pp"])
def test_groups_of_sglang_other_than_tp_use_nccl(group):
    found = all_reduce_algorithm("sglang", "H100", 4, 64 * KIB, group=group)
    assert found.algorithm == "nccl"
    assert "use_custom_allreduce=False" in found.why


def test_sglang_symmetric_memory_is_a_choice():
    size = 32 * MIB
    assert all_reduce_algorithm("sglang", "H100", 8, size).algorithm == "nccl"
    found = all_reduce_algorithm("sglang", "H100", 8, size, switches=Switches(symm_mem=True))
    assert (found.algorithm, found.kernel) == ("symm_mem", "multimem")


@pytest.mark.parametrize(
    ("framework", "num_bytes", "options", "expected"),
    [
        pytest.param("megatron", MIB, {}, "nccl", id="Megatron-Core"),
        pytest.param("megatron", MIB, {"switches": Switches(fused_norm=True)}, "nvls_fused", id="inference layers"),
        pytest.param(
            "megatron", MIB, {"dtype": "float16", "switches": Switches(fused_norm=True)}, "nccl", id="NVLS is bfloat16"
        ),
        pytest.param("tensorrt_llm", MIB, {}, "one_or_two_shot", id="within 8 MB"),
        pytest.param("tensorrt_llm", 8 * MIB, {}, "nccl", id="8 MiB is more than 8 MB"),
        pytest.param("tensorrt_llm", MIB, {"nvlink": False}, "nccl", id="PCIe"),
        pytest.param(
            "tensorrt_llm",
            4 * MIB,
            {"nvlink": False, "switches": Switches(low_precision=True)},
            "low_precision",
            id="2 Mi elements",
        ),
        pytest.param(
            "tensorrt_llm",
            4 * MIB,
            {"switches": Switches(low_precision=True)},
            "one_or_two_shot",
            id="low precision is for PCIe",
        ),
    ],
)
def test_what_other_engines_run(framework, num_bytes, options, expected):
    assert all_reduce_algorithm(framework, "H100", 8, num_bytes, **options).algorithm == expected


def test_a_choice_says_why_and_where_it_was_read():
    found = all_reduce_algorithm("vllm", "H100", 8, MIB)
    assert "not custom_all_reduce: 1048576 bytes are not below 262144" in found.why
    assert found.source.startswith("vLLM @ 017e9f4448b7 distributed/device_communicators/symm_mem.py")


@pytest.mark.parametrize("framework", ENGINES)
def test_the_table_names_the_commit(framework):
    assert " @ " in json.loads(TABLES.read_text(encoding="utf-8"))[framework]["source"]
    assert all_reduce_algorithm(framework, "H100", 3, 1000).source.startswith(tables()[framework]["source"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("H100", "sm90"), ("h200", "sm90"), ("NVIDIA A100", "sm80"), ("GB300", "sm103"), ("sm_107", "sm107")],
)
def test_names_of_gpus(name, expected):
    assert architecture(name) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vllm", "H99", 8, MIB), "unknown GPU: 'H99'; allowed: A100"),
        (("llama.cpp", "H100", 8, MIB), "unknown framework: 'llama.cpp'; allowed: vllm"),
        (("vllm", "H100", 1, MIB), "num_ranks must be a whole number from 2: 1"),
        (("vllm", "H100", 8, 0), "num_bytes must be a whole number from 1: 0"),
        (("vllm", "H100", 8, 3), "whole elements of bfloat16: 3"),
        (("sglang", "MI300X", 8, MIB), "not described"),
    ],
)
def test_bad_calls(arguments, message):
    with pytest.raises(ValueError, match=message):
        all_reduce_algorithm(*arguments)
