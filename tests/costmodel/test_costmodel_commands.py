"""fit, predict and validate from the command line, good and bad."""

import json

import jsonschema
import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.costmodel.model import load, schema_text
from crosstraffic.errors import UsageError

SCHEMA = "docs/schemas/model.schema.json"


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def fitted(exact_run):
    result = call("fit", exact_run.path)
    assert result.exit_code == 0, result.output
    return exact_run.path / "model.json"


def test_the_schema_in_the_repository_is_current(request):
    path = request.config.rootpath / SCHEMA
    assert path.read_text() == schema_text(), f"{SCHEMA} is out of date: write schema_text() there"


def test_fit_writes_what_the_schema_says(fitted):
    jsonschema.validate(json.loads(fitted.read_text()), json.loads(schema_text()))


def test_predict_prints_the_design_s_shape(fitted):
    result = call("predict", fitted, "--stream", "dp.all_reduce=1MiB", "--stream", "cp.ring", "--json")
    found = json.loads(result.stdout)
    assert [row["name"] for row in found["streams"]] == ["dp.all_reduce", "cp.ring"]
    assert set(found["streams"][0]) == {
        "name", "alone_s", "together_s", "low_s", "high_s", "slowdown", "valid", "why",
    }  # fmt: skip
    assert found["step_s"] is None
    step = json.loads(call("predict", fitted.parent, "--step", "decode", "--json").stdout)
    assert step["low_s"] <= step["step_s"] <= step["high_s"]


def test_a_stream_measured_under_another_name_keeps_its_own_size(fitted):
    model = load(fitted)
    block = {"repeat": 1, "tasks": [{"stream": "dp.all_reduce", "payload_bytes": 4096, "called": "tp.logits"}]}
    step = {"name": "prefill", "phase": "prefill", "lanes": [[block]]}
    aliases = {"prefill.tp.logits": "dp.all_reduce", "decode.tp.logits": "dp.all_reduce"}
    model = model.model_copy(update={"aliases": aliases, "steps": (*model.steps, step)})
    assert model.real_bytes("prefill.tp.logits") == 4096 != model.real_bytes("dp.all_reduce")
    with pytest.raises(ValueError, match=r"size of decode\.tp\.logits is not known"):
        model.real_bytes("decode.tp.logits")
    with pytest.raises(ValueError, match=r"known: tp\.all_reduce"):
        model.real_bytes("nobody")


def test_a_bandwidth_that_no_point_shows_is_not_told(fitted, exact_run, monkeypatch):
    found = call("fit", exact_run.path)
    assert "not determined" not in found.stderr
    model = load(fitted)
    links = {name: link.model_copy(update={"measured": False}) for name, link in model.solo["isolated"].links.items()}
    solo = {"isolated": model.solo["isolated"].model_copy(update={"links": links})}
    monkeypatch.setattr("crosstraffic.costmodel.fit.fit_runs", lambda runs: model.model_copy(update={"solo": solo}))
    assert "not determined" in call("fit", exact_run.path).stderr


def test_tables_fit_eighty_columns(fitted, exact_run):
    printed = [
        call("predict", fitted, "--stream", "dp.all_reduce=1MiB", "--stream", "ep.dispatch", "--mode", "one_shot"),
        call("predict", fitted, "--step", "decode"),
        call("validate", exact_run.path),
    ]
    for result in printed:
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines())) <= 80


def test_validate_prints_the_design_s_shape(exact_run):
    found = json.loads(call("validate", exact_run.path, "--json").stdout)
    assert set(found) >= {"hold_out", "noise", "models", "by_op", "by_size", "kinds"}
    assert set(found["kinds"]) == {"sizes", "pairs", "triples", "steps"}
    assert found["kinds"]["pairs"]["in_sample"]
    assert not found["kinds"]["triples"]["in_sample"]
    for block in found["kinds"].values():
        assert block["models"]["ours"]["median_ape"] < 0.01
        assert block["models"]["ours"]["num_points"] > 0
        assert set(block["models"]["ours"]) == {"median_ape", "p90_ape", "coverage_90", "num_points"}
    assert set(found["models"]) == {"ours", "alpha_beta", "linear", "loglog"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fit", "nowhere"), "not a run folder"),
        (("validate", "nowhere"), "not a run folder"),
        (("predict", "nowhere", "--step", "x"), "no model file"),
        (("predict", "MODEL", "--stream", "nobody"), "known: tp.all_reduce, dp.all_reduce"),
        (("predict", "MODEL", "--stream", "cp.ring=12parsecs"), "not a size"),
        (("predict", "MODEL", "--step", "nothing"), "known: decode"),
        (("predict", "MODEL", "--stream", "cp.ring", "--mode", "sometimes"), "allowed: steady, one_shot"),
        (("predict", "MODEL"), "streams: tp.all_reduce"),
        (("validate", "RUN", "--hold-out", "luck"), "allowed: sizes, pairs, triples, steps, all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_said_and_refused(fitted, words, message):
    named = {"MODEL": fitted, "RUN": fitted.parent}
    result = call(*(named.get(word, word) for word in words))
    assert isinstance(result.exception, UsageError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


def test_a_run_without_usable_records_is_refused(lab, tmp_path):
    run = lab.write_run(tmp_path / "run", (0, 0, 1, 1), lab.streams(), [])
    result = call("fit", run.path)
    assert isinstance(result.exception, UsageError)
    assert "no usable records" in str(result.exception)
