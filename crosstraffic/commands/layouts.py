"""``crosstraffic layouts``: every layout of a model on some GPUs that an engine accepts, what fits, what it sends."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from crosstraffic.costmodel.layout_cost import LayoutCost
    from crosstraffic.patterns.layouts import Candidate, Found

SCHEMA_VERSION = 1
TOP = 20
LAYOUT_WIDTH = 20
GB, MB = 10**9, 10**6
ANY_MEMORY = 2**60  # bytes of a GPU that holds whatever it is given: its memory is not looked at
RANKING = (
    "rounds in which the cache serves the batch",
    "no matrix cut across nodes",
    "fewest pipeline stages",
    "bytes that leave a node",
    "bytes inside a node",
    "calls in a row",
    "whole experts",
)  # see patterns/layouts.py


def layouts(
    model: Annotated[str, typer.Argument(help="Catalogue name, or path of a Hugging Face config.json.")],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs to use, all of them.")],
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", help="Of one GPU, as 80GB or 79.6GiB; with --cost it may be left out.")
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option("--cost", metavar="MODEL_FILE", help="A fitted model.json with cells: rank by predicted time."),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option("--kernel", help="With --cost: this one where several do an op; default the fastest."),
    ] = None,
    utilization: Annotated[float, typer.Option("--utilization", help="Share of the memory that may be used.")] = 0.9,
    phase: Annotated[str, typer.Option("--phase", help="decode or prefill.")] = "decode",
    batch: Annotated[
        int | None,
        typer.Option("--batch", help="Requests over all replicas; default 16 a GPU in decode, 1 a GPU in prefill."),
    ] = None,
    context: Annotated[int, typer.Option("--context", help="Tokens of each request.")] = 4096,
    framework: Annotated[
        str, typer.Option("--framework", help="vllm, megatron, sglang or tensorrt_llm: whose rules and traffic.")
    ] = "vllm",
    dtype: Annotated[str | None, typer.Option("--dtype", help="Activations; default the model's.")] = None,
    weight_dtype: Annotated[
        str | None,
        typer.Option("--weight-dtype", help="Linear layers: fp8, fp4, mxfp4, int4, bf16; default the checkpoint's."),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="KV cache; default as the activations.")] = None,
    expert_backend: Annotated[
        str | None, typer.Option("--expert-backend", help="Dispatcher of experts; default as the engine does.")
    ] = None,
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", "--gpus-per-node", help="GPUs of a node.")] = 8,
    top: Annotated[
        int | None, typer.Option("--top", "--limit", help="Layouts to print; default 20, with --json all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the layouts of a model on some GPUs, best first: memory of the fullest rank, traffic of a step by tier.

    With --cost they are ranked by the predicted time of the communication of a step.
    """
    import json

    from crosstraffic.commands.errors import planning
    from crosstraffic.commands.layouts_cost import load_known, priced, print_costs
    from crosstraffic.patterns.layout import check_framework
    from crosstraffic.patterns.layouts import REQUESTS_PER_GPU, find_layouts
    from crosstraffic.patterns.model import load_model
    from crosstraffic.patterns.workload import Workload
    from crosstraffic.units import parse_bytes

    with planning("model"):
        shape = load_model(model)
    with planning("layouts"):
        check_framework(framework)
        if gpu_memory is None and cost is None:
            raise ValueError("give --gpu-memory, as 80GB, or --cost MODEL_FILE, or both")
        if kernel is not None and cost is None:
            raise ValueError(f"a kernel is chosen where there is a cost model: --kernel {kernel} without --cost")
        if top is not None and top < 1:
            raise ValueError(f"top must be a whole number from 1: {top}")
        requests = gpus * REQUESTS_PER_GPU.get(phase, 1) if batch is None else batch
        workload = Workload(
            phase=phase,  # type: ignore[arg-type]
            batch=1 if batch is None else batch,
            context=context,
            dtype=dtype,
            kv_dtype=kv_dtype,
            expert_backend=expert_backend,
            ranks_per_node=ranks_per_node,
        )
        memory_bytes = None if gpu_memory is None else parse_bytes(gpu_memory)
        known = None if cost is None else load_known(cost)
        found = find_layouts(
            shape,
            gpus,
            workload,
            framework,
            batch=requests,
            gpu_memory_bytes=ANY_MEMORY if memory_bytes is None else memory_bytes,
            utilization=utilization,
            weight_dtype=weight_dtype,
            with_calls=known is not None,
        )
        if not found.candidates:
            why = "; ".join(f"{rule} ({count})" for rule, count in found.refusals[:3])
            raise ValueError(
                f"{framework} runs {shape.name} on {gpus} GPUs in none of {found.num_refused} combinations: {why}"
            )
    asked = {
        "schema_version": SCHEMA_VERSION,
        "model": shape.name,
        "framework": framework,
        "phase": phase,
        "num_gpus": gpus,
        "ranks_per_node": ranks_per_node,
        "gpu_memory_bytes": memory_bytes,
        "utilization": utilization,
        "limit_bytes": None if memory_bytes is None else found.candidates[0].memory.limit_bytes,
        "batch": requests,
        "context": context,
    }
    if known is not None:
        with planning("layouts"):
            ranked, costs = priced(found, known, shape, phase, kernel)
        asked |= {"cost": str(cost), "kernel": kernel}
        if as_json:
            print(json.dumps(asked | _data(ranked, top, costs)))
        else:
            print_costs(asked, ranked, costs, top or TOP)
    elif as_json:
        print(json.dumps(asked | _data(found, top)))
    else:
        _print(asked, found, top or TOP)


