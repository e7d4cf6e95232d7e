"""``crosstraffic run`` from the outside: rank counts, bad input, budget, resume, share of measured time."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from simulated_runs import STREAMS, toml_of
from typer.testing import CliRunner, Result

from crosstraffic.cli import app
from crosstraffic.results.store import load_run, read_records, read_run_info

UNEVEN = {
    "name": "uneven",
    "op": "all_to_all_v",
    "payload": 1,
    "matrix": [[0, 70001, 0], [0, 0, 0], [3, 12345, 8]],
}
SILENT_RANK = {
    "name": "silent",
    "op": "all_to_all_v",
    "payload": 1,
    "matrix": [[0, 40000, 0], [20000, 0, 0], [0, 0, 0]],
}
IDLE_RANK = {"name": "idle", "op": "kv_transfer", "payload": 2**16, "matrix": "halves"}
SMALL = (
    {"name": "reduce", "op": "all_reduce", "payload": 2**16},
    {"name": "gather", "op": "all_gather", "payload": 2**14},
)

transports = pytest.mark.parametrize(
    "transport", [pytest.param("mpi", marks=pytest.mark.mpi), pytest.param("gloo", marks=pytest.mark.gloo)]
)


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments), "--no-report"])


def written(path: Path, streams: Sequence[dict[str, Any]] = STREAMS, **measure: Any) -> Path:
    file = path / "test.toml"
    file.write_text(toml_of(streams, **measure))
    return file


def need(transport: str) -> None:
    pytest.importorskip("torch" if transport == "gloo" else "mpi4py")


@transports
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_any_number_of_ranks_runs_its_default(transport: str, num_ranks: int, tmp_path: Path) -> None:
    """A budget of seconds leaves points unmeasured on few processors: they say so, and the rest holds."""
    need(transport)
    folder = tmp_path / "run"
    result = command(
        "--ranks", num_ranks, "--transport", transport, "--budget", 8 if num_ranks == 8 else 3, "--output", folder
    )
    run = load_run(folder)
    assert run.info.status in ("complete", "incomplete"), result.output
    assert result.exit_code == (0 if run.info.status == "complete" else 1)
    assert run.info.world_size == num_ranks
    assert (run.info.scenario["name"] == "collectives") == (num_ranks in (1, 3, 5))
    assert len(run.placement) == num_ranks
    frame = run.frame
    assert set(frame["status"]) <= {"ok", "skipped", "invalid"}
    assert (frame["status"] == "ok").any()
    assert frame.loc[frame["status"] != "ok", "why"].notna().all()
    assert (frame.loc[frame["status"] == "invalid", "kind"] == "together").all()  # did not overlap: few processors
    ok = frame[frame["status"] == "ok"]
    assert (ok["time_median_s"] > 0).all()
    assert (ok.loc[ok["stream"] != "*", "num_verified_calls"] > 0).all()
    assert run.info.measured_s is not None
    assert run.info.wall_s is not None
    assert 0 < run.info.measured_s <= run.info.wall_s
    assert run.info.measured_share == pytest.approx(run.info.measured_s / run.info.wall_s)


@transports
@pytest.mark.parametrize("other", [SILENT_RANK, IDLE_RANK], ids=["a silent rank", "an idle rank"])
def test_uneven_and_zero_counts_and_ranks_without_a_message(
    transport: str, other: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 1 sends nothing, pairs have empty cells, a rank has no part at all: in every kind of loop."""
    need(transport)
    folder = tmp_path / "run"
    file = written(tmp_path, [UNEVEN, other], sizes=[500], triples=0, budget_s=6.0)
    result = command(file, "--ranks", 3, "--transport", transport, "--output", folder)
    frame = load_run(folder).frame
    assert set(frame["status"]) <= {"ok", "invalid", "skipped"}, result.output
    assert load_run(folder).info.status in ("complete", "incomplete")
    assert set(frame.loc[frame["status"] == "invalid", "kind"]) <= {"together"}
    assert {"isolated", "streaming"} <= set(frame["cadence"].dropna())
    row = frame[(frame["stream"] == "uneven") & (frame["payload_bytes"] == 70001)].iloc[0]
    assert row["logical_bytes"] == 70001 + 3 + 12345 + 8
    assert row["self_bytes"] == 8
    assert row["max_egress_bytes"] == 70001
    assert row["max_ingress_bytes"] == 70001 + 12345


