"""Streams together: closed forms, what must hold always, and factors that real machines need."""

import itertools

import numpy as np
import pytest

from crosstraffic.costmodel.fit import fit_alone, fit_runs
from crosstraffic.costmodel.model import Contention
from crosstraffic.costmodel.predict import predict_mix, predict_step
from crosstraffic.costmodel.together import gather_crowd, together_times
from crosstraffic.patterns.step import Block, Step, Task


@pytest.fixture(scope="module")
def model(lab, world, tmp_path_factory):
    streams = lab.streams()
    path = tmp_path_factory.mktemp("mix") / "run"
    step = lab.layered_step()
    return fit_alone([lab.write_run(path, world.nodes, streams, lab.alone_records(world, streams), steps=(step,))])


@pytest.mark.parametrize("mode", ["steady", "one_shot"])
@pytest.mark.parametrize("size", [256, 65536, 2**22], ids=str)
def test_times_together_are_those_of_a_world(model, lab, world, mode, size):
    streams = lab.streams()
    mixes = [*itertools.combinations(streams, 2), streams[:3], streams[1:5]]
    for mix in mixes:
        sized = [(one, size - size % 4) for one in mix]
        expected = world.together(sized, mode)
        found = together_times(model, [(one.name, payload) for one, payload in sized], mode)
        assert found == pytest.approx(expected, rel=0.03), [one.name for one in mix]


def test_never_faster_than_alone_nor_slower_than_one_after_the_other(model, lab):
    for mix in itertools.combinations([one.name for one in lab.streams()], 3):
        found = predict_mix(model, [(name, 2**20) for name in mix], "one_shot")
        total = sum(row["alone_s"] for row in found["streams"])
        for row in found["streams"]:
            assert row["slowdown"] >= 1 - 1e-9
            assert row["together_s"] <= total * (1 + 1e-9)
        assert found["whole_s"] == max(row["together_s"] for row in found["streams"])


def test_streams_that_share_nothing_do_not_slow(lab, world, tmp_path):
    streams = (lab.stream("a", "all_reduce", ((0, 1),)), lab.stream("b", "all_reduce", ((2, 3),)))
    run = lab.write_run(tmp_path / "run", world.nodes, streams, lab.alone_records(world, streams))
    found = predict_mix(fit_alone([run]), [("a", 2**20), ("b", 2**20)], "steady")
    assert [row["slowdown"] for row in found["streams"]] == pytest.approx([1.0, 1.0], rel=1e-3)


def test_like_groups_are_merged_without_changing_the_answer(lab, tmp_path):
    """32 pairs over 2 nodes beside a ring over all: three classes stand for 33 calls."""
    num_ranks = 64
    world = lab.World(nodes=(0,) * 32 + (1,) * 32)
    pairs = tuple((rank, rank + 32) for rank in range(32))
    streams = (lab.stream("a", "all_gather", pairs), lab.stream("b", "all_to_all", (tuple(range(num_ranks)),)))
    run = lab.write_run(
        tmp_path / "run", world.nodes, streams, lab.alone_records(world, streams, sizes=(2**12, 2**16, 2**20))
    )
    model = fit_alone([run])
    mix = [("a", 2**20), ("b", 2**20)]
    crowd = gather_crowd(model, mix, "one_shot", Contention())
    assert len(crowd.phases) == 2
    expected = world.together([(streams[0], 2**20), (streams[1], 2**20)], "one_shot")
    assert together_times(model, mix, "one_shot") == pytest.approx(expected, rel=0.03)


def test_a_busy_host_is_found_in_pairs_and_carried_to_triples(lab, tmp_path):
    """Two cores serve four ranks: whatever runs together, takes turns. Links alone cannot say that."""
    streams = (
        lab.stream("a", "all_reduce", ((0, 1),)), lab.stream("b", "all_reduce", ((2, 3),)),
        lab.stream("c", "all_to_all", ((0, 1, 2, 3),)),
    )  # fmt: skip

    class Turns(lab.World):
        def together(self, mix, mode, calls_wanted=14):
            turns = super().together
            alone = sorted((turns([part], "one_shot")[0], index) for index, part in enumerate(mix))
            if mode == "steady":
                return [len(mix) * next(time for time, at in alone if at == index) for index in range(len(mix))]
            ends, now, before = [0.0] * len(mix), 0.0, 0.0
            for place, (time_s, index) in enumerate(alone):
                now += (time_s - before) * (len(mix) - place)
                ends[index], before = now, time_s
            return ends

    world = Turns(nodes=(0, 0, 0, 0))
    size = {"a": 2**18, "b": 2**20, "c": 2**20}
    records = lab.alone_records(world, streams)
    records += lab.mix_records(world, itertools.combinations(streams, 2), size)
    model = fit_runs([lab.write_run(tmp_path / "run", world.nodes, streams, records)])
    assert min(model.contention.host_intensity.values()) > 0.8
    for mode in ("steady", "one_shot"):
        sized = [(one, size[one.name]) for one in streams]
        expected = world.together(sized, mode)
        found = [row["together_s"] for row in predict_mix(model, [(one.name, s) for one, s in sized], mode)["streams"]]
        assert found == pytest.approx(expected, rel=0.1)


