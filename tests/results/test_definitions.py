import json
import tomllib
from importlib.resources import files

import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.errors import UsageError
from crosstraffic.results.definitions import definition, definitions, definitions_block
from crosstraffic.results.record import ClockModel, Mismatch, Place, Record
from crosstraffic.results.run_info import LateRank, PlanInfo, RunInfo, TransportInfo

NESTED = {
    "": [Record, RunInfo],
    "mismatch.": [Mismatch],
    "placement.": [Place],
    "clocks.": [ClockModel],
    "late_ranks.": [LateRank],
    "plan.": [PlanInfo],
    "transport.": [TransportInfo],
}
FIELDS = [prefix + name for prefix, models in NESTED.items() for model in models for name in model.model_fields]
WORDS = ["payload_bytes", "algbw", "busbw", "bottleneck_bytes", "cadence", "steady", "one-shot", "overlap_fraction"]
WORDS += ["slowdown", "late_rank", "clock_error_s", "isolated", "streaming", "stream", "point", "record", "tier"]
WORDS += ["resource", "footprint", "scenario", "phase", "layout", "group", "pool", "node", "rank", "median_ape"]


@pytest.mark.parametrize("name", dict.fromkeys([*FIELDS, *WORDS]))
def test_every_field_and_word_has_a_definition(name: str) -> None:
    assert definition(name).definition.endswith((".", ")"))


def test_every_defined_field_exists() -> None:
    table = tomllib.loads((files("crosstraffic") / "results" / "definitions.toml").read_text(encoding="utf-8"))
    assert set(table["fields"]) <= set(FIELDS)
    assert not set(table["words"]) & set(FIELDS)


@pytest.mark.parametrize("name", [name for name in FIELDS if name.endswith(("_s", "_bytes", "_bytes_per_s"))])
def test_numbers_with_a_unit_in_their_name_say_it(name: str) -> None:
    unit = {"_bytes_per_s": "bytes/s", "_bytes": "bytes", "_s": "s"}
    suffix = next(suffix for suffix in unit if name.endswith(suffix))
    assert definition(name).unit == unit[suffix]


def test_an_unknown_name_lists_close_ones() -> None:
    with pytest.raises(UsageError, match="busbw_bytes_per_s"):
        definition("buswb_bytes_per_s")
    with pytest.raises(UsageError, match="without a name"):
        definition("zzzzqqq")


def test_the_block_for_run_json_is_text() -> None:
    block = definitions_block()
    assert set(block) == set(definitions())
    assert "order statistics" in block["time_low_s"]


def test_explain_prints_one_name_all_names_and_json() -> None:
    runner = CliRunner()
    assert "2(n-1)/n" in runner.invoke(app, ["explain", "busbw"]).stdout
    assert len(runner.invoke(app, ["explain"]).stdout.splitlines()) == len(definitions())
    assert json.loads(runner.invoke(app, ["explain", "slowdown", "--json"]).stdout)["unit"] == "ratio"