def _data(found: "Found", top: int | None, costs: "Sequence[LayoutCost]" = ()) -> dict[str, Any]:
    from crosstraffic.commands.layouts_cost import COST_RANKING, cost_data

    rows = [_row(place, one) for place, one in enumerate(found.candidates[:top], start=1)]
    return {
        "ranking": list(COST_RANKING if costs else RANKING),
        "num_layouts": len(found.candidates),
        "num_refused": found.num_refused,
        "refusals": [{"rule": rule, "count": count} for rule, count in found.refusals],
        "layouts": [row | cost_data(one) for row, one in zip(rows, costs, strict=False)] if costs else rows,
    }


def _row(place: int, candidate: "Candidate") -> dict[str, Any]:
    from dataclasses import asdict

    memory, tiers = candidate.memory, candidate.tiers
    return {
        "place": place,
        "layout": {name: value for name, value in asdict(candidate.layout).items() if value is not None},
        "text": str(candidate.layout),
        "fits": candidate.rounds == 1,
        "rounds": int(candidate.rounds) if candidate.memory.max_requests else None,
        "num_replicas": candidate.num_replicas,
        "requests_per_replica": memory.num_requests,
        "max_requests": candidate.max_requests,
        "max_tokens": candidate.num_replicas * memory.max_tokens,
        "weight_bytes": memory.weights.num_bytes,
        "kv_bytes": memory.kv_bytes,
        "kv_request_bytes": memory.request_bytes,
        "buffer_bytes": memory.buffer_bytes,
        "total_bytes": memory.total_bytes,
        "headroom_bytes": memory.headroom_bytes,
        "parts": [asdict(part) for part in (memory.weights, *memory.buffers)],
        "intra_node_bytes": tiers.intra_node_bytes,
        "inter_node_bytes": tiers.inter_node_bytes,
        "node_egress_bytes": tiers.node_egress_bytes,
        "calls": tiers.calls,
        "crosses_nodes": candidate.crosses_nodes,
        "num_passes": candidate.num_passes,
        "pipeline_utilization": candidate.pipeline_utilization,
        "streams": [asdict(stream) for stream in tiers.streams],
    }


