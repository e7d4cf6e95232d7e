"""Slowdowns by pattern: medians and ranges of a run's steady pairs, and where they are shown."""

import json

import numpy as np
import pytest
from synthetic import make_run, slowdown_of, streams
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.results.neighbours import pattern_slowdowns
from crosstraffic.results.store import load_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "one")


def test_medians_are_those_of_the_run(folder):
    run = load_run(folder)
    seen = pattern_slowdowns(run)
    assert {pattern for pair in seen for pattern in pair} == {stream.pattern for stream in streams()}
    for (slowed, beside), was in seen.items():
        assert was.low <= was.median <= was.high
        assert was.median == pytest.approx(slowdown_of(slowed, beside), rel=0.1)
    good = run.frame[(run.frame["kind"] == "together") & (run.frame["mode"] == "steady")]
    good = good[(good["mix"].map(len) == 2) & (good["status"] == "ok") & good["slowdown"].notna()]
    beside = [other for mix, own in zip(good["mix"], good["stream"], strict=True) for other in mix if other != own]
    of_pair = good[(good["pattern"] == "ep") & (np.array(beside) == "pd.kv")]
    was = seen["ep", "pd"]
    values = of_pair["slowdown"].to_numpy(dtype=float)
    assert (was.median, was.low, was.high) == pytest.approx((np.median(values), values.min(), values.max()))
    assert was.num_pairs == len(values) > 0


def test_a_stream_measured_under_another_name_counts_for_both_patterns(tmp_path):
    seen = pattern_slowdowns(load_run(make_run(tmp_path / "run", aliases={"decode.dcp.query": "tp.attention_output"})))
    assert seen["dcp", "pd"] == seen["tp", "pd"]
    assert {beside for slowed, beside in seen if slowed == "dcp"} >= {"pd", "ep"}


def test_a_coupling_shows_what_a_run_saw(folder):
    words = ["coupling", "Qwen3-30B-A3B", "--layout", "tp=2,cp=2,ep=4", "--framework", "megatron", "--phase", "prefill"]
    text = CliRunner().invoke(app, [*words, "--run", str(folder)], catch_exceptions=False).stdout
    was = pattern_slowdowns(load_run(folder))["cp", "ep"]
    told = f"seen: cp beside ep takes {was.median:.2f} times as long ({was.low:.2f} to {was.high:.2f}, {was.num_pairs}"
    assert told in text
    assert max(map(len, text.splitlines())) <= 80
    data = json.loads(CliRunner().invoke(app, [*words, "--run", str(folder), "--json"], catch_exceptions=False).stdout)
    (pair,) = (one for one in data["pairs"] if {one["first"], one["second"]} == {"cp", "ep"})
    assert pair["slowdown"]["cp beside ep"]["median"] == was.median


def test_the_page_of_pairs_has_a_column_of_what_a_run_saw(folder):
    words = ["coupling", "--combinations"]
    without = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    page = CliRunner().invoke(app, [*words, "--run", str(folder)], catch_exceptions=False).stdout
    assert "measured" not in without
    (row,) = (line for line in page.splitlines() if line.startswith("| [EP + PD]"))
    was = pattern_slowdowns(load_run(folder))["ep", "pd"]
    assert f"ep x{was.median:.2f} ({was.low:.2f}-{was.high:.2f})" in row