BAD_MODEL = 'name = "x"\nmodel = "{model}"\n[decode]\nlayout = "{layout}"\n'


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        pytest.param(BAD_MODEL.format(model="GPT-9", layout="tp=2"), ["--ranks", "2"], ["GPT-9", "Qwen3-8B"],
                     id="model"),
        pytest.param(None, ["no-such"], ["no such scenario: 'no-such'", "default-4"], id="scenario"),
        pytest.param(None, ["--transport", "carrier-pigeon"], ["'carrier-pigeon'", "mpi", "gloo"], id="transport"),
        pytest.param(BAD_MODEL.format(model="Qwen3-8B", layout="tp=3"), ["--ranks", "4"], ["tp", "3", "4"],
                     id="degrees"),
        pytest.param(BAD_MODEL.format(model="Qwen3-8B", layout="tp=2,zp=2"), ["--ranks", "4"], ["zp"], id="axis"),
        pytest.param(BAD_MODEL.format(model="CONFIG", layout="tp=2"), ["--ranks", "2"], ["config.json", "hidden_size"],
                     id="config.json without keys"),
        pytest.param(toml_of(sizes=[-64]), [], ["measure.sizes.0", "must not be negative: -64"], id="negative size"),
        pytest.param(toml_of(sizes=["many"]), [], ["not a size: 'many'", "64KiB"], id="malformed size"),
        pytest.param(toml_of(sizzes=[1]), [], ["measure.sizzes", "unknown key: measure.sizzes"], id="unknown key"),
        pytest.param(toml_of(together=[["reduce", "nobody"]]), ["--ranks", "4"], ["['nobody']", "known: reduce"],
                     id="mix"),
        pytest.param(toml_of(simulated="wind = 3"), ["--transport", "simulated", "--ranks", "4"], ["wind", "allowed"],
                     id="simulated world"),
        pytest.param(toml_of(), ["--budget", "0"], ["--budget must be more than 0 seconds", ": 0"], id="budget 0"),
        pytest.param(toml_of(), ["--budget", "nan"], ["--budget must be more than 0 seconds"], id="budget nan"),
        pytest.param(toml_of(), ["--ranks", "0"], ["--ranks", "equal to 1"], id="ranks 0"),
        pytest.param(toml_of(), ["--ranks", "2"], ["ranks [2, 3] are outside"], id="too few ranks"),
        pytest.param(None, ["default-4", "--ranks", "3"], ["laid out for 4 ranks, not 3"], id="ranks of the scenario"),
        pytest.param(toml_of(), ["--ranks", "4", "--model", "Qwen3-8B"], ["no model that --model"],
                     id="model for none"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_written(
    text: str | None, options: list[str], message: list[str], tmp_path: Path
) -> None:
    arguments = list(options)
    if text is not None:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
        file = tmp_path / "test.toml"
        file.write_text(text.replace("CONFIG", str(config)))
        arguments.insert(0, str(file))
    before = sorted(tmp_path.iterdir())
    result = command(*arguments, "--output", tmp_path / "run")
    assert result.exit_code == 2 or getattr(result.exception, "exit_code", None) == 2, result.output
    said = result.stderr + str(result.exception)
    assert not [part for part in message if part not in said], said
    assert sorted(tmp_path.iterdir()) == before


def test_the_exit_code_of_bad_input_is_2_for_the_shell(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "crosstraffic.cli", "run", "no-such", "--output", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: no such scenario: 'no-such'")
    assert not (tmp_path / "run").exists()


def simulated(path: Path, *options: str | Path, **measure: Any) -> Result:
    file = written(path, STREAMS[:2], **{"sizes": [4096], "budget_s": 0.2, **measure})
    return command(file, "--ranks", "4", "--transport", "simulated", *options)


def exit_code_of(result: Result) -> int:
    return getattr(result.exception, "exit_code", result.exit_code) if result.exception else result.exit_code


def of_another_run(folder: Path) -> None:
    folder.mkdir()
    assert simulated(folder.parent, "--output", folder / "run").exit_code == 0
    for path in (folder / "run").iterdir():
        path.rename(folder / path.name)
    (folder / "run").rmdir()


def of_other_things(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_another_run, "is not empty"),
        (of_other_things, "is not empty"),
        (lambda folder: folder.write_text("a file"), "run"),
    ],
    ids=["another run", "other things", "a file"],
)
def test_a_folder_in_use_is_left_alone(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    make(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".toml"}
    result = simulated(tmp_path, "--output", folder)
    assert exit_code_of(result) == 2
    assert message in str(result.exception)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".toml"}
    assert after == before


