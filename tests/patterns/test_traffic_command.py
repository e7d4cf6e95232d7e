"""``crosstraffic traffic`` and ``crosstraffic groups``: what they print, what they refuse, what they load."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.errors import UsageError

STREAM_KEYS = {
    "name",
    "pattern",
    "role",
    "op",
    "groups",
    "group_size",
    "group_nodes",
    "payload_bytes",
    "wire_bytes_per_rank",
    "calls_per_step",
    "dtype",
    "formula",
    "source",
}


def call(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: str) -> str:
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(app, list(words), catch_exceptions=False)
    return str(caught.value)


def test_traffic_json_has_the_documented_shape():
    data = json.loads(call("traffic", "DeepSeek-V3", "--layout", "tp=8,dp=2,ep=16", "--batch", "64", "--json"))
    assert {"schema_version", "model", "layout", "phase", "streams"} <= set(data)
    assert (data["model"], data["phase"]) == ("DeepSeek-V3", "decode")
    assert data["layout"]["ep"] == 16
    assert all(set(stream) == STREAM_KEYS for stream in data["streams"])
    by_name = {stream["name"]: stream for stream in data["streams"]}
    assert by_name["tp.attention_output"]["groups"] == [list(range(8)), list(range(8, 16))]
    assert by_name["tp.attention_output"]["wire_bytes_per_rank"] == 2 * 7 * 64 * 7168 * 2 // 8
    assert data["left_out"]["dp"]
    assert data["routing"]["rank_load"]["max_over_mean"] == 1.0


def test_handoff_json_adds_matrix_and_descriptors():
    words = ("--layout", "tp=8", "--decode-layout", "tp=4", "--phase", "handoff", "--context", "8192", "--json")
    data = json.loads(call("traffic", "Llama-3.1-70B", *words))
    assert [stream["name"] for stream in data["streams"]] == ["pd.kv"]
    assert len(data["matrix_bytes"]) == 8
    assert [sum(row[column] for row in data["matrix_bytes"]) for column in range(4)] == [8192 * 327_680 // 4] * 4
    assert data["descriptors"]["bytes"][0][0] == 8192


def test_what_is_not_in_every_step_is_listed_apart():
    words = ("traffic", "DeepSeek-V3", "--layout", "dp=4,ep=4")
    data = json.loads(call(*words, "--json"))
    (message,) = data["occasional"]
    assert (message["name"], message["num_bytes"], message["every_steps"]) == ("dp.work_left", 8, 32)
    assert message["name"] not in {stream["name"] for stream in data["streams"]}
    assert {entry["what"] for entry in data["background"]} >= {"weights", "metrics"}
    output = call(*words)
    assert "dp.work_left: all_reduce of 8 B a rank on the dp groups, once in 32 steps" in output
    assert "metrics: each scrape (HTTP)" in output


def test_one_replica_has_nothing_beside_its_steps():
    data = json.loads(call("traffic", "DeepSeek-V3", "--layout", "tp=8", "--json"))
    assert (data["occasional"], data["background"]) == ([], [])
    assert "beside the steps" not in call("traffic", "DeepSeek-V3", "--layout", "tp=8")


def test_notes_tell_the_bubble_of_a_pipeline():
    words = ("traffic", "Llama-3.1-8B", "--layout", "pp=2", "--phase", "prefill", "--micro-batches", "3")
    assert "a stage is idle 1/4 of the time" in json.loads(call(*words, "--json"))["notes"]["pipeline"]
    assert "pipeline: 3 micro-batches in 2 stages" in call(*words)


EPD = ("traffic", "Llama-4-Maverick", "--layout", "tp=2,dp=2", "--decode-layout", "tp=2", "--phase", "handoff")


def test_encoders_send_before_the_handoff_from_ranks_behind_both_pools():
    asked = ("--encoder-tokens", "576", "--encoders", "2", "--batch", "3")
    data = json.loads(call(*EPD, *asked, "--json"))
    assert [stream["name"] for stream in data["streams"]] == ["epd.embeddings", "pd.kv"]
    assert data["encoder"] == {"ranks": [6, 7], "tokens_per_request": 576, "num_deepstack": 0}
    assert data["streams"][0]["groups"] == [[6, 7, 0, 1, 2, 3]]
    assert data["streams"][0]["payload_bytes"] == 3 * 2 * 576 * 5120 * 2
    assert data["matrix_bytes"] == json.loads(call(*EPD, "--batch", "3", "--json"))["matrix_bytes"]
    assert "encoders: 2, ranks 6 to 7; 576 embeddings a request" in call(*EPD, *asked)
    through = json.loads(call(*EPD, *asked, "--framework", "sglang", "--encoder-through-first", "--json"))
    assert [stream["name"] for stream in through["streams"]] == ["epd.embeddings", "pd.kv"]  # one rank a replica


def test_a_model_with_an_encoder_says_why_none_sends():
    assert "--encoder-tokens" in json.loads(call(*EPD, "--json"))["left_out"]["epd"]
    assert "epd: no image and no audio in the requests" in call(*EPD)
    words = ("traffic", "Llama-3.1-8B", "--layout", "tp=2", "--phase", "handoff")
    assert not {"left_out", "encoder"} & set(json.loads(call(*words, "--json")))


@pytest.mark.parametrize(
    "words",
    [
        ("traffic", "DeepSeek-V3", "--layout", "tp=8,dp=2,ep=16", "--routing", "power_law:1.2"),
        (*EPD, "--encoder-tokens", "576"),
        ("traffic", "Llama-3.1-405B", "--layout", "tp=8,cp=2,pp=2", "--phase", "prefill", "--tokens", "131072"),
        ("traffic", "Qwen3-30B-A3B", "--layout", "tp=8,dp=4", "--framework", "sglang"),
        ("traffic", "Llama-3.1-8B", "--layout", "tp=8", "--decode-layout", "tp=4", "--phase", "handoff"),
        ("traffic", "Llama-3.1-8B", "--layout", "tp=1"),
        ("groups", "--layout", "tp=8,dp=16,ep=128"),
        ("groups", "--world", "16", "--layout", "tp=2,pp=2,cp=2,ep=4", "--framework", "megatron"),
        ("groups", "--layout", "tp=8,pp=16,dp=8"),
    ],
    ids=lambda words: " ".join(words[:4]),
)
def test_tables_fit_a_terminal_of_80_columns(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    output = call(*words)
    assert output.strip()
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


def test_table_says_what_does_not_cross_and_why():
    output = call("traffic", "Llama-3.1-8B", "--layout", "dp=8")
    assert "nothing crosses the wire" in output
    assert "replicas share no tensor" in output


def test_groups_json_is_the_engine_s_order():
    words = ("groups", "--world", "16", "--layout", "tp=2,pp=2,cp=2,ep=4", "--framework", "megatron", "--json")
    found = json.loads(call(*words))
    assert found["tp"] == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert found["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert found["dp"][:2] == [[0, 4], [1, 5]]


def test_groups_follow_an_order_string():
    found = json.loads(call("groups", "--layout", "tp=2,dp=2,pp=2", "--order", "tp-pp-dp", "--json"))
    assert found["pp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("traffic", "nope"), "unknown model: 'nope'; allowed"),
        (("traffic", "Llama-3.1-8B", "--batch", "-3"), "batch must be a whole number from 1: -3"),
        (("traffic", "Llama-3.1-8B", "--context", "0"), "context must be"),
        (("traffic", "Llama-3.1-8B", "--phase", "prefill", "--tokens", "-1"), "tokens must be"),
        (("traffic", "Llama-3.1-8B", "--layout", "tp=3"), "divisible by tensor parallel size"),
        (("traffic", "Llama-3.1-8B", "--layout", "tp:3"), "not a degree: 'tp:3'"),
        (("traffic", "Llama-3.1-8B", "--framework", "triton"), "unknown framework: 'triton'; allowed: vllm"),
        (("traffic", "Llama-3.1-8B", "--phase", "training"), "unknown phase"),
        (("traffic", "Llama-3.1-8B", "--routing", "zipf:1"), "unknown routing"),
        (("traffic", "Llama-3.1-8B", "--dtype", "int3"), "unknown dtype"),
        (("traffic", "Llama-3.1-8B", "--decode-layout", "tp=2"), "belongs to --phase handoff"),
        (("traffic", "Llama-3.1-8B", "--decode-instances", "2"), "belongs to --phase handoff, the phase is decode: 2"),
        (("traffic", "Llama-3.1-8B", "--block-tokens", "32"), "--block-tokens belongs to --phase handoff"),
        (("traffic", "Llama-4-Maverick", "--encoder-tokens", "9"), "--encoder-tokens belongs to --phase handoff"),
        ((*EPD, "--encoders", "2"), "need --encoder-tokens"),
        ((*EPD, "--encoder-through-first"), "need --encoder-tokens"),
        ((*EPD, "--encoder-tokens", "9", "--encoders", "0"), "--encoders must be a whole number from 1 to"),
        ((*EPD, "--encoder-tokens", "9", "--encoder-through-first"), "in sglang only: vllm"),
        (("groups", "--world", "16", "--layout", "tp=3"), "not divisible"),
        (("groups", "--world", "16", "--layout", "tp=4,dp=2"), "do not multiply to the world"),
        (("groups", "--world", "16", "--layout", "tp=8", "--framework", "sglang"), "do not multiply to the world"),
        (("groups", "--world", "8", "--layout", "tp=8,dp=2"), "do not multiply to the world"),
        (("groups", "--world", "-1", "--layout", "tp=1"), "world must be"),
        (("groups", "--layout", "tp=2", "--framework", "vllm", "--order", "tp-dp"), "belongs to megatron only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_refused_with_what_is_allowed(words, message):
    assert message in refused(*words)


def test_configuration_without_what_is_needed(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 64}')
    assert "lacks num_hidden_layers" in refused("traffic", str(path))


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["traffic", "DeepSeek-V3", "--layout", "tp=8,dp=2,ep=16", "--json"],
        ["traffic", "Llama-3.1-8B", "--layout", "tp=2"],
        ["groups", "--layout", "tp=2,pp=2"],
    ],
    ids=lambda words: words[0],
)
def test_planning_loads_nothing_heavy(words):
    code = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'cupy'):\n"
        "    sys.modules[name] = None\n"
        "from crosstraffic.cli import app\n"
        f"try:\n    app({words!r})\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'mpi4py', 'cupy', 'pandas', 'scipy', 'matplotlib'}\n"
        "loaded = {name for name, module in sys.modules.items() if module is not None and name in heavy}\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_exit_code_of_bad_use():
    code = "from crosstraffic.cli import main; import sys; sys.argv = ['crosstraffic', 'traffic', 'nope']; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "error: model: unknown model" in done.stderr