def test_a_stream_that_starves_the_others_gets_its_weight(lab, tmp_path, world):
    streams = (lab.streams()[1], lab.streams()[4])
    size = {one.name: 2**20 for one in streams}
    records = lab.alone_records(world, streams) + lab.mix_records(world, [streams], size, modes=("steady",))
    starved = []
    for record in records:
        if record.kind == "together":
            factor = 2.5 if record.stream == "dp.all_reduce" else 0.7
            starved.append(record.model_copy(update={"time_median_s": record.time_median_s * factor}))
        else:
            starved.append(record)
    model = fit_runs([lab.write_run(tmp_path / "run", world.nodes, streams, starved)])
    sized = [(one.name, 2**20) for one in streams]
    slow, bulk = (row["slowdown"] for row in predict_mix(model, sized, "steady")["streams"])
    plain = [row["slowdown"] for row in predict_mix(model, sized, "steady", Contention())["streams"]]
    assert slow > 1.5 * plain[0]
    assert bulk < plain[1]


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ([("nobody", 1)], "unknown stream: 'nobody'; known: tp.all_reduce"),
        ([("cp.ring", -1)], "must not be negative: -1"),
        ([("cp.ring", 1), ("cp.ring", 2)], "another communication"),
    ],
    ids=["unknown", "negative", "twice"],
)
def test_bad_mixes_are_refused(model, mix, message):
    with pytest.raises(ValueError, match=message):
        predict_mix(model, mix, "steady")


def test_a_step_of_dependent_calls_is_their_sum(model, lab, world):
    step = lab.layered_step(num_layers=5)
    streams = {one.name: one for one in lab.streams()}
    expected = 5 * (world.alone(streams["tp.all_reduce"], 65536) + world.alone(streams["ep.dispatch"], 49152))
    assert predict_step(model, step)["step_s"] == pytest.approx(expected, rel=0.01)


def test_pipeline_boundaries_follow_each_other(model, world):
    tasks = tuple(Task(stream="pp.chain", payload_bytes=2**20, edge=edge) for edge in ((0, 1), (1, 2), (2, 3)))
    step = Step(name="x", phase="decode", lanes=((Block(repeat=1, tasks=tasks),),))
    intra = world.latency[0] + 2**20 / 8e9
    inter = world.latency[1] + 2**20 / 3e9
    assert predict_step(model, step)["step_s"] == pytest.approx(2 * intra + inter, rel=0.01)


def test_disjoint_groups_of_a_task_run_at_the_same_time(model, lab, world):
    one = lab.streams()[0]
    once = Task(stream=one.name, payload_bytes=2**20, groups=(0,))
    both = Task(stream=one.name, payload_bytes=2**20)
    alone_s = world.alone(one, 2**20)
    for tasks, expected in (((once,), alone_s), ((both,), alone_s), ((once, both), 2 * alone_s)):
        step = Step(name="x", phase="decode", lanes=((Block(repeat=1, tasks=tasks),),))
        assert predict_step(model, step)["step_s"] == pytest.approx(expected, rel=0.01)


def test_lanes_share_links(model, lab, world):
    names = ("dp.all_reduce", "cp.ring")
    lanes = tuple((Block(repeat=1, tasks=(Task(stream=name, payload_bytes=2**20),)),) for name in names)
    streams = {one.name: one for one in lab.streams()}
    expected = max(world.together([(streams[name], 2**20) for name in names], "one_shot"))
    assert predict_step(model, Step(name="x", phase="decode", lanes=lanes))["step_s"] == pytest.approx(
        expected, rel=0.01
    )


def test_a_hundred_layers_take_a_hundred_times_one(model, lab):
    one = predict_step(model, lab.layered_step(num_layers=1))["step_s"]
    assert predict_step(model, lab.layered_step(num_layers=128))["step_s"] == pytest.approx(128 * one, rel=1e-6)


def test_more_bytes_never_take_less_time(model, lab):
    for mode in ("steady", "one_shot"):
        times = [
            together_times(model, [("dp.all_reduce", int(size)), ("cp.ring", 2**16)], mode)[0]
            for size in np.geomspace(256, 2**24, 12)
        ]
        assert (np.diff(times) > -1e-12).all(), mode