@pytest.mark.parametrize(
    ("options", "measure", "message"),
    [
        (["--resume"], {}, "--resume needs --output"),
        (["--resume", "--output", "NOWHERE"], {}, "not a run folder"),
        (["--resume", "--output", "RUN"], {"sizes": [8192]}, "measured with another scenario, rank count or transport"),
        (["--resume", "--output", "RUN", "--seed", "7"], {}, "measured with another scenario"),
        (["--resume", "--output", "RUN", "--transport", "mpi"], {}, "measured with another scenario"),
    ],
    ids=["no folder", "no run", "another scenario", "another seed", "another transport"],
)
def test_only_the_same_run_is_resumed(
    options: list[str], measure: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert simulated(tmp_path, "--output", folder).exit_code == 0
    before = (folder / "run.json").read_bytes(), (folder / "records.jsonl").read_bytes()
    names = {"RUN": str(folder), "NOWHERE": str(tmp_path / "nowhere")}
    result = simulated(tmp_path, *(names.get(option, option) for option in options), **measure)
    assert exit_code_of(result) == 2
    assert message in str(result.exception)
    assert ((folder / "run.json").read_bytes(), (folder / "records.jsonl").read_bytes()) == before
    assert not (tmp_path / "nowhere").exists()


def test_a_budget_ends_the_run_and_resume_measures_only_the_rest(tmp_path: Path) -> None:
    """What the budget did not allow is skipped with the reason; --resume needs no more than the folder and a budget."""
    folder = tmp_path / "run"
    file = written(tmp_path, STREAMS, num_sizes=12, budget_s=0.1)
    result = command(file, "--ranks", "4", "--transport", "simulated", "--output", folder)
    first = read_run_info(folder)
    assert (result.exit_code, first.status) == (1, "incomplete")
    assert first.wall_s is not None
    assert 0.05 < first.wall_s < 0.2
    records = read_records(folder)[0]
    skipped = {record.point for record in records if record.status == "skipped"}
    assert skipped
    assert all("time budget" in (record.why or "") for record in records if record.status == "skipped")
    done = {record.point for record in records} - skipped
    assert done
    assert "incomplete: " in result.stderr
    assert f"--output {folder} --resume" in result.stderr

    again = command("--output", folder, "--resume", "--budget", "3")
    second = read_run_info(folder)
    assert (again.exit_code, second.status) == (0, "complete"), again.output
    assert second.run_id == first.run_id
    after = read_records(folder)[0]
    assert {record.status for record in after} == {"ok"}
    assert {record.point for record in after} == done | skipped
    assert len(after) == len({(r.point, r.kind, r.stream, r.baseline_of) for r in after})
    assert [record for record in after if record.point in done] == [r for r in records if r.point in done]
    assert second.wall_s is not None
    assert second.wall_s > first.wall_s


def test_a_complete_run_has_nothing_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert simulated(tmp_path, "--output", folder).exit_code == 0
    before = (folder / "records.jsonl").read_bytes()
    assert command("--output", folder, "--resume").exit_code == 0
    assert (folder / "records.jsonl").read_bytes() == before
    assert read_run_info(folder).status == "complete"


def test_json_is_all_that_stdout_holds(tmp_path: Path) -> None:
    result = simulated(tmp_path, "--output", tmp_path / "run", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)
