"""Pairs of parallelisms on each engine, against what the engines are known to do; the page in docs/ is current."""

import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.patterns.combinations import PAIRS, TITLES, combination, combinations

NATURAL, PART, COUPLED, REFUSED = "natural", "part of the other", "coupled", "refused"
EXPECTED = {
    ("tp", "dp"): (NATURAL, NATURAL, PART, PART),
    ("tp", "pp"): (NATURAL, NATURAL, NATURAL, NATURAL),
    ("tp", "sp"): (PART, PART, REFUSED, REFUSED),
    ("tp", "dcp"): (PART, REFUSED, PART, REFUSED),
    ("tp", "ep"): (PART, PART, PART, PART),
    ("tp", "pd"): (COUPLED, NATURAL, NATURAL, NATURAL),
    ("dp", "pp"): (NATURAL, NATURAL, NATURAL, NATURAL),
    ("dp", "ep"): (PART, PART, PART, PART),
    ("dp", "cp"): (REFUSED, NATURAL, COUPLED, NATURAL),
    ("pp", "cp"): (REFUSED, NATURAL, NATURAL, NATURAL),
    ("pp", "ep"): (NATURAL, NATURAL, NATURAL, NATURAL),
    ("cp", "ep"): (PART, PART, PART, REFUSED),
    ("ep", "etp"): (REFUSED, COUPLED, COUPLED, COUPLED),
    ("ep", "pd"): (NATURAL, NATURAL, NATURAL, NATURAL),
    ("sp", "cp"): (COUPLED, COUPLED, REFUSED, REFUSED),
}


@pytest.mark.parametrize("pair", EXPECTED, ids="+".join)
def test_verdicts_are_what_the_engines_do(pair):
    assert tuple(combination(*pair, framework).verdict for framework in TITLES) == EXPECTED[pair]


@pytest.mark.parametrize(
    ("first", "second", "framework", "rule"),
    [
        ("pp", "cp", "vllm", "PCP does not support PP yet"),
        ("dp", "cp", "vllm", "PCP does not support data parallelism yet"),
        ("cp", "ep", "tensorrt_llm", "CP don't support MoE tp/ep yet"),
    ],
)
def test_a_refusal_has_the_engine_s_rule(first, second, framework, rule):
    found = combination(first, second, framework)
    assert found.pair is None
    assert rule in str(found.refusal)


@pytest.mark.parametrize("other", ["tp", "pp", "cp", "ep"])
def test_replicas_go_with_anything_where_dp_lies_inside_tp(other):
    first, second = ("tp", "dp") if other == "tp" else ("dp", other)
    for framework in ("sglang", "tensorrt_llm"):
        found = combination(first, second, framework)
        assert found.replicas is not None
        assert found.replicas.verdict == NATURAL
    assert combination(first, second, "megatron").replicas is None


def test_experts_and_handoff_meet_on_the_network_of_every_engine():
    for framework in TITLES:
        pair = combination("ep", "pd", framework).pair
        assert pair is not None
        assert (pair.overlap, pair.shared[0].resource[0]) == ("together", "nic_ingress")


def test_megatron_s_second_grid_crosses_the_first_in_every_way():
    found = combination("tp", "ep", "megatron")
    assert found.pair is not None
    ways = {found.pair.crossing.lie: found.verdict} | {other.lie: other.verdict for other in found.others}
    assert ways == {"equal": PART, "inside": PART, "around": PART, "one rank": COUPLED, "several ranks": COUPLED}
    assert found.verdicts == (PART, COUPLED)


def test_an_engine_that_takes_some_models_says_which_not():
    found = combination("tp", "cp", "vllm")
    assert (found.verdict, found.model) == (NATURAL, "DeepSeek-V3")
    assert "currently supports MLA models only" in str(found.but_for)


def test_every_pair_is_tried_on_every_engine_with_both_in_use():
    found = combinations()
    assert len(found) == len(PAIRS) * len(TITLES)
    for one in found:
        assert (one.pair is None) == (one.refusal is not None)
        if one.pair is not None:
            assert {one.pair.first.name, one.pair.second.name} == {one.first, one.second}
            assert min(one.pair.first.degree, one.pair.second.degree) > 1


def test_the_page_in_docs_is_current(request):
    page = request.config.rootpath / "docs" / "combinations.md"
    printed = CliRunner().invoke(app, ["coupling", "--combinations"], catch_exceptions=False).stdout
    assert page.read_text() == printed, "write it anew: crosstraffic coupling --combinations > docs/combinations.md"
