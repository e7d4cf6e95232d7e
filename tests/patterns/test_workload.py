"""What a workload takes: which options have an effect in which phase, and what contradicts what."""

import pytest

from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.layouts import one_pass
from crosstraffic.patterns.memory import rank_memory
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.phase import control_streams, phase_streams
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.stream import MAX_PAYLOAD_BYTES
from crosstraffic.patterns.workload import DEFAULTS, EFFECT, PHASES, Workload

STEP = ("prefill", "decode")
EXPERTS = Layout(dp=2, ep=2)
# A value of each field that is not its default, and where it shows: model, layout, framework, other fields.
SHOWS = {
    "batch": (2, {}),
    "context": (512, {}),
    "cached_tokens": (64, {}),
    "tokens": (7, {}),
    "replica_tokens": ((5, 3), {}),
    "padded": (True, {"replica_tokens": (5, 3)}),
    "num_speculative": (2, {"layout": Layout(tp=2, pp=2), "model_runner": "v2"}),
    "num_micro_batches": (2, {}),
    "dtype": ("float32", {}),
    "kv_dtype": ("fp8", {}),
    "block_tokens": (48, {}),
    "kv_split": (True, {}),
    "ranks_per_node": (1, {"expert_backend": "deepep_high_throughput"}),
    "routing": ("one_hot", {}),
    "routing_parameter": (2.0, {"routing": "power_law"}),
    "routing_weights": (tuple(range(1, 129)), {"routing": "explicit"}),
    "routing_matrix": (((0, 8), (8, 0)), {"routing": "matrix"}),
    "seed": (3, {"routing": "power_law", "routing_parameter": 1.0}),
    "sequence_parallel": (True, {"layout": Layout(tp=2)}),
    "quantized_all_reduce": ("int8", {"layout": Layout(tp=2)}),
    "context_style": ("pass_q", {"layout": Layout(cp=2), "framework": "megatron"}),
    "ulysses_ranks": (2, {"layout": Layout(cp=4), "framework": "megatron", "context_style": "ulysses_ring"}),
    "dcp_backend": ("a2a", {"layout": Layout(tp=8, dcp=2)}),
    "expert_backend": ("deepep_high_throughput", {}),
    "redundant_experts": (2, {}),
    "two_batch": (True, {"batch": 1024, "expert_backend": "deepep_low_latency"}),
    "virtual_stages": (2, {"layout": Layout(pp=2), "framework": "megatron"}),
    "layer_partition": ((40, 8), {"layout": Layout(pp=2)}),
    "model_runner": ("v2", {"layout": Layout(pp=2)}),
    "kv_connector": ("mooncake", {}),
    "kv_schedule": ("layer", {}),
    "kv_direction": ("push", {}),
    "chunk_tokens": (256, {"handoff": {"kv_schedule": "chunk"}}),
    "cross_layer_blocks": (True, {}),
    "contiguous_blocks": (1, {"framework": "sglang", "layout": Layout(tp=2)}),
}
# tokens of a decode step may only repeat what follows from the batch; dtype is that of the embeddings of an encoder;
# where the ranks of a handoff lie is for those who measure it.
ELSEWHERE = {("tokens", "decode"), ("dtype", "handoff"), ("ranks_per_node", "handoff")}
NEEDED = {
    "dcp_backend": {"prefill": {"cached_tokens": 64}},
    "routing_weights": {"without": {"routing": "uniform"}},
    "routing_matrix": {"without": {"routing": "uniform"}},
}


def seen(phase, framework="vllm", layout=EXPERTS, **fields):
    """Return all that is worked out of a workload: streams, small messages, memory, passes; or a handoff."""
    shape, workload = load_model("Qwen3-30B-A3B"), Workload(phase=phase, **fields)
    if phase == "handoff":
        size = world_size(layout, framework)
        found = handoff(
            shape, layout, layout, workload, prefill_ranks=range(size), decode_ranks=range(size, 2 * size),
            framework=framework,
        )  # fmt: skip
        return found.streams, found.matrix_bytes, found.descriptors.count, found.descriptors.bytes, found.plan
    setting = make_setting(shape, layout, workload, framework)
    asked = shape, layout, workload, framework
    passes = None if workload.replica_tokens else one_pass(workload, 8, layout.pp)[1]
    return (
        phase_streams(*asked),
        control_streams(*asked),
        rank_memory(setting, num_requests=2, limit_bytes=2**40).kv_bytes,
        passes,
        setting.stages,
    )


