"""A made system: cells of an exact law, and a predictor that knows this law and refuses what it must."""

import numpy as np
import pandas as pd

from crosstraffic.costmodel.export.known import Known, median_cells
from crosstraffic.costmodel.export.line import ring_shape
from crosstraffic.costmodel.export.target import Target
from crosstraffic.results.table import CELL, make_frame

LATENCY_S = {1: 2e-6, 2: 9e-6}  # of a step, by number of nodes (more than one: 2)
BYTES_PER_S = {1: 300e9, 2: 40e9}
CALL_S = {"vllm_custom_all_reduce": 1e-6, "deepep_ll": 6e-6, "deepep_ht": 2e-5}  # per call, by kernel
PARAMETERS = "experts=256,hidden=7168,sms=20,top_k=8"
SIZES = tuple(2**power for power in range(9, 27, 2))


def law(cells: pd.DataFrame) -> np.ndarray:
    """Return the time of each cell; expert traffic is affine in its bytes."""
    tier = np.minimum(cells["num_nodes"].to_numpy(), 2)
    latency_s = np.vectorize(LATENCY_S.get)(tier)
    bytes_per_s = np.vectorize(BYTES_PER_S.get)(tier)
    steps, sent = ring_shape(cells)
    expert = cells["op"].str.startswith("ep_").to_numpy()
    sent = np.where(expert, cells["payload_bytes"], sent)
    call_s = cells["kernel"].map(CALL_S).fillna(0.0).to_numpy()
    strided = np.where((cells["placement"] == "strided") & (cells["ranks_per_node"] > 1), 1.5, 1.0)
    return call_s + steps * latency_s + strided * sent / bytes_per_s


def block(op, counts, *, kernel="nccl", sizes=SIZES, gpus_per_node=8, **columns) -> pd.DataFrame:
    """Return cells of one op over group sizes and payloads."""
    rows = [(count, size) for count in counts for size in sizes]
    nodes = columns.pop("num_nodes", None)
    frame = make_frame(
        op=[op] * len(rows),
        kernel=kernel,
        num_ranks=[count for count, _ in rows],
        num_nodes=[nodes or -(-count // gpus_per_node) for count, _ in rows],
        payload_bytes=[size for _, size in rows],
        time_s=1.0,
        **{"dtype": "bfloat16", **columns},
    )
    return frame.assign(time_s=law(frame))


def token_sizes(*tokens: int) -> tuple[int, ...]:
    return tuple(count * 8 * 7168 * 2 for count in tokens)


def predictor(measured: pd.DataFrame):
    """Answer as predict_cells does, by the law times 1.01; more nodes than were measured is a new tier."""
    most_nodes = measured.groupby("op")["num_nodes"].max()
    keys = set(map(tuple, measured[list(CELL)].to_numpy()))

    def predict(cells: pd.DataFrame) -> pd.DataFrame:
        known = cells["op"].map(most_nodes).fillna(0)
        valid = cells["num_nodes"] <= known
        seen = [tuple(row) in keys for row in cells[list(CELL)].to_numpy()]
        time_s = np.where(valid, law(cells) * 1.01, np.nan)
        return pd.DataFrame(
            {
                "time_s": time_s,
                "low_s": time_s * 0.9,
                "high_s": time_s * 1.1,
                "source": np.where(seen, "measured", "model"),
                "kind": np.where(seen, "measured", "size"),
                "valid": valid,
                "why": np.where(valid, None, "a new tier"),
            },
            index=cells.index,
        )

    return predict


def known_of(*blocks: pd.DataFrame, system: str = "made") -> Known:
    frame = pd.concat(blocks, ignore_index=True)
    cells = median_cells(frame)
    return Known(system=system, library="NCCL 2.99", cells=cells, predict=predictor(cells))


def everything() -> Known:
    """Return a system of two nodes of eight, with all that any planner takes."""
    return known_of(
        *(block(op, (2, 4, 8, 16)) for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")),
        block("all_reduce", (2, 4, 8), placement="strided", num_nodes=1),
        block("all_reduce", (2, 4, 8), placement="strided", num_nodes=2),
        block("all_reduce", (2, 4, 8), dtype="int8"),
        block("all_reduce", (2, 4, 8), kernel="vllm_custom_all_reduce", issue="graph", sizes=SIZES[:6]),
        block("all_reduce", (2, 4, 8), kernel="vllm_custom_all_reduce", issue="eager", sizes=SIZES[:6]),
        block("send_recv", (2,)),
        block("send_recv", (2,), num_nodes=2),
        *(
            block(op, (8, 16), kernel=kernel, parameters=PARAMETERS, dtype="", sizes=token_sizes(16, 64, 100))
            for op in ("ep_dispatch", "ep_combine")
            for kernel in ("deepep_ll", "deepep_ht")
        ),
    )


def a_target(**changes) -> Target:
    return Target(**{"system": "made", "gpus_per_node": 8, "num_nodes": 2, "nccl_version": "2.99", **changes})
