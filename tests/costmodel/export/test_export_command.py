"""``crosstraffic export`` from the command line, and crosstraffic.json."""

import json
from pathlib import Path

import jsonschema
import pandas as pd
import pytest
from made_cells import a_target, block, everything, known_of, token_sizes
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.commands import export as command
from crosstraffic.costmodel.export.files import check_name, write_export
from crosstraffic.costmodel.export.galvatron import to_galvatron
from crosstraffic.costmodel.export.known import Known, Priced, pick_kernel, price
from crosstraffic.costmodel.export.ours import schema_text, to_ours
from crosstraffic.costmodel.export.planners import PLANNERS
from crosstraffic.errors import UsageError

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "export.schema.json"


def call(*words):
    return CliRunner().invoke(app, ["export", *map(str, words)])


@pytest.fixture
def source(monkeypatch) -> Known:
    """Let the command read a made system whatever file is named."""
    known = everything()
    monkeypatch.setattr(command, "_read", lambda sources, system, measured_only: (known, None, ("a note of the fit",)))
    return known


def test_without_a_planner_they_are_listed():
    result = call()
    assert result.exit_code == 0
    for name in PLANNERS:
        assert name in result.stdout


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_is_written_with_what_it_cannot_hold_beside(source, tmp_path, planner):
    result = call(planner, "any.json", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    written = [Path(line) for line in result.stdout.splitlines()]
    assert all(path.is_file() for path in written)
    found = json.loads((tmp_path / "out" / "crosstraffic.json").read_text())
    jsonschema.validate(found, json.loads(schema_text()))
    assert found["planner"] == planner
    assert found["notes"] == ["a note of the fit"]
    assert sum(len(curve["cells"]) for curve in found["curves"]) == len(source.cells)
    assert (len(written) > 1) == (planner != "ours")
    for remark in found["remarks"]:
        assert f"note: {remark}" in result.stderr


def test_defaults_follow_from_the_cells(source, tmp_path):
    assert call("aiconfigurator", "any.json", "--output", tmp_path / "out").exit_code == 0
    system = (tmp_path / "out" / "made.yaml").read_text()
    assert "num_gpus_per_node: 8" in system
    assert 'nccl_version: "2.99"' in system


def test_the_base_system_is_the_installed_one(source, tmp_path):
    pytest.importorskip("aiconfigurator_core")
    words = ("aiconfigurator", "any.json", "--output", tmp_path / "out", "--base-system")
    assert call(*words, "h100_sxm").exit_code == 0
    assert "sm_version: 90" in (tmp_path / "out" / "made.yaml").read_text()
    result = call(*words, "abacus")
    assert "it has a100_pcie" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("abacus", "x"), "unknown planner: 'abacus'; allowed: aiconfigurator, vidur"),
        (("vidur",), "nothing to export to vidur"),
        (("vidur", "x"), "--output DIR"),
        (("vidur", "x", "--output", "OUT", "--system", "../up"), "no '..': '../up'"),
        (("vidur", "x", "--output", "OUT", "--system", "a/b"), "system may have letters"),
        (("aiconfigurator", "x", "--output", "OUT", "--framework", "tgi"), "allowed: vllm, sglang, trtllm"),
        (("aiconfigurator", "x", "--output", "OUT", "--nccl-version", ".."), "nccl-version may have letters"),
        (("aiconfigurator", "x", "--output", "OUT", "--ranks", "8,x"), "group sizes separated by commas"),
        (("aiconfigurator", "x", "--output", "OUT", "--ranks", "1"), "at least 2 ranks: 1"),
        (("aiconfigurator", "x", "--output", "OUT", "--inter-node-bandwidth", "fast"), "not a size"),
        (("vidur", "x", "--output", "OUT", "--kernel", "abc"), "no cells of kernel 'abc' for all_reduce; measured:"),
        (("astra-sim", "x", "--output", "OUT", "--topology", "Torus"), "allowed: Switch, Ring"),
        (("galvatron", "x", "--output", "OUT", "--overlap-coefficient", "0.5"), "1 or more: 0.5"),
        (("galvatron", "x", "--output", "OUT", "--gpus-per-node", "0"), "at least 1: 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_use_is_said_and_refused(source, tmp_path, words, message):
    result = call(*(tmp_path / "out" if word == "OUT" else word for word in words))
    assert isinstance(result.exception, UsageError), result.output
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_things_is_left_alone(source, tmp_path):
    (tmp_path / "mine").write_text("")
    result = call("ours", "any.json", "--output", tmp_path)
    assert "is not empty" in str(result.exception)
    assert not (tmp_path / "crosstraffic.json").exists()
    assert call("ours", "any.json", "--output", tmp_path, "--force").exit_code == 0
    assert "is a file" in str(call("ours", "any.json", "--output", tmp_path / "mine").exception)


def test_a_model_without_cells_is_refused(tmp_path, monkeypatch):
    from crosstraffic.costmodel.export import source as origin

    class Bare:
        cells = None

    with pytest.raises(ValueError, match="knows no cells"):
        origin.known_of_model(Bare(), None)


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", "a/b", "a b", "a\n", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_bad_name_is_no_part_of_a_path(name, tmp_path):
    with pytest.raises(ValueError, match="letters, digits"):
        check_name("system", name)
    if "/" not in name:
        with pytest.raises(ValueError, match="letters, digits"):
            write_export(tmp_path / "out", {"good": b"", f"a/{name}/b": b""})
        assert not (tmp_path / "out").exists()


def test_the_schema_in_the_repository_is_current():
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), f"write schema_text() to {SCHEMA.name}"


