"""AIConfigurator's table of expert dispatch and combine, ``moe_a2a_perf``: tokens a rank, times in microseconds.

Source: https://github.com/ai-dynamo/aiconfigurator, rust/aiconfigurator-core/src/perf_database/moe_a2a.rs.
"""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from crosstraffic.costmodel.export.known import Known, choose, price
from crosstraffic.costmodel.export.target import Target
from crosstraffic.results.table import CELL

PHASES: Mapping[str, str] = {"ep_prepare": "prepare", "ep_dispatch": "dispatch", "ep_combine": "combine"}
# Its names of what moves the tokens, by ours.
BACKENDS: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "deepep_ht", "deepep_ll", "deepep_v2_context", "deepep_v2_generation", "trtllm_deepep_ht",
            "trtllm_deepep_ll", "nvlink_two_sided", "nvlink_one_sided",
        )
    },
    "deepep_normal": "deepep_ht",
    "deepep_low_latency": "deepep_ll",
    "NVLinkTwoSided": "nvlink_two_sided",
    "NVLinkOneSided": "nvlink_one_sided",
}  # fmt: skip
SHAPE = ("hidden", "top_k", "experts")
ELEMENT_BITS: Mapping[str, int] = {"fp8": 8, "int8": 8, "fp4": 4, "nvfp4": 4}  # others: 16
OCTAVES_ABOVE = 3


def parameters_of(text: str) -> dict[str, str]:
    """Read the parameters of a curve.

    >>> parameters_of("experts=256,hidden=7168,top_k=8")
    {'experts': '256', 'hidden': '7168', 'top_k': '8'}
    """
    return dict(part.split("=", 1) for part in text.split(",") if "=" in part)


def expert_rows(known: Known, target: Target) -> tuple[pd.DataFrame, list[str]]:
    """Return the rows of the table (empty where no expert traffic was measured) and what has no room in it."""
    cells = known.cells[known.cells["op"].isin(PHASES)].reset_index(drop=True)
    if cells.empty:
        return pd.DataFrame(), ["no moe_a2a_perf: ep_dispatch and ep_combine were not measured"]
    said = []
    parameters = [parameters_of(text) for text in cells["parameters"]]
    named = cells["kernel"].isin(BACKENDS).to_numpy()
    shaped = np.array([all(name in found for name in SHAPE) for found in parameters])
    even = np.array(["skew" not in found for found in parameters])
    for rows, why in (
        (~named, f"kernels it does not know: {', '.join(sorted(cells.loc[~named, 'kernel'].unique()))}"),
        (named & ~shaped, "hidden size, top k or number of experts not known"),
        (named & shaped & ~even, "uneven loads, for which it has no column"),
    ):
        if rows.any():
            said.append(f"moe_a2a_perf lacks {rows.sum()} measured cells: {why}")
    good = named & shaped & even
    if not good.any():
        return pd.DataFrame(), [*said, "no moe_a2a_perf: nothing is left to write"]
    parts = [found for found, is_good in zip(parameters, good, strict=True) if is_good]
    keyed = cells[good].assign(
        **{name: [int(found[name]) for found in parts] for name in SHAPE},
        sms=[int(found.get("sms", "0")) for found in parts],
        comm_backend=[BACKENDS[kernel] for kernel in cells.loc[good, "kernel"]],
    )
    key = ("op", "comm_backend", "dtype", "num_ranks", "num_nodes", *SHAPE, "sms")
    kept, passed = choose(keyed, key)
    if passed:
        said.append(f"moe_a2a_perf lacks {passed} measured cells: what sets them apart has no column")
    wanted = pd.concat([_around(curve) for _, curve in kept.groupby(list(key), sort=False)], ignore_index=True)
    priced = price(known, wanted)
    said += [f"moe_a2a_perf: {line}" for line in priced.remarks]
    rows = priced.rows.merge(wanted, on=list(CELL), how="left")
    latency_us = (rows["time_s"] * 1e6).astype("float64")
    table = pd.DataFrame(
        {
            "framework": {"vllm": "vLLM", "sglang": "sglang", "trtllm": "TRTLLM"}[target.framework],
            "version": target.framework_version,
            "op_name": "moe_a2a",
            "kernel_source": "deepep",
            "comm_backend": rows["comm_backend"],
            "phase": rows["op"].map(PHASES),
            "comm_dtype": rows["dtype"].replace("", "default"),
            "ep_size": rows["num_ranks"],
            "node_num": rows["num_nodes"],
            "hidden_size": rows["hidden"],
            "topk": rows["top_k"],
            "num_experts": rows["experts"],
            "num_tokens": rows["num_tokens"],
            "sms": rows["sms"],
            "transmit_us": latency_us,
            "notify_us": 0.0,
            "latency": latency_us,
            "source": rows["source"],
        }
    )
    said.append(
        f"moe_a2a_perf holds {(table['source'] == 'measured').sum()} measured cells, "
        f"{(table['source'] != 'measured').sum()} predicted"
    )
    return table, said


def _around(curve: pd.DataFrame) -> pd.DataFrame:
    """Return a curve's cells, with token counts below and above those measured."""
    template = curve.iloc[[0]].drop(columns=["payload_bytes", "time_s"])
    token_bytes = bytes_per_token(curve)
    tokens = sorted(int(tokens) for tokens in curve["payload_bytes"] // token_bytes)
    below = [1 << power for power in range(tokens[0].bit_length()) if 1 << power < tokens[0]]
    counts = [*below, *tokens, *(tokens[-1] << octave for octave in range(1, OCTAVES_ABOVE + 1))]
    sizes = pd.DataFrame({"num_tokens": counts, "payload_bytes": [count * token_bytes for count in counts]})
    return template.merge(sizes, how="cross")


def bytes_per_token(curve: pd.DataFrame) -> int:
    """Return what one token of a rank adds to the payload of its curve: top k x hidden x bytes of an element.

    Raises:
        ValueError: the payloads are no whole numbers of tokens.
    """
    first = curve.iloc[0]
    token_bytes = int(first["top_k"]) * int(first["hidden"]) * ELEMENT_BITS.get(str(first["dtype"]), 16) // 8
    if (curve["payload_bytes"] % token_bytes).any():
        raise ValueError(
            f"payloads of {first['op']} ({first['parameters']}) must be whole tokens of {token_bytes} bytes: "
            f"{curve['payload_bytes'].tolist()[:3]}"
        )
    return token_bytes