def _print(asked: "Mapping[str, Any]", found: "Found", top: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    shown = found.candidates[:top]
    is_large = max(max(one.tiers.intra_node_bytes, one.tiers.node_egress_bytes) for one in shown) >= 10 * GB
    unit, unit_name = (GB, "GB") if is_large else (MB, "MB")
    console.print(
        f"{asked['model']} on {asked['num_gpus']} GPUs of {asked['gpu_memory_bytes'] / GB:.4g} GB, {asked['phase']} of "
        f"{asked['batch']} requests of {asked['context']} tokens, as {asked['framework']} does it",
        style="bold",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("layout", no_wrap=True)
    for name in ("weights\nGB", "KV\nGB", "other\nGB", "free\nGB", f"holds\nof {asked['batch']}"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (f"in node\n{unit_name}/step", f"leaves it\n{unit_name}/step", "calls\n/step"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in shown:
        memory, tiers = one.memory, one.tiers
        sizes = (memory.weights.num_bytes, memory.kv_bytes, memory.buffer_bytes, memory.headroom_bytes)
        table.add_row(
            _broken(str(one.layout)),
            *(f"{size / GB:.1f}" for size in sizes),
            str(one.max_requests),
            *(f"{size / unit:.2f}" if size else "-" for size in (tiers.intra_node_bytes, tiers.node_egress_bytes)),
            str(tiers.calls) if tiers.calls else "-",
        )
    console.print(table)
    console.print()
    for line in _lines(asked, found, len(shown)):
        console.print(line)


def _broken(layout: str) -> str:
    """Break a long layout after a comma."""
    lines = [""]
    for degree in layout.split(","):
        if lines[-1] and len(lines[-1]) + len(degree) + 1 > LAYOUT_WIDTH:
            lines[-1] += ","
            lines.append(f"  {degree}")
        else:
            lines[-1] += f",{degree}" if lines[-1] else degree
    return "\n".join(lines)


def _lines(asked: "Mapping[str, Any]", found: "Found", num_shown: int) -> "Iterator[str]":
    """Write what the table says, how it is ranked, and what was refused."""
    yield from _verdict(asked, found.candidates)
    if num_shown < len(found.candidates):
        yield f"{len(found.candidates) - num_shown} more layouts: --top, or --json for all of them."
    yield (
        f"GB: 10^9 bytes of the fullest rank; free: of {asked['limit_bytes'] / GB:.4g} GB "
        f"({asked['utilization']:g} of its memory), with its share of the requests. holds: requests whose cache fits "
        "at once, over all replicas."
    )
    yield (
        "in node: what the busiest rank sends inside its node; leaves it: what leaves the busiest node "
        f"({asked['ranks_per_node']} ranks), in one step of the whole batch. calls: one after another, in one pass."
    )
    yield f"ranked by: {', then '.join(RANKING)}. Traffic is not time. --json has each buffer with its formula."
    if found.refusals:
        rule, count = found.refusals[0]
        yield f"combinations refused: {found.num_refused}, most often ({count}): {rule}"


def _verdict(asked: "Mapping[str, Any]", candidates: "Sequence[Candidate]") -> "Iterator[str]":
    """Say what fits, and if nothing does, by how much the nearest misses."""
    whole = sum(one.rounds == 1 for one in candidates)
    some = sum(bool(one.memory.max_requests) for one in candidates) - whole
    best = candidates[0]
    yield (
        f"{len(candidates)} layouts: {whole} hold all requests at once, {some} some of them, "
        f"{len(candidates) - whole - some} none."
    )
    if not whole and some:
        rounds = f"{best.rounds} rounds of {best.max_requests} requests"
        yield f"none holds all {asked['batch']} at once: {best.layout} takes {rounds}."
    if not whole and not some:
        yield f"none fits: {best.layout} lacks {best.memory.missing_bytes / GB:.2f} GB a rank to run one request."