def test_the_table_knows_every_field():
    assert set(EFFECT) == set(DEFAULTS) == set(SHOWS)


@pytest.mark.parametrize(
    ("field", "phase"),
    [(field, phase) for field in EFFECT for phase in EFFECT[field] if (field, phase) not in ELSEWHERE],
)
def test_what_the_table_allows_shows(field, phase):
    value, case = SHOWS[field]
    own = {name: other for name, other in case.items() if name not in PHASES}
    own |= case.get(phase, {}) | NEEDED.get(field, {}).get(phase, {})
    without = own | NEEDED.get(field, {}).get("without", {})
    assert seen(phase, **own, **{field: value}) != seen(phase, **without)


@pytest.mark.parametrize(
    ("field", "phase"), [(field, phase) for field in EFFECT for phase in PHASES if phase not in EFFECT[field]]
)
def test_what_has_no_effect_is_refused_and_its_default_is_not(field, phase):
    value, case = SHOWS[field]
    routing = {name: other for name, other in case.items() if name == "routing"}
    with pytest.raises(ValueError, match=f"(routing|{field}) has an effect in .* only, the phase is {phase}: "):
        Workload(phase=phase, **routing, **{field: value})
    assert getattr(Workload(phase=phase, **{field: DEFAULTS[field]}), field) == DEFAULTS[field]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"ulysses_ranks": 2}, "goes with context_style ulysses_ring only: 2 with none", id="no style"),
        pytest.param({"ulysses_ranks": 2, "context_style": "ring"}, "only: 2 with ring", id="another style"),
        pytest.param({"replica_tokens": (4, 2), "tokens": 4}, r"not both: 4 and \(4, 2\)", id="tokens twice"),
        pytest.param({"replica_tokens": (0, 0)}, r"no replica has a token: \(0, 0\)", id="no tokens"),
        pytest.param({"replica_tokens": (4, -2)}, r"must not be negative: \(4, -2\)", id="negative"),
        pytest.param({"replica_tokens": (1, 2 * MAX_PAYLOAD_BYTES)}, "replica_tokens must be .* up to", id="too many"),
        pytest.param({"layer_partition": (1, 2 * MAX_PAYLOAD_BYTES)}, "layer_partition must be .* up to", id="layers"),
        pytest.param(
            {"routing": "matrix", "routing_matrix": ((0, 2 * MAX_PAYLOAD_BYTES), (0, 0))},
            "routing_matrix must be .* up to",
            id="bytes",
        ),
        pytest.param({"replica_tokens": (-1,) * 99}, r"negative: \(-1, .*\.\.\.$", id="a long list is cut"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Workload(phase="prefill", **fields)


@pytest.mark.parametrize(("batch", "speculative"), [(1, 0), (1, 2), (8, 0), (8, 2)])
def test_a_decode_batch_beside_tokens_of_replicas(batch, speculative):
    each = 1 + speculative
    workload = Workload(phase="decode", batch=batch, num_speculative=speculative, replica_tokens=(8 * each, 3 * each))
    assert (workload.num_tokens, workload.pass_requests) == (8 * each, 8)
    with pytest.raises(ValueError, match="batch must be the requests of the largest replica, 8, or not be given"):
        Workload(phase="decode", batch=5, num_speculative=speculative, replica_tokens=(8 * each, 3 * each))


def test_logits_are_of_the_requests_of_the_largest_replica():
    shape, layout = load_model("Qwen3-30B-A3B"), Layout(tp=2, dp=2)

    def logits(**fields):
        streams = phase_streams(shape, layout, Workload(phase="decode", **fields), "vllm")
        return next(stream for stream in streams if stream.name == "tp.logits").payload_bytes

    assert logits(replica_tokens=(64, 3)) == logits(batch=64) == 64 * logits(batch=1)