def test_provenance_of_numbers_without_a_column():
    known = everything()
    made = to_galvatron(known, a_target())
    found = json.loads(to_ours(known, "galvatron", made, crosstraffic="1").files["crosstraffic.json"])
    by_key = {row["key"]: row for row in found["values"]}
    assert by_key["allreduce_size_8_32MB_time"]["source"] == "measured"
    assert by_key["allreduce_size_8_1MB_time"]["source"] == "model"
    for row in found["values"]:
        assert row["low"] < row["value"] < row["high"]


def test_skew_and_what_is_not_trusted_are_kept():
    skewed = block("ep_dispatch", (8,), kernel="deepep_ll", parameters="experts=8,skew=2.5", sizes=token_sizes(1, 2))
    bad = block("all_reduce", (2,))
    known = known_of(skewed, bad)
    honest = known.predict

    def doubting(cells):
        answer = honest(cells)
        doubted = cells["op"] == "all_reduce"
        return answer.assign(valid=answer["valid"] & ~doubted, why=answer["why"].where(~doubted, "contradictory"))

    known = Known(system="made", library="", cells=known.cells, predict=doubting)
    found = json.loads(to_ours(known, "ours", crosstraffic="1").files["crosstraffic.json"])
    assert [curve["skew"] for curve in found["curves"]] == [2.5]
    assert found["left_out"] == {"contradictory": len(bad)}


def test_reasons_are_told_once_whatever_the_curve():
    counts = {"all_reduce, 2 ranks: too far": 3, "all_reduce, 4 ranks: too far": 4, "a new tier": 1}
    assert Priced(rows=pd.DataFrame(), left_out=counts).remarks == (
        "7 cells left out: too far",
        "1 cells left out: a new tier",
    )


def test_measured_times_win_over_predicted_ones():
    known = everything()
    priced = price(known, known.cells)
    assert priced.left_out == {}
    assert priced.rows["time_s"].tolist() == known.cells["time_s"].tolist()
    assert set(priced.rows["source"]) == {"measured"}


def test_one_kernel_is_named_where_several_were_measured():
    cells = known_of(block("all_reduce", (2,), kernel="mpi"), block("all_reduce", (2,), kernel="gloo")).cells
    with pytest.raises(ValueError, match="name one with --kernel: gloo, mpi"):
        pick_kernel(cells, None, ("all_reduce",))
    assert pick_kernel(cells, "gloo", ("all_reduce",)) == "gloo"
