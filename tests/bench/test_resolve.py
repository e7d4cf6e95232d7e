"""What a scenario comes to: streams measured once under one name, steps in those names, no byte gained or lost."""

from collections import Counter
from dataclasses import replace

import pytest
from simulated_runs import file_of, scenario_of

from crosstraffic.bench import resolve as module
from crosstraffic.bench.resolve import Scenario, resolve
from crosstraffic.bench.scenario import BUILT_IN, ScenarioFile, default_scenario, read_scenario
from crosstraffic.patterns.step import Step, Task, step_from_dict, step_to_dict
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.wire import wire_matrix


def pair_bytes(streams: dict[str, Stream], step: Step, lanes: int) -> Counter[tuple[int, int]]:
    """Bytes on the wire from rank to rank in a whole step, task by task, group by group."""
    total: Counter[tuple[int, int]] = Counter()

    def add(task: Task, count: int) -> None:
        stream = streams[task.stream]
        for index in range(len(stream.groups)) if task.groups is None else task.groups:
            matrix = wire_matrix(stream, index, task.payload_bytes)
            ranks = stream.groups[index]
            for i, source in enumerate(ranks):
                for j, destination in enumerate(ranks):
                    if matrix[i, j] and (task.edge is None or task.edge == (i, j)):
                        total[source, destination] += count * int(matrix[i, j])

    for lane in step.lanes[:lanes]:
        for block in lane:
            for task in block.tasks:
                add(task, block.repeat)
    return total


TEXTBOOK = ("tp4-dp2-llama-70b", "tp8-llama-405b", "dp8-ep8-qwen3-235b", "dp8-ep8-deepseek-v3")
MODELS = {
    "default-2": default_scenario(2),
    "default-4": default_scenario(4),
    "default-8": default_scenario(8),
    **{name: read_scenario(name) for name in TEXTBOOK},
    "subset groups": ScenarioFile.model_validate({
        "name": "x", "model": "Qwen3-8B",
        "prefill": {"layout": "tp=2,pp=2"}, "decode": {"layout": "tp=2,dp=2"},
        "handoff": {"prefill_layout": "tp=2", "decode_layout": "tp=2", "prefill_ranks": [0, 1], "decode_ranks": [2, 3]},
    }),
}  # fmt: skip
RANKS = {"default-2": 2, "default-4": 4, "default-8": 8, "subset groups": 4, **dict.fromkeys(TEXTBOOK, 8)}


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("*.toml")))
def test_every_shipped_scenario_puts_something_on_the_wire_of_its_ranks(name: str) -> None:
    file = read_scenario(name)
    for num_ranks in (2, 3, 8) if file.ranks is None else (file.ranks,):
        scenario = resolve(file, num_ranks)
        assert scenario.num_ranks == num_ranks
        assert all(stream.payload_bytes > 0 for stream in scenario.streams)
        assert {rank for stream in scenario.streams for group in stream.groups for rank in group} == set(
            range(num_ranks)
        )


def test_replicas_of_a_dense_model_measure_what_crosses_between_them() -> None:
    scenario = resolve(read_scenario("dp8-llama-8b"), 8)
    assert {stream.name: stream.payload_bytes for stream in scenario.streams} == {
        "pd.kv": 512 * 131_072,
        "kv.prefix": 64 * 131_072,
    }
    assert [step.name for step in scenario.steps] == ["handoff"]


@pytest.mark.parametrize("name", MODELS)
def test_steps_move_the_same_bytes_under_the_measured_names(name: str) -> None:
    scenario = resolve(MODELS[name], RANKS[name])
    measured = {stream.name: stream for stream in scenario.streams}
    phases = module._phases(MODELS[name], RANKS[name])
    assert [phase.step is not None for phase in phases] == [True] * len(scenario.steps)
    for phase, step in zip(phases, scenario.steps, strict=True):
        assert phase.step is not None
        own = {stream.name: stream for stream in phase.streams}
        before = pair_bytes(own, phase.step, len(phase.step.lanes))
        after = pair_bytes(measured, step, len(phase.step.lanes))
        assert before
        assert set(before) == set(after)
        for pair, count in before.items():
            assert after[pair] == pytest.approx(count, rel=1e-3)
    for step in scenario.steps:
        for lane in step.lanes:
            for task in (task for block in lane for task in block.tasks):
                assert task.payload_bytes in scenario.real_sizes[task.stream]


