import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.sequence import (
    sequence_note,
    sequence_pass_applies,
    sequence_pass_tokens,
    why_no_sequence_pass,
)
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

MIB = 2**20


def streams_of(model, layout, framework="megatron", **workload):
    found = phase_streams(load_model(model), layout, Workload(**workload), framework)
    return {stream.name: stream for stream in found}


@pytest.mark.parametrize("framework", ["megatron", "vllm"])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_scatter_and_gather_carry_what_the_all_reduces_did(framework, tp):
    work = {"phase": "prefill", "tokens": 8192}
    plain = streams_of("Llama-3.1-70B", Layout(tp=tp), framework, **work)
    cut = streams_of("Llama-3.1-70B", Layout(tp=tp), framework, sequence_parallel=True, **work)

    def wire(streams):
        return sum(
            wire_bytes_per_rank(stream) * stream.calls_per_step
            for name, stream in streams.items()
            if "logits" not in name
        )

    assert wire(plain) == wire(cut)
    assert cut["sp.all_gather"].calls_per_step == cut["sp.reduce_scatter"].calls_per_step == 2 * 80
    assert not any(stream.op == "all_reduce" for stream in cut.values())
    assert all(stream.groups == plain["tp.mlp_output"].groups for stream in cut.values())


@given(tokens=st.integers(1, 1000), tp=st.sampled_from([2, 4, 8]))
@settings(max_examples=50, deadline=None)
def test_tokens_are_padded_to_a_multiple_of_tp(tokens, tp):
    layout = Layout(tp=tp)
    streams = streams_of("Llama-3.1-8B", layout, phase="decode", batch=tokens, sequence_parallel=True)
    rows, rest = divmod(streams["sp.all_gather"].payload_bytes, 4096 * 2)
    assert rest == 0
    assert rows % tp == 0
    assert tokens <= rows < tokens + tp


@pytest.mark.parametrize("framework", ["megatron", "vllm"])
def test_one_rank_is_refused_in_megatrons_words(framework):
    with pytest.raises(ValueError, match="Cannot use sequence parallelism without tensor parallelism"):
        streams_of("Llama-3.1-8B", Layout(), framework, phase="decode", sequence_parallel=True)


@pytest.mark.parametrize(
    ("gpu", "hidden", "tp", "expected"),
    [
        pytest.param("H100", 8192, 8, 64 * MIB // 16384, id="sm90: 8 MiB a rank"),
        pytest.param("H100", 8192, 2, 16 * MIB // 16384, id="sm90 tp=2"),
        pytest.param("B200", 8192, 8, 256 * MIB // 16384, id="sm100: 32 MiB a rank"),
        pytest.param("B300", 8192, 8, 256 * MIB // 16384, id="sm103 is of the family"),
        pytest.param("R100", 16384, 4, 128 * MIB // 32768, id="sm107 is of the family"),
        pytest.param("H100", 8191, 8, None, id="hidden size"),
        pytest.param("A100", 8192, 8, None, id="sm80"),
        pytest.param("MI300X", 8192, 8, None, id="ROCm"),
        pytest.param("H100", 8192, 1, None, id="one rank"),
    ],
)
def test_threshold_of_vllms_pass(gpu, hidden, tp, expected):
    assert sequence_pass_tokens(hidden, 2, tp, gpu) == expected
    if expected is not None:
        assert sequence_pass_applies(hidden, expected, 2, tp, gpu)
        assert not sequence_pass_applies(hidden, expected - 1, 2, tp, gpu)
        assert why_no_sequence_pass(hidden, expected, 2, tp, gpu) is None
    assert why_no_sequence_pass(hidden, (expected or 2**30) - 1, 2, tp, gpu)


@pytest.mark.parametrize("model", ["Llama-3.1-70B", "Llama-3.1-405B", "DeepSeek-V3"])
@pytest.mark.parametrize("gpu", ["H100", "B200"])
def test_decode_never_uses_it(model, gpu):
    hidden = load_model(model).hidden
    assert not any(sequence_pass_applies(hidden, batch, 2, tp, gpu) for batch in (1, 64, 256) for tp in (2, 4, 8))


def test_streams_are_as_asked_and_a_note_says_what_vllm_would_do():
    shape, layout = load_model("Llama-3.1-70B"), Layout(tp=8)
    decode = make_setting(shape, layout, Workload(phase="decode", batch=64, sequence_parallel=True), "vllm")
    assert "from 4096 tokens on (tp=8, H100): 64 tokens" in sequence_note(decode)
    assert "16384" in sequence_note(decode, "B200")
    prefill = make_setting(shape, layout, Workload(phase="prefill", tokens=8192, sequence_parallel=True), "vllm")
    assert sequence_note(prefill) is None
    assert sequence_note(make_setting(shape, layout, Workload(phase="decode"), "vllm")) is None
    assert "sp.all_gather" in streams_of("Llama-3.1-70B", layout, "vllm", phase="decode", sequence_parallel=True)
