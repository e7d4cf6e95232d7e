"""The table of parallelisms: its formulas give the bytes of the streams that it names; README shows it as it is."""

from collections.abc import Mapping

import pytest

from crosstraffic.patterns.handoff import handoff
from crosstraffic.patterns.layout import Layout
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.parallelism import (
    PARALLELISMS,
    SYMBOLS,
    dimension_relation,
    evaluate,
    parallelism,
    table_text,
    with_table,
)
from crosstraffic.patterns.phase import phase_streams
from crosstraffic.patterns.wire import wire_bytes_per_rank
from crosstraffic.patterns.workload import Workload

LLAMA, QWEN, DEEPSEEK = (load_model(name) for name in ("Llama-3.1-70B", "Qwen3-30B-A3B", "DeepSeek-V3"))
PREFILL = Workload(phase="prefill", tokens=4096)
RING = Workload(phase="prefill", tokens=4096, context_style="ring")
GATHER = Workload(phase="prefill", tokens=4096, context_style="all_gather")
SEQUENCE = Workload(phase="prefill", tokens=4096, sequence_parallel=True)
ULYSSES = Workload(phase="prefill", tokens=4096, context_style="ulysses")
PASS_Q = Workload(phase="prefill", tokens=4096, context_style="pass_q")
DECODE = Workload(phase="decode", batch=64)
PACKED = Workload(phase="decode", batch=64, dcp_backend="a2a")
# Each row, by its last stream: model, layout, engine, workload, calls a layer of each stream, symbols of the formula.
CASES = {
    "tp.mlp_output": (LLAMA, Layout(tp=8), "vllm", DECODE, (1, 1), {"P": 8, "T": 64}),
    "sp.reduce_scatter": (LLAMA, Layout(tp=8), "megatron", SEQUENCE, (2, 2), {"P": 8, "T": 4096}),
    "cp.kv_ring": (LLAMA, Layout(tp=2, cp=4), "megatron", RING, (3,), {"P": 4, "T": 4096, "TP": 2}),
    "cp.kv_all_gather": (LLAMA, Layout(tp=2, cp=4), "megatron", GATHER, (2,), {"P": 4, "T": 4096, "TP": 2}),
    "cp.ulysses_output": (LLAMA, Layout(tp=2, cp=4), "megatron", ULYSSES, (1,) * 4, {"P": 4, "T": 4096, "TP": 2}),
    "cp.partial_output": (LLAMA, Layout(tp=2, cp=4), "megatron", PASS_Q, (3, 1), {"P": 4, "T": 4096, "TP": 2}),
    "dcp.exchange": (LLAMA, Layout(tp=16, dcp=2), "vllm", PACKED, (1, 1), {"P": 2, "T": 64, "TP": 16}),
    "dcp.output": (LLAMA, Layout(tp=16, dcp=2), "vllm", DECODE, (1, 1, 1), {"P": 2, "T": 64, "TP": 16}),
    "pp.activation": (LLAMA, Layout(tp=4, pp=2), "vllm", DECODE, (1,), {"T": 64, "TP": 4}),
    "ep.combine": (DEEPSEEK, Layout(dp=8, ep=8), "vllm", DECODE, (1, 1), {"P": 8, "T": 64}),
    "ep.reduce_scatter": (QWEN, Layout(dp=4), "vllm", DECODE, (1, 1), {"P": 4, "T": 64}),
    "etp.reduce_scatter": (QWEN, Layout(tp=2, dp=2, ep=2, etp=2), "megatron", DECODE, (1, 1), {"P": 2, "T": 64}),
    "dp.scatter": (LLAMA, Layout(tp=4, dp=4), "sglang", DECODE, (1, 1), {"P": 4, "T": 64}),
}
WAYS = [(name, way) for name, entry in PARALLELISMS.items() for way in entry.exchanges if name != "pd"]


@pytest.mark.parametrize("way", [way for _, way in WAYS], ids=[way.streams[-1] for _, way in WAYS])
def test_a_formula_gives_the_bytes_of_its_streams(way):
    shape, layout, framework, workload, calls, own = CASES[way.streams[-1]]
    streams = {stream.name: stream for stream in phase_streams(shape, layout, workload, framework)}
    symbols: Mapping[str, int] = {
        "H": shape.hidden, "b": 2, "Hq": shape.num_heads, "K": shape.num_kv_heads, "d": shape.head_dim,
        "k": shape.top_k, "TP": 1, **own,
    }  # fmt: skip
    sent = sum(times * wire_bytes_per_rank(streams[name]) for name, times in zip(way.streams, calls, strict=True))
    assert sent == evaluate(way.formula, symbols)


def test_the_formula_of_a_handoff_gives_what_each_rank_sends():
    (way,) = PARALLELISMS["pd"].exchanges
    layout, workload = Layout(tp=4), Workload(phase="handoff", batch=3, context=640)
    moved = handoff(LLAMA, layout, layout, workload, prefill_ranks=range(4), decode_ranks=range(4, 8), framework="vllm")
    (stream,) = moved.streams
    assert (stream.name,) == way.streams
    symbols = {"T": 3 * 640, "K": LLAMA.num_kv_heads, "TP": 4, "d": LLAMA.head_dim, "b": 2}
    assert wire_bytes_per_rank(stream) == LLAMA.num_layers * evaluate(way.formula, symbols)


def test_the_readme_shows_the_table_as_it_is(request):
    page = (request.config.rootpath / "README.md").read_text()
    assert with_table(page) == page, "write it anew: python -m crosstraffic.patterns.parallelism README.md"
    assert table_text() in page


def test_every_symbol_of_a_formula_is_explained():
    for _, way in WAYS:
        evaluate(way.formula, dict.fromkeys(SYMBOLS, 1))


@pytest.mark.parametrize(
    "formula", ["__import__('os')", "P ** 2", "P if T else H", "unknown * 2", "f(2)", "P.real", "'a'", "1.5 * P"]
)
def test_nothing_but_arithmetic_is_worked_out(formula):
    with pytest.raises(ValueError, match=r"unknown symbol|not a sum or product"):
        evaluate(formula, dict.fromkeys(SYMBOLS, 1))


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="must have the lines"):
        with_table("# nothing\n")
    with pytest.raises(ValueError, match="allowed: tp, sp"):
        parallelism("xp")


def test_dimensions_are_the_same_nested_or_different():
    cuts = {name: entry.cuts for name, entry in PARALLELISMS.items()}
    assert dimension_relation(cuts["sp"], cuts["cp"]) == "same"
    assert dimension_relation(cuts["ep"], cuts["etp"]) == "nested"
    assert dimension_relation(cuts["tp"], cuts["pp"]) == "different"
    assert dimension_relation(cuts["dp"], cuts["cp"]) == "nested"
