"""How long it takes to work out and rank every layout of a model."""

import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from crosstraffic.patterns.layouts import find_layouts
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.workload import Workload


@pytest.mark.parametrize("framework", ["vllm", "megatron", "sglang", "tensorrt_llm"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_layouts_on_64_gpus(benchmark: BenchmarkFixture, framework: str, phase: str) -> None:
    shape, workload = load_model("DeepSeek-V3"), Workload(phase=phase)  # type: ignore[arg-type]
    found = benchmark.pedantic(
        find_layouts,
        args=(shape, 64, workload, framework),
        kwargs={"batch": 1024 if phase == "decode" else 64, "gpu_memory_bytes": 80 * 10**9},
        rounds=2,
    )
    assert len(found.candidates) > 100


def test_the_command_on_8_gpus(benchmark: BenchmarkFixture) -> None:
    words = ["layouts", "Llama-3.1-70B", "--gpus", "8", "--gpu-memory", "80GB"]
    command = [sys.executable, "-m", "crosstraffic.cli", *words]
    done = benchmark.pedantic(
        subprocess.run, args=(command,), kwargs={"capture_output": True}, rounds=5, warmup_rounds=1
    )
    assert done.returncode == 0
