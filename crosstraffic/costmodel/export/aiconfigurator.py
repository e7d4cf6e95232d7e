"""AIConfigurator (aiconfigurator-core 0.11, 0.12): a private systems folder of parquet tables.

Source: https://github.com/ai-dynamo/aiconfigurator, rust/aiconfigurator-core/src/perf_database/communication.rs and the
tables of the wheel. Its loader takes int64 and float64 only, sizes in elements, times in ms (``moe_a2a_perf``: us), and
the first row of a key; further columns are ignored, so that ``source`` may say what was measured.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import pandas as pd

from crosstraffic.costmodel.export.aiconfigurator_ep import expert_rows
from crosstraffic.costmodel.export.aiconfigurator_system import node_of, sidecars, system_yaml
from crosstraffic.costmodel.export.files import Export, parquet
from crosstraffic.costmodel.export.known import Known, choose, pick_kernel, price, spread
from crosstraffic.costmodel.export.target import Target
from crosstraffic.results.table import CELL

OPS: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
}
# The two kinds of elements it knows, with their bytes; others of the same width take the same time on the wire.
ELEMENTS: Mapping[str, tuple[str, int]] = {
    **dict.fromkeys(("half", "float16", "fp16", "bfloat16", "bf16", "int16", ""), ("half", 2)),
    **dict.fromkeys(("int8", "uint8", "byte", "fp8", "float8_e4m3fn", "float8_e5m2"), ("int8", 1)),
}
LABELS: Mapping[str, tuple[str, str, str]] = {  # framework, kernel_source, backend of its custom all-reduce
    "vllm": ("vLLM", "vLLM_custom_graph", "vllm_graph"),
    "sglang": ("SGLang", "SGLang_CustomAllReduce_graph", "sglang_graph"),
    "trtllm": ("TRTLLM", "TRTLLM", "trtllm"),
}
OCTAVES_ABOVE = 3  # beyond the largest size it lets times grow in proportion; these rows come from the model


def to_aiconfigurator(known: Known, target: Target) -> Export:
    """Return the system file and its tables.

    Raises:
        ValueError: nothing that it has room for was measured, or what it must have (bandwidths) is not known.
    """
    folder, device = f"data/{target.system}/comm", known.system
    files: dict[str, bytes] = {}
    remarks: list[str] = []
    kernel = pick_kernel(known.cells, target.kernel, OPS)
    rows, said = _collectives(known, target, kernel, tuple(OPS))
    nccl = rows.assign(framework=known.library, version=target.nccl_version, device=device, kernel_source="NCCL")
    files[f"{folder}/nccl/{target.nccl_version}/nccl_perf.parquet"] = parquet(
        nccl.rename(columns={"element": "nccl_dtype"})
    )
    remarks += [f"nccl_perf holds {kernel}: {line}" for line in said]
    versioned = f"{folder}/{target.framework}/{target.framework_version}"
    custom, said = _custom(known, target)
    remarks += said
    if custom is not None:
        files[f"{versioned}/custom_allreduce_perf.parquet"] = parquet(custom.assign(device=device))
    expert, said = expert_rows(known, target)
    remarks += said
    if not expert.empty:
        files[f"{versioned}/moe_a2a_perf.parquet"] = parquet(expert.assign(device=device))
    node, said = node_of(known.cells, target, kernel)
    remarks += said
    files |= sidecars(files)
    files[f"{target.system}.yaml"] = system_yaml(node, target, said).encode()
    return Export(files=files, remarks=tuple(remarks))


def sizes_around(sizes: Iterable[int], smallest: int, octaves_above: int = OCTAVES_ABOVE) -> list[int]:
    """Return sizes with doublings below them, from ``smallest`` on, and above.

    >>> sizes_around([64, 100], 16, 1)
    [16, 32, 64, 100, 200]
    """
    measured = sorted(set(sizes))
    below: list[int] = []
    size = smallest
    while size < measured[0]:
        below.append(size)
        size *= 2
    return [*below, *measured, *(measured[-1] << octave for octave in range(1, octaves_above + 1))]


def counts_between(measured: Iterable[int], gpus_per_node: int, further: Iterable[int] = ()) -> list[int]:
    """Return the group sizes to export: any within a node and whole nodes, up to the largest measured one.

    It answers for a larger group than any in the table, but refuses one that is missing in between.

    >>> counts_between([2, 4, 16], 4, [24])
    [2, 3, 4, 8, 12, 16, 24]
    """
    largest = max(measured)
    inside = range(2, min(gpus_per_node, largest) + 1)
    whole = range(2 * gpus_per_node, largest + 1, gpus_per_node)
    return sorted({*inside, *whole, *measured, *further})


def _collectives(known: Known, target: Target, kernel: str, ops: tuple[str, ...]) -> tuple[pd.DataFrame, list[str]]:
    """Return rows of these ops of a kernel: op_name, element, num_gpus, message_size, latency, source."""
    mine = known.cells[(known.cells["kernel"] == kernel) & known.cells["op"].isin(ops)]
    elements = mine["dtype"].map(ELEMENTS)
    has_room = elements.notna()
    other_dtypes = sorted(mine.loc[~has_room, "dtype"].unique())
    mine = mine[has_room].assign(
        element=[name for name, _ in elements[has_room]], element_bytes=[size for _, size in elements[has_room]]
    )
    whole = mine["payload_bytes"] % mine["element_bytes"] == 0
    kept, passed = choose(mine[whole], ("op", "element", "num_ranks"))
    if kept.empty:
        raise ValueError(
            f"no cells of {kernel} that AIConfigurator has room for: {len(mine)} are of 1 or 2 bytes an element, "
            f"other types: {', '.join(other_dtypes) or 'none'}"
        )
    blocks = []
    for _, family in kept.groupby(["op", "element"], sort=False):
        counts = sorted({int(count) for count in family["num_ranks"]})
        smallest = int(family["element_bytes"].iloc[0])
        for count in counts_between(counts, target.gpus_per_node, target.ranks):
            nearest = min(counts, key=partial(_distance, count))
            own = count == nearest
            like = family[family["num_ranks"] == nearest]
            sizes = sizes_around(like["payload_bytes"] if own else family["payload_bytes"], smallest)
            template = like.iloc[[0]].drop(columns=["payload_bytes", "time_s"])
            if not own:
                template = template.assign(**spread(count, target.gpus_per_node))
            blocks.append(template.merge(pd.DataFrame({"payload_bytes": sizes}), how="cross"))
    wanted = pd.concat(blocks, ignore_index=True)
    priced = price(known, wanted)
    rows = priced.rows.merge(wanted[[*CELL, "element", "element_bytes"]], on=list(CELL), how="left")
    said = [f"{(rows['source'] == 'measured').sum()} measured cells, {(rows['source'] != 'measured').sum()} predicted"]
    said += priced.remarks
    if passed:
        said.append(f"{passed} measured cells have no room: other placements, issues, parameters or groups at once")
    if other_dtypes:
        said.append(f"{(~has_room).sum()} measured cells have no room: dtype {', '.join(other_dtypes)}")
    if not whole.all():
        said.append(f"{(~whole).sum()} measured cells have no room: no whole number of elements")
    return _sorted(
        pd.DataFrame(
            {
                "op_name": rows["op"].map(OPS),
                "element": rows["element"],
                "num_gpus": rows["num_ranks"].astype("int64"),
                "message_size": (rows["payload_bytes"] // rows["element_bytes"]).astype("int64"),
                "latency": (rows["time_s"] * 1e3).astype("float64"),
                "source": rows["source"],
            }
        )
    ), said


def _distance(count: int, other: int) -> tuple[int, int]:
    """Order group sizes by how near they are to one, the smaller first."""
    return abs(other - count), other


def _custom(known: Known, target: Target) -> tuple[pd.DataFrame | None, list[str]]:
    """Return the table of the framework's own all-reduce; None, and why, where it was not measured."""
    framework, kernel_source, backend = LABELS[target.framework]
    kernel = target.custom_kernel or f"{target.framework}_custom_all_reduce"
    usable = known.cells[
        (known.cells["kernel"] == kernel) & (known.cells["op"] == "all_reduce") & (known.cells["issue"] != "eager")
    ]
    if usable.empty and target.custom_kernel is not None:
        raise ValueError(f"no all_reduce of kernel {kernel!r} that is not issued eagerly: measure it from a graph")
    if usable.empty:
        why = (
            f"no custom_allreduce_perf, which it needs for tensor parallelism: all_reduce of {kernel} was not measured "
            "from a graph, and it drops eager ones (--custom-kernel NAME exports another kernel)"
        )
        return None, [why]
    rows, said = _collectives(
        Known(system=known.system, library=known.library, cells=usable, predict=known.predict),
        target, kernel, ("all_reduce",),
    )  # fmt: skip
    half = rows[rows["element"] == "half"].drop(columns="element")
    table = half.assign(
        framework=framework, version=target.framework_version, kernel_source=kernel_source, allreduce_dtype="bfloat16",
        backend=backend,
    )  # fmt: skip
    return table, [f"custom_allreduce_perf holds {kernel}: {line}" for line in said]


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """Put measured rows first: of two rows of one key the loader keeps the first."""
    order = rows.assign(_predicted=rows["source"] != "measured")
    keys = ["_predicted", "op_name", "element", "num_gpus", "message_size"]
    ordered = order.sort_values(keys, kind="stable").drop(columns="_predicted")
    return ordered.drop_duplicates(["op_name", "element", "num_gpus", "message_size"], ignore_index=True)