@pytest.mark.parametrize("name", MODELS)
def test_every_stream_of_the_model_has_a_measured_home(name: str) -> None:
    scenario = resolve(MODELS[name], RANKS[name])
    measured = {stream.name: stream for stream in scenario.streams}
    assert len(measured) == len(scenario.streams)
    for phase in module._phases(MODELS[name], RANKS[name]):
        for stream in phase.streams:
            home = measured[scenario.aliases.get(f"{phase.name}.{stream.name}", stream.name)]
            assert home.op == stream.op
            assert set(stream.groups) <= set(home.groups)
            assert stream.payload_bytes in scenario.real_sizes[home.name]


@pytest.mark.parametrize("name", MODELS)
def test_no_communication_is_measured_twice(name: str) -> None:
    streams = resolve(MODELS[name], RANKS[name]).streams
    for index, one in enumerate(streams):
        for other in streams[index + 1 :]:
            assert not one.same_communication(other)


def stream_of(name: str, groups: tuple[tuple[int, ...], ...], payload: int) -> Stream:
    one = scenario_of([{"name": name, "op": "all_reduce", "payload": payload}]).streams[0]
    return replace(one, groups=groups)


def test_groups_that_are_some_of_anothers_are_measured_with_it() -> None:
    """Task indices move to where the groups lie in the measured stream."""
    wide, narrow = stream_of("wide", ((0, 1), (2, 3), (4, 5)), 64), stream_of("narrow", ((4, 5), (0, 1)), 4096)
    assert [stream.name for stream in module._distinct([narrow, wide])] == ["wide"]
    tasks = (Task(stream="narrow", payload_bytes=4096), Task(stream="narrow", payload_bytes=8, groups=(0,)))
    step = Step(name="s", phase="decode", lanes=((module.Block(repeat=3, tasks=tasks),),))
    (lane,) = module._in_measured_names(step, [narrow], [wide]).lanes
    assert [(task.stream, task.groups, task.payload_bytes) for task in lane[0].tasks] == [
        ("wide", (2, 0), 4096),
        ("wide", (2,), 8),
    ]
    assert lane[0].repeat == 3


def test_all_groups_stay_all_groups() -> None:
    one, same = stream_of("one", ((0, 1), (2, 3)), 64), stream_of("same", ((0, 1), (2, 3)), 32)
    step = Step(
        name="s", phase="decode", lanes=((module.Block(repeat=1, tasks=(Task(stream="same", payload_bytes=32),)),),)
    )
    (lane,) = module._in_measured_names(step, [same], [one]).lanes
    assert lane[0].tasks[0].groups is None


def test_streams_of_one_name_and_another_shape_get_names_of_their_own() -> None:
    one, other = stream_of("x", ((0, 1),), 64), replace(stream_of("x", ((2, 3),), 64), phase="decode")
    assert [stream.name for stream in module._distinct([one, other])] == ["x", "decode.x"]


def test_streams_alike_are_merged_and_aliased() -> None:
    scenario = scenario_of([
        {"name": "a", "op": "all_reduce", "payload": 64},
        {"name": "b", "op": "all_reduce", "payload": 4096},
        {"name": "c", "op": "all_gather", "payload": 4096},
    ])  # fmt: skip
    assert [stream.name for stream in scenario.streams] == ["b", "c"]
    assert scenario.aliases == {"prefill.a": "b"}
    assert scenario.real_sizes == {"b": (4096, 64), "c": (4096,)}


def moved(scenario: Scenario, name: str) -> list[list[int]]:
    stream = next(stream for stream in scenario.streams if stream.name == name)
    return stream.matrix().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("matrix", "num_ranks", "expected"),
    [
        ("ring", 3, [[0, 90, 0], [0, 0, 90], [90, 0, 0]]),
        ("chain", 3, [[0, 90, 0], [0, 0, 90], [0, 0, 0]]),
        ("halves", 3, [[0, 90, 0], [0, 0, 0], [0, 0, 0]]),
        ("halves", 4, [[0, 0, 90, 0], [0, 0, 0, 90], [0, 0, 0, 0], [0, 0, 0, 0]]),
        ([[1, 2], [0, 0]], 2, [[1, 2], [0, 0]]),
    ],
    ids=["ring", "chain", "halves of 3", "halves of 4", "written out"],
)
def test_matrices_by_hand(matrix: object, num_ranks: int, expected: list[list[int]]) -> None:
    scenario = scenario_of([{"name": "x", "op": "kv_transfer", "payload": 90, "matrix": matrix}], num_ranks)
    assert moved(scenario, "x") == expected
    assert scenario.streams[0].payload_bytes == max(map(sum, expected))


