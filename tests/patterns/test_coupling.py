"""How parallelisms couple: dimensions, groups, resources, time, and the verdict that follows."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.errors import UsageError
from crosstraffic.patterns.coupling import coupling, pool_nodes
from crosstraffic.patterns.crossing import crossing, tied
from crosstraffic.patterns.degree_rules import degree_rule, handoff_rule
from crosstraffic.patterns.layout import Layout, parse_layout
from crosstraffic.patterns.load import group_calls, largest, shared, step_load
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_step, phase_streams
from crosstraffic.patterns.wire import wire_matrix
from crosstraffic.patterns.workload import Workload


def couple(model, layout, framework="vllm", *, decode=None, **work):
    workload = Workload(**{"phase": "decode", "batch": 8, **work})
    other = None if decode is None else parse_layout(decode)
    return coupling(load_model(model), parse_layout(layout), workload, framework, decode_layout=other)


def pair_of(found, first, second):
    return next(pair for pair in found.pairs if {pair.first.name, pair.second.name} == {first, second})


def test_tensor_and_data_parallelism_compose_freely():
    pair = pair_of(couple("Llama-3.1-70B", "tp=4,dp=2"), "tp", "dp")
    assert (pair.verdict, pair.crossing.lie, pair.dimensions) == ("natural", "one rank", "different")
    assert pair.shared == ()
    assert pair.overlap == "nothing"


def test_attention_data_parallelism_with_experts_on_8_ranks_is_8_ranks_and_not_64():
    found = couple("DeepSeek-V3", "dp=8,ep=8")
    assert len(found.nodes) == 8
    uses = {use.name: use for use in found.uses}
    assert (uses["dp"].takes_ranks, uses["ep"].takes_ranks) == (True, False)
    pair = pair_of(found, "dp", "ep")
    assert (pair.verdict, pair.crossing.lie) == ("part of the other", "equal")
    assert "ep 8 and dp 8 are on 8 ranks, not 64" in pair.why


def test_experts_and_handoff_are_orthogonal_and_fight_for_the_network():
    found = couple("DeepSeek-V3", "tp=8,dp=2,ep=16", decode="tp=4,dp=8,ep=32")
    pair = pair_of(found, "ep", "pd")
    assert (pair.verdict, pair.crossing.common, pair.overlap) == ("natural", 1, "together")
    assert pair.shared[0].resource[0] == "nic_ingress"
    assert min(pair.shared[0].num_bytes) > 0
    assert "both load the network at the same time" in pair.why
    assert len(found.nodes) == 16 + 32
    assert {found.nodes[rank] for rank in range(16)} & {found.nodes[rank] for rank in range(16, 48)} == set()


def test_sequence_parallelism_is_a_part_of_tensor_parallelism():
    found = couple("Llama-3.1-8B", "tp=4,cp=2", "megatron", phase="prefill", sequence_parallel=True)
    assert pair_of(found, "tp", "sp").verdict == "part of the other"
    assert pair_of(found, "tp", "cp").verdict == "natural"
    pair = pair_of(found, "sp", "cp")
    assert (pair.verdict, pair.dimensions) == ("coupled", "same")


def test_half_batches_overlap_and_the_default_schedule_does_not():
    work = {"phase": "decode", "batch": 64}
    assert pair_of(couple("DeepSeek-V3", "tp=2,dp=4,ep=8", **work), "tp", "ep").overlap == "serial"
    assert pair_of(couple("DeepSeek-V3", "tp=2,dp=4,ep=8", two_batch=True, **work), "tp", "ep").overlap == "together"


def test_nothing_in_use_is_no_pair():
    assert couple("Llama-3.1-8B", "tp=1").pairs == ()


@pytest.mark.parametrize(
    ("model", "layout", "framework", "work"),
    [
        ("Qwen3-30B-A3B", "tp=4,pp=2,dp=2", "vllm", {}),
        ("Qwen3-30B-A3B", "tp=8,dp=4,ep=32", "vllm", {}),
        ("DeepSeek-V3", "tp=2,cp=3,ep=6", "vllm", {"phase": "prefill", "tokens": 510}),
        ("DeepSeek-V3", "tp=2,cp=2", "vllm", {"phase": "prefill", "tokens": 512}),
        ("Qwen3-30B-A3B", "tp=2,cp=2,pp=2,ep=4,dp=2", "megatron", {"phase": "prefill", "tokens": 512}),
        ("Qwen3-30B-A3B", "tp=8,dp=4,ep=8", "sglang", {}),
        ("Llama-3.1-8B", "tp=4,cp=2", "sglang", {"phase": "prefill", "tokens": 512}),
        ("Kimi-K3", "tp=3,pp=3", "megatron", {"num_micro_batches": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loads_add_up_to_the_whole_step(model, layout, framework, work):
    found = couple(model, layout, framework, **work)
    setting = found.setting
    asked = (setting.shape, setting.layout, setting.workload, framework)
    streams = phase_streams(*asked)
    calls = group_calls(phase_step(*asked, streams), streams)
    expected: dict[int, int] = {}
    for stream in streams:
        for index, count in enumerate(calls[stream.name]):
            sent = wire_matrix(stream, index).sum(axis=1)
            for rank, amount in zip(stream.groups[index], sent.tolist(), strict=True):
                expected[rank] = expected.get(rank, 0) + count * amount
    told: dict[int, int] = {}
    for use in found.uses:
        for (kind, rank), amount in use.load.items():
            if kind == "port_egress":
                told[rank] = told.get(rank, 0) + amount
    assert told == {rank: amount for rank, amount in expected.items() if amount}
    assert sorted(stream.name for use in found.uses for stream in use.streams) == sorted(
        stream.name for stream in streams
    )


def test_streams_of_a_pattern_without_a_degree_are_somebody_s():
    found = couple("DeepSeek-V3", "tp=2,cp=2,ep=4", phase="prefill", tokens=512)
    context = next(use for use in found.uses if use.name == "cp")
    assert "pcp.hidden_states" in {stream.name for stream in context.streams}
    cut = next(use for use in couple("Qwen3-30B-A3B", "tp=2,dp=2").uses if use.name == "etp")
    assert (cut.degree, cut.groups) == (4, ((0, 1, 2, 3),))
    assert {stream.name for stream in cut.streams} == {"ep.all_gather", "ep.reduce_scatter"}


@pytest.mark.parametrize("framework", ["sglang", "tensorrt_llm"])
def test_groups_of_attention_data_parallelism_hold_the_same_part(framework):
    found = couple("Qwen3-30B-A3B", "tp=4,dp=4,ep=4", framework)
    data = next(use for use in found.uses if use.name == "dp")
    assert (data.groups, data.takes_ranks) == (((0, 1, 2, 3),), False)
    found = couple("Llama-3.1-8B", "tp=2,replicas=3", framework)
    pair = pair_of(found, "tp", "replicas")
    assert pair.second.groups == ((0, 2, 4), (1, 3, 5))
    assert (pair.verdict, pair.crossing.lie) == ("natural", "one rank")


def test_degrees_of_sglang_that_share_tensor_parallel_ranks_are_tied():
    assert "dp_size * attn_cp_size" in str(degree_rule(Layout(tp=8, dp=2, cp=2), "sglang", "dp", "cp"))
    assert degree_rule(Layout(tp=8, dp=2, pp=2), "sglang", "dp", "pp") is None


@pytest.mark.parametrize(("framework", "rule"), [("vllm", "is not divisible by remote"), ("sglang", None)])
def test_pools_whose_degrees_must_fit(framework, rule):
    found = handoff_rule(load_model("Kimi-K3"), Layout(tp=2), Layout(tp=2), framework, "tp")
    assert found is None if rule is None else rule in str(found)
    assert handoff_rule(load_model("Llama-3.1-8B"), Layout(tp=2), Layout(tp=2), framework, "tp") is None


def test_decode_stages_of_sglang_are_those_of_prefill():
    found = handoff_rule(load_model("Llama-3.1-8B"), Layout(pp=4), Layout(pp=4), "sglang", "pp")
    assert "pp" in str(found)
    assert handoff_rule(load_model("Llama-3.1-8B"), Layout(pp=4), Layout(pp=4), "vllm", "pp") is None


def test_replicas_on_one_node_meet():
    apart = {"ranks_per_node": 2}
    assert pair_of(couple("Llama-3.1-8B", "tp=2,pp=2,dp=2"), "tp", "pp").overlap == "replicas"
    assert pair_of(couple("Llama-3.1-8B", "tp=2,pp=2", **apart), "tp", "pp").overlap == "serial"
    assert pair_of(couple("Llama-3.1-8B", "tp=2,pp=2", num_micro_batches=2), "tp", "pp").overlap == "replicas"


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]))
@settings(max_examples=60, deadline=None)
def test_crossings_agree_with_brute_force(order, one, two):
    first = tuple(tuple(range(start, start + one)) for start in range(0, 12, one))
    second = tuple(tuple(order[start : start + two]) for start in range(0, 12, two))
    common = [len(set(a) & set(b)) for a, b in itertools.product(first, second)]
    found = crossing(first, second)
    assert found.common == max(common)
    inside = all(any(set(a) <= set(b) for b in second) for a in first)
    around = all(any(set(b) <= set(a) for a in first) for b in second)
    expected = {(True, True): "equal", (True, False): "inside", (False, True): "around"}.get((inside, around))
    assert found.lie == (expected or ("one rank" if max(common) == 1 else "several ranks"))
    mirrored = {"inside": "around", "around": "inside"}
    assert crossing(second, first).lie == mirrored.get(found.lie, found.lie)
    assert len(set(found.example[0]) & set(found.example[1])) == found.common


def test_tied_sets_are_the_connected_ranks():
    assert [sorted(ranks) for ranks in tied([(0, 1), (2, 3), (1, 3), (5,)])] == [[0, 1, 2, 3], [5]]


def test_a_load_is_what_the_links_carry():
    streams = phase_streams(load_model("Llama-3.1-8B"), Layout(tp=4), Workload(phase="decode", batch=4), "vllm")
    nodes = [0, 0, 1, 1]
    load = step_load([(stream, [stream.calls_per_step]) for stream in streams], nodes)
    sent = {key: amount for key, amount in load.items() if key[0] == "port_egress"}
    assert len(sent) == 4
    assert load["nic_egress", 0] == load["nic_ingress", 1] > 0
    assert sum(sent.values()) == load["fabric", 0] + load["fabric", 1] + load["nic_egress", 0] + load["nic_egress", 1]
    assert largest(load, "port_egress") == max(sent.values())
    assert [one.resource[0] for one in shared(load, load)] == [
        "nic_egress", "nic_ingress", "port_egress", "port_ingress", "fabric",
    ]  # fmt: skip


def test_pools_lie_on_nodes_of_their_own():
    assert pool_nodes(8, 8, 8) == (0,) * 8 + (1,) * 8
    assert np.bincount(pool_nodes(12, 5, 8)).tolist() == [8, 4, 5]


def call(*words):
    result = CliRunner().invoke(app, ["coupling", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


WORDS = ("DeepSeek-V3", "--layout", "tp=8,dp=2,ep=16", "--decode-layout", "tp=4,dp=8,ep=32", "--batch", 64)


def test_the_table_reads_well_on_eighty_columns():
    text = call(*WORDS)
    assert max(map(len, text.splitlines())) <= 80
    assert "32 ranks = tp 4 x dp 8; ep 32 reuses them; the other pool has 16; 6 nodes" in text
    assert "share: what node 2 gets from other nodes" in text


def test_json_says_the_same():
    data = json.loads(call(*WORDS, "--json"))
    assert {"schema_version", "model", "layout", "framework", "phase", "parallelisms", "pairs"} <= set(data)
    assert [one["name"] for one in data["parallelisms"]] == ["tp", "ep", "dp", "pd"]
    assert {(one["first"], one["second"]) for one in data["pairs"]} == set(
        itertools.combinations(["tp", "ep", "dp", "pd"], 2)
    )


def test_nodes_decide_what_crosses():
    words = ("Llama-3.1-70B", "--layout", "tp=8", "--json")
    sent = [json.loads(call(*words, "--nodes", nodes))["parallelisms"][0]["bytes_per_step"] for nodes in (1, 2)]
    assert "nic_egress.0" not in sent[0]
    assert sent[1]["nic_egress.0"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give MODEL and --layout"),
        (("Llama-3.1-8B",), "give MODEL and --layout"),
        (("Llama-3.1-8B", "--layout", "tp=2", "--phase", "handoff"), "--phase must be prefill or decode"),
        (("Llama-3.1-8B", "--layout", "tp=4", "--nodes", 3), "4 ranks do not divide over 3 nodes"),
        (("Llama-3.1-8B", "--layout", "tp=4", "--nodes", 0), "--nodes must be a whole number from 1: 0"),
        (("Llama-3.1-8B", "--layout", "tp=4", "--nodes", 2, "--ranks-per-node", 2), "not both"),
        (("Llama-3.1-8B", "--layout", "tp=5"), "must be divisible by tensor parallel size"),
        (("Llama-3.1-8B", "--layout", "tp=4", "--framework", "torch"), "unknown framework: 'torch'"),
        (("nobody", "--layout", "tp=4"), "unknown model: 'nobody'"),
        (("Llama-3.1-8B", "--layout", "tp=4", "--run", "nowhere"), "nowhere"),
        (("Llama-3.1-8B", "--combinations"), "takes no MODEL"),
    ],
)
def test_bad_use_is_refused(words, message):
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, ["coupling", *map(str, words)], catch_exceptions=False)
