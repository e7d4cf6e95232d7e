"""``crosstraffic layouts``: what it prints, what it refuses, what it loads."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.errors import UsageError
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.layouts import find_layouts
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.workload import Workload

EIGHT = ("--gpus", "8", "--gpu-memory", "80GB")
KEYS = {
    "place",
    "layout",
    "text",
    "fits",
    "rounds",
    "num_replicas",
    "requests_per_replica",
    "max_requests",
    "max_tokens",
    "weight_bytes",
    "kv_bytes",
    "kv_request_bytes",
    "buffer_bytes",
    "total_bytes",
    "headroom_bytes",
    "parts",
    "intra_node_bytes",
    "inter_node_bytes",
    "node_egress_bytes",
    "calls",
    "crosses_nodes",
    "num_passes",
    "pipeline_utilization",
    "streams",
}


def call(*words: str) -> str:
    result = CliRunner().invoke(app, ["layouts", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, ["layouts", *words], catch_exceptions=False)
    return str(caught.value)


def test_json_has_every_layout_with_every_number() -> None:
    data = json.loads(call("Llama-3.1-70B", *EIGHT, "--json"))
    assert (data["schema_version"], data["model"], data["framework"], data["phase"]) == (
        1,
        "Llama-3.1-70B",
        "vllm",
        "decode",
    )
    assert (data["batch"], data["context"], data["limit_bytes"]) == (128, 4096, 72 * 10**9)
    assert len(data["layouts"]) == data["num_layouts"] == 10
    assert data["num_refused"] == sum(rule["count"] for rule in data["refusals"]) > 0
    assert all(set(row) == KEYS for row in data["layouts"])
    assert [row["place"] for row in data["layouts"]] == list(range(1, 11))
    best = data["layouts"][0]
    assert (best["text"], best["fits"], best["rounds"]) == ("tp=4,dp=2", True, 1)
    assert (best["layout"]["tp"], best["layout"]["dp"]) == (4, 2)
    assert best["kv_request_bytes"] == 4096 * 327_680 // 4
    assert best["kv_bytes"] == 64 * best["kv_request_bytes"]
    assert best["weight_bytes"] + best["buffer_bytes"] + best["kv_bytes"] == best["total_bytes"]
    assert best["total_bytes"] + best["headroom_bytes"] == data["limit_bytes"]
    assert best["weight_bytes"] + best["buffer_bytes"] == sum(part["num_bytes"] for part in best["parts"])
    assert all(part["formula"] for part in best["parts"])
    assert {stream["name"] for stream in best["streams"]} >= {"tp.attention_output", "tp.logits"}
    assert data["layouts"][-1]["rounds"] is None


def test_json_is_what_the_search_finds() -> None:
    data = json.loads(call("DeepSeek-V3", "--gpus", "16", "--gpu-memory", "141GB", "--batch", "200", "--json"))
    found = find_layouts(
        load_model("DeepSeek-V3"), 16, Workload(phase="decode"), "vllm", batch=200, gpu_memory_bytes=141 * 10**9
    )
    assert [row["text"] for row in data["layouts"]] == [str(one.layout) for one in found.candidates]
    assert [row["node_egress_bytes"] for row in data["layouts"]] == [
        one.tiers.node_egress_bytes for one in found.candidates
    ]
    assert data["layouts"][0]["layout"] == {**data["layouts"][0]["layout"], "dp": 8, "ep": 8, "replicas": 2}
    assert found.candidates[0].layout == Layout(dp=8, ep=8, replicas=2)


@pytest.mark.parametrize(
    "words",
    [
        ("Llama-3.1-8B", *EIGHT),
        ("Llama-3.1-405B", *EIGHT, "--weight-dtype", "fp8"),
        ("Llama-3.1-405B", *EIGHT),
        ("DeepSeek-V3", "--gpus", "64", "--gpu-memory", "80GB", "--top", "40"),
        ("DeepSeek-V3", "--gpus", "64", "--gpu-memory", "80GB", "--phase", "prefill", "--batch", "256"),
        ("Qwen3-30B-A3B", "--gpus", "16", "--gpu-memory", "80GB", "--framework", "sglang", "--batch", "20000"),
        ("Mixtral-8x7B", "--gpus", "12", "--gpu-memory", "24GB", "--framework", "megatron"),
    ],
    ids=lambda words: " ".join(words[:4]),
)
def test_tables_fit_a_terminal_of_80_columns(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = call(*words)
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


def test_the_table_says_what_is_counted_how_it_is_ranked_and_what_was_refused() -> None:
    output = " ".join(call("Llama-3.1-70B", *EIGHT, "--top", "3").split())
    assert "10 layouts: 7 hold all requests at once, 2 some of them, 1 none." in output
    assert "7 more layouts" in output
    assert "free: of 72 GB" in output
    assert "ranked by: rounds" in output
    assert "combinations refused: 10, most often (10): Decode context parallelism for GQA/MQA" in output
    assert output.index("tp=4,dp=2 ") < output.index("tp=8 ")
    assert "pp=8" not in output


def test_what_does_not_fit_is_told_by_how_much() -> None:
    output = " ".join(call("Llama-3.1-405B", *EIGHT).split())
    assert "0 hold all requests at once, 0 some of them, 10 none." in output
    assert "none fits: tp=4,pp=2 lacks 29." in output
    some = " ".join(call("Llama-3.1-405B", *EIGHT, "--weight-dtype", "fp8").split())
    assert "none holds all 128 at once: tp=8 takes 2 rounds of 77 requests." in some


def test_one_gpu() -> None:
    data = json.loads(call("Llama-3.1-8B", "--gpus", "1", "--gpu-memory", "79.5GiB", "--json"))
    assert [row["text"] for row in data["layouts"]] == ["tp=1"]
    assert (data["refusals"], data["batch"]) == ([], 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope", *EIGHT), "model: unknown model: 'nope'"),
        (("Llama-3.1-8B", "--gpus", "0", "--gpu-memory", "80GB"), "layouts: the number of GPUs must be"),
        (("Llama-3.1-8B", "--gpus", "-8", "--gpu-memory", "80GB"), "the number of GPUs must be"),
        (("Llama-3.1-8B", "--gpus", "9999999", "--gpu-memory", "80GB"), "from 1 to 1024: 9999999"),
        (("Llama-3.1-8B", "--gpus", "8", "--gpu-memory", "lots"), "not a size: 'lots'"),
        (("Llama-3.1-8B", "--gpus", "8", "--gpu-memory", "0"), "the memory of a GPU must be positive"),
        (("Llama-3.1-8B", *EIGHT, "--utilization", "0"), "utilization must be above 0 and at most 1: 0"),
        (("Llama-3.1-8B", *EIGHT, "--utilization", "90"), "utilization must be above 0 and at most 1: 90"),
        (("Llama-3.1-8B", *EIGHT, "--batch", "0"), "batch must be a whole number from 1: 0"),
        (("Llama-3.1-8B", *EIGHT, "--context", "0"), "context must be a whole number from 1: 0"),
        (("Llama-3.1-8B", *EIGHT, "--phase", "handoff"), "a handoff is between two of them"),
        (("Llama-3.1-8B", *EIGHT, "--phase", "training"), "unknown phase: 'training'"),
        (("Llama-3.1-8B", *EIGHT, "--framework", "triton"), "unknown framework: 'triton'"),
        (("Llama-3.1-8B", *EIGHT, "--weight-dtype", "fp3"), "unknown weight dtype: 'fp3'"),
        (("Llama-3.1-8B", *EIGHT, "--kv-dtype", "fp3"), "fp3"),
        (("Llama-3.1-8B", *EIGHT, "--dtype", "int3"), "unknown dtype: 'int3'"),
        (("Llama-3.1-8B", *EIGHT, "--expert-backend", "pplx"), "unknown expert backend: 'pplx'"),
        (("Llama-3.1-8B", *EIGHT, "--ranks-per-node", "0"), "ranks_per_node must be a whole number from 1: 0"),
        (("Llama-3.1-8B", *EIGHT, "--top", "0"), "top must be a whole number from 1: 0"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_bad_input_is_refused_with_what_is_allowed(words: tuple[str, ...], message: str) -> None:
    assert message in refused(*words)


def test_where_no_layout_is_valid_the_rules_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine runs one replica a GPU, so a rule must be broken to see this."""

    def never(*_: object) -> None:
        raise ValueError("vllm cannot run X as tp=1: no such thing (3)")

    monkeypatch.setattr("crosstraffic.patterns.layouts.check_model", never)
    message = refused("Llama-3.1-8B", *EIGHT)
    assert "vllm runs Llama-3.1-8B on 8 GPUs in none of 20 combinations: no such thing (#) (20)" in message


def test_the_command_loads_nothing_heavy_and_ends_with_2_on_bad_use() -> None:
    code = (
        "import sys\n"
        "from crosstraffic.cli import app\n"
        "try:\n    app(['layouts', 'Llama-3.1-8B', '--gpus', '8', '--gpu-memory', '80GB', '--json'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'mpi4py', 'cupy', 'pandas', 'scipy', 'matplotlib', 'rich.table'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    words = ["layouts", "Llama-3.1-8B", "--gpus", "0", "--gpu-memory", "80GB"]
    command = [sys.executable, "-m", "crosstraffic.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: layouts: the number of GPUs must be a whole number from 1 to 1024: 0\n"