def test_a_ring_of_one_rank_is_left_out() -> None:
    streams = [
        {"name": "r", "op": "send_recv", "payload": 9, "matrix": "ring"},
        {"name": "a", "op": "all_reduce", "payload": 8},
    ]
    assert [stream.name for stream in scenario_of(streams, 1).streams] == ["a"]
    with pytest.raises(ValueError, match=r"puts nothing on the wire with 1 rank\(s\)"):
        resolve(file_of(streams[:1]), 1)


ALL_REDUCE = {"name": "x", "op": "all_reduce", "payload": 64}


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({**ALL_REDUCE, "groups": [[0, 4]]}, r"stream x: ranks \[4\] are outside the run's ranks 0..3"),
        ({**ALL_REDUCE, "groups": [[0, 1], [1, 2]]}, "a rank is in two groups of one stream"),
        ({**ALL_REDUCE, "matrix": "ring"}, "stream x: op all_reduce takes no matrix"),
        ({**ALL_REDUCE, "op": "send_recv"}, "stream x: op send_recv needs matrix"),
        ({**ALL_REDUCE, "op": "send_recv", "matrix": [[0]]}, "one row for each rank of a group"),
        ({**ALL_REDUCE, "op": "send_recv", "matrix": [[0] * 4] * 4}, "stream x: its matrix moves no bytes"),
        ({**ALL_REDUCE, "op": "send_recv", "matrix": [[0, -1, 0, 0]] * 4}, "must not hold negative bytes"),
    ],
    ids=lambda value: "",
)
def test_wrong_streams_are_refused(stream: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenario_of([stream])


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names a stream twice: x, x"):
        scenario_of([ALL_REDUCE, {**ALL_REDUCE, "payload": 128}])


@pytest.mark.parametrize(
    ("changes", "num_ranks", "message"),
    [
        ({"ranks": 4}, 3, "laid out for 4 ranks, not 3"),
        ({"decode": {"layout": "tp=3"}, "model": "Qwen3-8B"}, 4, "3"),
        ({"decode": {"layout": "tp=4"}}, 4, "has phases but names no model"),
        ({"model": "Qwen3-8B", "handoff": {"prefill_layout": "tp=2", "decode_layout": "tp=2", "prefill_ranks": [0, 1],
          "decode_ranks": [2, 9]}}, 4, r"handoff ranks \[9\] are outside"),
    ],
    ids=["ranks", "degrees", "no model", "handoff ranks"],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused(changes: dict[str, object], num_ranks: int, message: str) -> None:
    file = ScenarioFile.model_validate({"name": "t", "stream": [ALL_REDUCE], **changes})
    with pytest.raises(ValueError, match=message):
        resolve(file, num_ranks)


def test_calls_keep_their_own_name_where_another_stream_is_measured_for_them() -> None:
    scenario = resolve(default_scenario(4), 4)
    decode = next(step for step in scenario.steps if step.name == "decode")
    called = {task.called for task in decode.tasks(0) if task.stream == "sp.all_gather"}
    assert called == {"tp.logits", "pp.all_gather"}
    assert step_from_dict(step_to_dict(decode)) == decode


def test_control_messages_are_measured_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Stream(
        name="dp.sync", pattern="dp", op="all_reduce", phase="decode", groups=((0, 3),), payload_bytes=64,
        calls_per_step=1, dtype="int32", formula="", source="", role="control",
    )  # fmt: skip
    monkeypatch.setattr(module, "control_streams", lambda *asked: (small,))
    for control, found in ((False, set()), (True, {"control"})):
        decode = {"layout": "tp=2,dp=2", "control": control}
        file = ScenarioFile.model_validate({"name": "x", "model": "Qwen3-30B-A3B", "decode": decode})
        assert {stream.role for stream in resolve(file, 4).streams} == {"data"} | found
