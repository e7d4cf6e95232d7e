from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import notes
from crosstraffic.patterns.schedule import batches_in_flight, bubble, decode_utilisation, num_messages, token_time_s
from crosstraffic.patterns.workload import Workload

COUNTS = st.integers(1, 40)


def test_n19_bubble():
    assert bubble(4, 8) == Fraction(3, 11)
    assert bubble(4, 8, 2) == Fraction(3, 19)
    assert decode_utilisation(4, 2) == Fraction(1, 2)


def simulate(num_stages: int, num_micro_batches: int) -> tuple[int, int]:
    """Run micro-batches through stages, one time unit each: (time until the last is out, busy time of a stage)."""
    free = [0] * num_stages
    for _ in range(num_micro_batches):
        ready = 0
        for stage in range(num_stages):
            ready = free[stage] = max(ready, free[stage]) + 1
    return free[-1], num_micro_batches


@given(num_stages=COUNTS, num_micro_batches=COUNTS)
@settings(max_examples=50, deadline=None)
def test_the_bubble_is_what_a_stage_waits(num_stages, num_micro_batches):
    total, busy = simulate(num_stages, num_micro_batches)
    assert bubble(num_stages, num_micro_batches) == Fraction(total - busy, total)


@given(num_stages=st.integers(2, 20), num_micro_batches=COUNTS, virtual_stages=st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_interleaving_trades_the_bubble_for_messages(num_stages, num_micro_batches, virtual_stages):
    plain, chunked = bubble(num_stages, num_micro_batches), bubble(num_stages, num_micro_batches, virtual_stages)
    assert chunked / (1 - chunked) == plain / (1 - plain) / virtual_stages
    messages = num_messages(num_stages, num_micro_batches, virtual_stages)
    assert messages == num_micro_batches * ((num_stages - 1) * virtual_stages + virtual_stages - 1)


@given(num_stages=COUNTS, num_batches=COUNTS)
@settings(max_examples=50, deadline=None)
def test_decoding_with_as_many_batches_as_stages_keeps_all_busy(num_stages, num_batches):
    busy = decode_utilisation(num_stages, num_batches)
    assert (busy == 1) == (num_batches >= num_stages)
    assert busy * num_stages == min(num_batches, num_stages)


def test_time_of_a_token():
    assert token_time_s(4, 0.005, 0.001) == pytest.approx(0.023)
    assert token_time_s(1, 0.005, 0.001) == pytest.approx(0.005)
    assert token_time_s(4, 0.005, 0.001, num_batches=4) == pytest.approx(0.023)
    assert token_time_s(4, 0.005, 0.001, num_batches=8) == pytest.approx(0.040)


@pytest.mark.parametrize(
    ("framework", "num_stages", "options", "expected"),
    [
        pytest.param("vllm", 4, {}, 4, id="vllm"),
        pytest.param("vllm", 4, {"model_runner": "v2"}, 5, id="vllm second runner"),
        pytest.param("vllm", 4, {"model_runner": "v2", "asynchronous": False}, 4, id="vllm second runner, synchronous"),
        pytest.param("vllm", 1, {}, 2, id="vllm one stage"),
        pytest.param("vllm", 1, {"asynchronous": False}, 1, id="vllm one stage, synchronous"),
        pytest.param("sglang", 4, {}, 4, id="sglang"),
        pytest.param("sglang", 4, {"async_depth": 2}, 6, id="sglang depth"),
        pytest.param("megatron", 4, {}, 1, id="megatron"),
        pytest.param("tensorrt_llm", 4, {}, 5, id="tensorrt_llm"),
    ],
)
def test_batches_in_flight(framework, num_stages, options, expected):
    assert batches_in_flight(framework, num_stages, **options) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bubble(0, 1), "num_stages must be a whole number from 1: 0"),
        (lambda: bubble(1, 4, 2), "greater than 1 with interleaved schedule"),
        (lambda: decode_utilisation(4, 0), "num_batches must be a whole number from 1: 0"),
        (lambda: token_time_s(4, -1.0, 0.0), "must not be negative"),
        (lambda: batches_in_flight("llama.cpp", 4), "unknown framework: 'llama.cpp'"),
        (lambda: batches_in_flight("vllm", 4, model_runner="v3"), "unknown model runner: 'v3'"),
        (lambda: batches_in_flight("sglang", 4, async_depth=-1), "async_depth must not be negative"),
    ],
)
def test_bad_counts(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("layout", "framework", "fields", "note"),
    [
        pytest.param(Layout(tp=2), "vllm", {"phase": "decode"}, None, id="no pipeline"),
        pytest.param(
            Layout(pp=4),
            "megatron",
            {"phase": "prefill", "num_micro_batches": 8, "virtual_stages": 2},
            "8 micro-batches in 4 stages: a stage is idle 3/19 of the time (16%)",
            id="bubble",
        ),
        pytest.param(
            Layout(pp=4),
            "vllm",
            {"phase": "decode", "num_micro_batches": 2, "model_runner": "v2"},
            "2 batches in flight in 4 stages: a stage is busy 1/2 of the time (50%) if stages take equally long; "
            "vllm has up to 5 in flight",
            id="decode",
        ),
        pytest.param(
            Layout(pp=2), "sglang", {"phase": "decode"}, "1 batch in flight in 2 stages: a stage is busy 1/2", id="one"
        ),
    ],
)
def test_a_step_tells_how_busy_its_stages_are(layout, framework, fields, note):
    found = notes(load_model("Llama-3.1-8B"), layout, Workload(**fields), framework).get("pipeline")
    assert found is None if note is None else found.startswith(note)
