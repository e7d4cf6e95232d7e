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
    ("dp", "pp"): (NATURAL, NATURAL, NATURAL, NATURAL),
    ("dp", "ep"): (PART, PART, PART, PART),
    ("pp", "cp"): (REFUSED, NATURAL, NATURAL, NATURAL),
    ("cp", "ep"): (PART, PART, PART, REFUSED),
    ("ep", "pd"): (NATURAL, NATURAL, NATURAL, NATURAL),
}


@pytest.mark.parametrize("pair", EXPECTED, ids="+".join)
def test_verdicts_are_what_the_engines_do(pair):
    assert tuple(combination(*pair, framework).verdict for framework in TITLES) == EXPECTED[pair]


@pytest.mark.parametrize(
    ("first", "second", "framework", "rule"),
    [
        ("pp", "cp", "vllm", "PCP does not support PP yet"),
        ("dp", "cp", "vllm", "PCP does not support data parallelism yet"),
        ("cp", "ep", "tensorrt_llm", "CP does not support MoE tp/ep yet"),
    ],
)
def test_a_refusal_has_the_engine_s_rule(first, second, framework, rule):
    found = combination(first, second, framework)
    assert found.pair is None
    assert rule in str(found.refusal)


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
