"""Layouts by cost: against prices worked out by hand from a linear truth, and what has no price is not made up."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from crosstraffic.cli import app
from crosstraffic.costmodel.export.known import Known
from crosstraffic.costmodel.layout_cost import LayoutCost, price_layouts, rank
from crosstraffic.errors import UsageError
from crosstraffic.patterns.layouts import Candidate, find_layouts
from crosstraffic.patterns.model import load_model
from crosstraffic.patterns.workload import Workload
from crosstraffic.results.table import CURVE, make_frame

LATENCY_S, INTRA, INTER = 5e-6, 400e9, 40e9  # of the truth: s, bytes/s in a node, bytes/s between nodes
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "send_recv")


def truth(cells: pd.DataFrame) -> pd.DataFrame:
    """Answer as ``predict_cells`` does: a line in size, slower between nodes; a second kernel is twice as slow."""
    rate = np.where(cells["num_nodes"] > 1, INTER, INTRA)
    time_s = (LATENCY_S + cells["payload_bytes"] / rate) * np.where(cells["kernel"] == "slow", 2.0, 1.0)
    return pd.DataFrame(
        {
            "time_s": time_s,
            "low_s": time_s * 0.9,
            "high_s": time_s * 1.2,
            "source": "model",
            "kind": "size",
            "valid": True,
            "why": None,
        },
        index=cells.index,
    )


def curves(ops: tuple[str, ...] = OPS, kernels: tuple[str, ...] = ("nccl",), dtype: str = "half") -> pd.DataFrame:
    pairs = [(op, kernel) for op in ops for kernel in kernels]
    names, of = zip(*pairs, strict=True)
    frame = make_frame(op=names, kernel=of, dtype=dtype, num_ranks=8, payload_bytes=1024, time_s=1e-5)
    return frame[list(CURVE)]


def candidates(model: str, num_gpus: int, phase: str = "decode", batch: int = 64) -> tuple[Candidate, ...]:
    return find_layouts(
        load_model(model),
        num_gpus,
        Workload(phase=phase),  # type: ignore[arg-type]
        "vllm",
        batch=batch,
        gpu_memory_bytes=2**60,
        with_calls=True,
    ).candidates


def costs_of(
    model: str,
    num_gpus: int,
    known: pd.DataFrame,
    *,
    phase: str = "decode",
    kernel: str | None = None,
    predict: Callable[[pd.DataFrame], pd.DataFrame] = truth,
) -> dict[str, tuple[Candidate, LayoutCost]]:
    found = candidates(model, num_gpus, phase)
    costs = price_layouts(found, known, predict, load_model(model), phase, kernel)
    return {str(one.layout): (one, cost) for one, cost in zip(found, costs, strict=True)}


def test_one_layout_by_hand() -> None:
    """Llama-3.1-70B, tp=8, 64 tokens: 161 all-reduces of the hidden states, one gather of the logits."""
    _, cost = costs_of("Llama-3.1-70B", 8, curves())["tp=8"]
    hidden = 64 * 8192 * 2
    logits = next(stream for stream in cost.streams if stream.name == "tp.logits")
    expected = 161 * (LATENCY_S + hidden / INTRA) + LATENCY_S + logits.payload_bytes / INTRA
    assert cost.time_s == pytest.approx(expected)
    assert cost.sum_s == cost.time_s
    assert cost.low_s == pytest.approx(0.9 * expected)
    assert cost.high_s == pytest.approx(1.2 * expected)
    assert sum(stream.share for stream in cost.streams) == pytest.approx(1.0)
    assert cost.streams[0].calls == 80
    assert cost.patterns == {"tp": pytest.approx(1.0)}


def test_a_group_over_nodes_is_priced_there() -> None:
    costs = costs_of("Llama-3.1-70B", 16, curves())
    inside, across = costs["tp=8,dp=2"][1], costs["tp=16"][1]
    assert inside.time_s is not None
    assert across.time_s is not None
    hidden = {name: costs[name][1].streams[0].payload_bytes for name in ("tp=8,dp=2", "tp=16")}
    per_call = across.streams[0].time_s / across.streams[0].calls
    assert per_call == pytest.approx(LATENCY_S + hidden["tp=16"] / INTER)
    assert across.time_s > inside.time_s


def test_passes_of_a_pipeline_overlap() -> None:
    one, cost = costs_of("Llama-3.1-70B", 8, curves())["tp=2,pp=4"]
    assert one.num_passes == 4
    assert cost.time_s is not None
    assert cost.sum_s is not None
    assert cost.sum_s / 4 <= cost.time_s < cost.sum_s
    stages: dict[int, float] = {}
    for call in one.calls:
        rate = INTRA if call.lies[0].num_nodes == 1 else INTER
        stages[call.stage] = stages.get(call.stage, 0.0) + call.times * (LATENCY_S + call.payload_bytes / rate)
    assert cost.time_s == pytest.approx(max(sum(stages.values()), 4 * max(stages.values())))


def test_the_fastest_kernel_is_taken_and_named_unless_one_is_asked_for() -> None:
    both = curves(kernels=("slow", "nccl"))
    free = costs_of("Llama-3.1-70B", 8, both)["tp=8"][1]
    asked = costs_of("Llama-3.1-70B", 8, both, kernel="slow")["tp=8"][1]
    assert {stream.kernels for stream in free.streams} == {("nccl",)}
    assert {stream.kernels for stream in asked.streams} == {("slow",)}
    assert asked.time_s == pytest.approx(2 * (free.time_s or 0.0))
    with pytest.raises(ValueError, match="no curve of kernel 'x'; there are nccl, slow"):
        costs_of("Llama-3.1-70B", 8, both, kernel="x")


def test_an_op_without_a_curve_has_no_price_and_comes_last() -> None:
    found = candidates("Llama-3.1-70B", 8)
    costs = price_layouts(found, curves(ops=("all_reduce", "all_gather")), truth, load_model("Llama-3.1-70B"), "decode")
    ordered = rank(found, costs)
    refused = [(one, cost) for one, cost in ordered if not cost.valid]
    assert {one.layout.pp > 1 for one, _ in refused} == {True}
    assert ordered[-len(refused) :] == refused
    assert all(cost.time_s is None and "no curve of op send_recv" in (cost.why or "") for _, cost in refused)
    times = [cost.time_s or 0.0 for _, cost in ordered if cost.valid]
    assert times == sorted(times)
    assert len(times) == len(found) - len(refused) > 3


def test_a_refused_cell_has_no_price_even_where_a_time_is_given() -> None:
    """The fault: a time is there, but the model says that it must not be trusted."""

    def new_tier(cells: pd.DataFrame) -> pd.DataFrame:
        answer = truth(cells)
        across = cells["num_nodes"] > 1
        answer.loc[across, "valid"] = False
        answer.loc[across, "why"] = "never measured across nodes"
        return answer

    costs = costs_of("Llama-3.1-70B", 16, curves(), predict=new_tier)
    assert costs["tp=16"][1].valid is False
    assert "never measured across nodes" in (costs["tp=16"][1].why or "")
    assert costs["tp=8,dp=2"][1].valid


def test_sums_of_another_width_are_not_taken_but_bytes_that_only_move_are() -> None:
    narrow = costs_of("Llama-3.1-70B", 8, curves(dtype="int8"))["tp=8"][1]
    assert "no curve of op all_reduce for bfloat16" in (narrow.why or "")


def test_dispatch_is_priced_by_tokens_where_a_table_of_its_kernel_is_there() -> None:
    known = pd.concat(
        [
            curves(),
            make_frame(
                op=["ep_dispatch", "ep_combine"] * 2,
                kernel="deepep_ll",
                dtype="fp8",
                num_ranks=8,
                payload_bytes=1024,
                time_s=1e-5,
                parameters=["experts=256,hidden=7168,top_k=8"] * 2 + ["experts=8,hidden=7168,top_k=8"] * 2,
            )[list(CURVE)],
        ]
    )
    asked: list[pd.DataFrame] = []

    def watch(cells: pd.DataFrame) -> pd.DataFrame:
        asked.append(cells)
        return truth(cells)

    costs = costs_of("DeepSeek-V3", 8, known, predict=watch)
    [cells] = asked
    experts = cells[cells["op"] == "ep_dispatch"]
    assert set(experts["parameters"]) == {"experts=256,hidden=7168,top_k=8"}
    whole = costs["dp=8,ep=8"][1]
    dispatch = next(stream for stream in whole.streams if stream.name == "ep.dispatch")
    assert dispatch.kernels == ("deepep_ll",)
    tokens = 64 // 8
    assert dispatch.time_s == pytest.approx(58 * (LATENCY_S + tokens * 8 * 7168 / INTRA))


def test_all_layouts_take_one_prediction() -> None:
    calls: list[int] = []

    def counting(cells: pd.DataFrame) -> pd.DataFrame:
        calls.append(len(cells))
        return truth(cells)

    costs_of("DeepSeek-V3", 16, curves(), predict=counting)
    assert len(calls) == 1
    assert calls[0] > 100


def cost_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    frame = curves(kernels=("slow", "nccl")).assign(payload_bytes=1024, time_s=1e-5)
    known = Known(system="x", library="", cells=frame, predict=truth)
    monkeypatch.setattr("crosstraffic.commands.layouts_cost.load_known", lambda path: known)
    result = CliRunner().invoke(
        app, ["layouts", "Llama-3.1-70B", "--gpus", "8", "--cost", "model.json", *words], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_ranks_by_time_and_says_where_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.loads(cost_command(monkeypatch, "--json", "--limit", "3"))
    assert data["ranking"][-1] == "predicted time of a step's communication"
    assert (len(data["layouts"]), data["limit_bytes"]) == (3, None)
    times = [row["time_s"] for row in data["layouts"]]
    assert times == sorted(times)
    assert all(row["low_s"] <= row["time_s"] <= row["high_s"] for row in data["layouts"])
    table = " ".join(cost_command(monkeypatch, "--gpu-memory", "80GB").split())
    assert "ranked by: every call has a predicted time" in table
    assert "tp.attention_output" in table
    assert "kernels: nccl." in table


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give --gpu-memory, as 80GB, or --cost MODEL_FILE"),
        (("--gpu-memory", "80GB", "--kernel", "nccl"), "--kernel nccl without --cost"),
        (("--cost", "nowhere.json"), "no model file: nowhere.json"),
    ],
)
def test_bad_use_is_told(words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(app, ["layouts", "Llama-3.1-8B", "--gpus", "8", *words], catch_exceptions=False)
