import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import a_record, run_dict

from crosstraffic.errors import EnvironmentRefused, UsageError
from crosstraffic.results.record import Record
from crosstraffic.results.run_info import RunInfo
from crosstraffic.results.store import RunFolder, load, load_run, load_samples, read_records


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "r1")
    made.write_run(run_dict())
    return made


def test_what_is_written_is_read_back(folder: RunFolder) -> None:
    raw = {"start_s": np.arange(6.0).reshape(3, 2), "end_s": np.arange(6.0).reshape(3, 2) + 1}
    record = a_record(samples=folder.write_samples("p-s", raw), payload_bytes=2**40, time_median_s=1e-6)
    folder.append(record)
    assert read_records(folder.path) == ([record], 0)
    frame = load(folder.path)
    assert list(frame.columns) == list(Record.model_fields)
    assert frame.loc[0, "mix"] == ("s",)
    assert frame.loc[0, "payload_bytes"] == 2**40
    assert frame["time_median_s"].dtype == "float64"
    assert frame.attrs == {"run_id": "r1", "num_torn_lines": 0}
    for source in (record, frame.loc[0]):
        back = load_samples(folder.path, source)
        assert {name: back[name].tolist() for name in back} == {name: raw[name].tolist() for name in raw}


def test_a_torn_last_line_is_counted_and_the_next_run_goes_on_after_it(folder: RunFolder) -> None:
    folder.append(a_record(point="a"))
    folder.close()
    path = folder.path / "records.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:70])
    assert load(folder.path)["point"].tolist() == ["a"]
    assert load(folder.path).attrs["num_torn_lines"] == 1
    with RunFolder.open(folder.path) as again:
        again.append(a_record(point="b"))
    frame = load(folder.path)
    assert frame["point"].tolist() == ["a", "b"]
    assert frame.attrs["num_torn_lines"] == 1


@pytest.mark.parametrize("cut", range(1, 200, 13))
def test_a_line_torn_anywhere_never_hides_what_came_before(folder: RunFolder, cut: int) -> None:
    folder.append(a_record(point="a"))
    folder.append(a_record(point="b"))
    path = folder.path / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert load(folder.path)["point"].tolist()[:1] == ["a"]
    assert len(load(folder.path)) + load(folder.path).attrs["num_torn_lines"] == 2


def test_a_failed_record_is_replaced_by_its_second_try_but_never_an_ok_one(folder: RunFolder) -> None:
    folder.append(a_record(point="a", status="timeout", why="stood still"))
    folder.append(a_record(point="a"))
    folder.append(a_record(point="a", num_samples=4))
    assert load(folder.path)["num_samples"].tolist() == [3, 4]


def test_wrong_data_is_replaced_only_by_what_was_measured_after_a_resume(folder: RunFolder) -> None:
    wrong = a_record(status="wrong_data", why="bytes")
    folder.append(wrong)
    folder.append(a_record())
    assert [record.status for record in read_records(folder.path)[0]] == ["wrong_data", "ok"]
    folder.write_run(RunInfo.model_validate(run_dict()).model_copy(update={"resumed_at": (2,)}))
    folder.append(a_record(point="q", status="wrong_data", why="bytes"))
    folder.append(a_record())
    found = [(record.point, record.status) for record in read_records(folder.path)[0]]
    assert found.count((wrong.point, "wrong_data")) == 0
    assert ("q", "wrong_data") in found


def test_a_whole_line_that_is_no_record_is_refused_with_its_number(folder: RunFolder) -> None:
    folder.append(a_record())
    with (folder.path / "records.jsonl").open("a") as file:
        file.write(json.dumps({"schema_version": 2}) + "\n")
    with pytest.raises(UsageError, match=r"records\.jsonl, line 2"):
        load(folder.path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda p: p.write_text("x"), "is a file", id="a file"),
        pytest.param(lambda p: (p.mkdir(), (p / "thesis.doc").write_text("x")), "not empty", id="somebody's folder"),
        pytest.param(
            lambda p: RunFolder.create(p, "other").write_run(run_dict("other")), "belongs to run other", id="other run"
        ),
        pytest.param(lambda p: (p.mkdir(), (p / "run.json").write_text("{")), "not a run", id="broken run.json"),
    ],
)
def test_a_folder_that_is_not_ours_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "out")
    with pytest.raises(UsageError, match=message):
        RunFolder.create(tmp_path / "out", "r1")


def test_its_own_folder_is_taken_up_again(folder: RunFolder) -> None:
    folder.append(a_record())
    folder.close()
    with RunFolder.create(folder.path, "r1") as again:
        again.append(a_record(point="q"))
    assert len(load(folder.path)) == 2


def test_a_second_writer_is_kept_out_and_told_who_writes(folder: RunFolder) -> None:
    folder.append(a_record())
    with pytest.raises(EnvironmentRefused, match=r"is being written by another run.*rank 0 is process \d+ on \w+"):
        RunFolder.create(folder.path, "r1")
    assert len(load(folder.path)) == 1
    folder.close()
    with RunFolder.create(folder.path, "r1") as again:
        assert again.is_locked


def test_a_file_system_without_locks_is_told(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder.close()
    with RunFolder.create(folder.path, "r1") as unlocked:
        assert not unlocked.is_locked


def test_a_full_disk_leaves_no_half_file_behind(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **fields: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(np, "savez", fail)
    with pytest.raises(OSError, match="no space"):
        folder.write_samples("p", {"a": np.zeros(2)})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        folder.write_text("report.html", "x")
    left = {path.name for path in folder.path.rglob("*") if path.is_file()}
    assert left == {"run.json", "records.jsonl"}


def test_a_run_of_another_id_is_not_written_into_the_folder(folder: RunFolder) -> None:
    with pytest.raises(ValueError, match="run_id"):
        folder.write_run(run_dict("r2"))


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden"])
def test_sample_names_cannot_leave_the_folder(folder: RunFolder, name: str) -> None:
    with pytest.raises(ValueError, match="samples name"):
        folder.write_samples(name, {"x": np.zeros(1)})
    with pytest.raises(UsageError):
        load_samples(folder.path, {"samples": f"../{name}/../../etc/passwd"})


def test_pickled_samples_are_refused(folder: RunFolder) -> None:
    np.savez(folder.path / "samples" / "bad.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UsageError, match="cannot read samples"):
        load_samples(folder.path, {"samples": "samples/bad.npz"})


def test_a_run_reads_back_whole(folder: RunFolder) -> None:
    run = load_run(folder.path)
    assert run.nodes == (0,)
    assert run.run["placement"][0]["host"] == "h"
    assert run.frame.empty
    assert not list(folder.path.glob(".*"))


def test_steps_of_unknown_streams_are_refused(folder: RunFolder) -> None:
    task = {"stream": "ghost", "payload_bytes": 1, "groups": None, "edge": None}
    lanes = [[{"repeat": 1, "tasks": [task]}]]
    folder.write_run(run_dict(steps=[{"name": "s", "phase": "decode", "lanes": lanes}]))
    with pytest.raises(UsageError, match="ghost"):
        load_run(folder.path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        load(tmp_path / "absent")


def test_a_record_of_a_stream_that_the_run_does_not_know_is_refused(folder: RunFolder) -> None:
    folder.append(a_record(stream="nobody.knows", mix=("nobody.knows",)))
    with pytest.raises(UsageError, match=r"does not know: nobody\.knows"):
        load_run(folder.path)
