"""``crosstraffic traffic``: what a model in a layout puts on the wire in one step."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from crosstraffic.patterns.handoff import Handoff
    from crosstraffic.patterns.layout import Layout
    from crosstraffic.patterns.model import ModelShape
    from crosstraffic.patterns.stream import Stream
    from crosstraffic.patterns.workload import Workload

SCHEMA_VERSION = 1
MAX_MATRIX_COLUMNS = 6


def traffic(
    model: Annotated[str, typer.Argument(help="Catalogue name, or path of a Hugging Face config.json.")],
    layout: Annotated[str, typer.Option("--layout", help="Degrees, as tp=8,dp=2,ep=16.")] = "tp=1",
    phase: Annotated[str, typer.Option("--phase", help="prefill, decode or handoff.")] = "decode",
    batch: Annotated[int, typer.Option("--batch", help="Requests per data-parallel replica.")] = 1,
    context: Annotated[int, typer.Option("--context", help="Tokens of each request.")] = 4096,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens of a prefill or handoff; default batch x context.")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework", help="vllm, megatron, sglang or tensorrt_llm; default vllm, or megatron where vllm refuses."
        ),
    ] = None,
    decode_layout: Annotated[
        str | None, typer.Option("--decode-layout", help="Handoff: degrees of the decode pool; default as --layout.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Activations; default the model's.")] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="KV cache; default as the activations.")] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Gather and scatter on the TP group instead of all-reduces.")
    ] = False,
    context_style: Annotated[
        str | None, typer.Option("--context-style", help="ring or all_gather; default as the engine does.")
    ] = None,
    expert_backend: Annotated[
        str | None,
        typer.Option(
            "--expert-backend",
            help="deepep_low_latency, deepep_low_latency_bf16, alltoall or allgather_reducescatter.",
        ),
    ] = None,
    routing: Annotated[
        str, typer.Option("--routing", help="uniform, power_law:A, lognormal:S, k_hot:N or one_hot:RANK.")
    ] = "uniform",
    seed: Annotated[int, typer.Option("--seed", help="Of the routing.")] = 0,
    speculative: Annotated[int, typer.Option("--speculative", help="Speculated tokens per request in decode.")] = 0,
    block_tokens: Annotated[int, typer.Option("--block-tokens", help="Tokens of a page of the KV cache.")] = 16,
    kv_split: Annotated[bool, typer.Option("--kv-split", help="K and V lie in regions of their own.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the streams of one step: operation, groups, bytes, calls, formula and source."""
    import json

    from crosstraffic.commands.engine import plan_with, say_chosen
    from crosstraffic.commands.errors import planning
    from crosstraffic.patterns.layout import check_framework, parse_layout
    from crosstraffic.patterns.model import load_model
    from crosstraffic.patterns.phase import left_out, phase_streams
    from crosstraffic.patterns.routing import parse_routing
    from crosstraffic.patterns.workload import Workload

    with planning("model"):
        shape = load_model(model)
    with planning("traffic"):
        distribution, parameter = parse_routing(routing)
        workload = Workload(
            phase=phase,  # type: ignore[arg-type]
            batch=batch,
            context=context,
            tokens=tokens,
            dtype=dtype,
            kv_dtype=kv_dtype or (dtype if phase == "handoff" else None),
            sequence_parallel=sequence_parallel,
            context_style=context_style,  # type: ignore[arg-type]
            expert_backend=expert_backend,
            routing=distribution,
            routing_parameter=parameter,
            seed=seed,
            num_speculative=speculative,
            block_tokens=block_tokens,
            kv_split=kv_split,
        )
        if framework is not None:
            check_framework(framework)
        if decode_layout is not None and phase != "handoff":
            raise ValueError(f"--decode-layout belongs to --phase handoff, the phase is {phase}")
        own = parse_layout(layout)
        if phase == "handoff":
            other = own if decode_layout is None else parse_layout(decode_layout)
            chosen, moved = plan_with(framework, lambda name: _handoff(shape, own, other, workload, name))
            data = _data(shape, own, phase, chosen, moved.streams)
            data |= {"decode_layout": _degrees(other), **_handoff_data(moved)}
        else:
            chosen, streams = plan_with(framework, lambda name: phase_streams(shape, own, workload, name))
            data = _data(shape, own, phase, chosen, streams)
            data["left_out"] = dict(left_out(shape, own, workload, chosen))
            data["routing"] = _routing_data(streams)
    say_chosen(framework, chosen)
    if as_json:
        print(json.dumps(data))
    else:
        _print_table(data, str(own) if phase != "handoff" else f"{own} -> {other}")


def _handoff(shape: "ModelShape", own: "Layout", other: "Layout", workload: "Workload", framework: str) -> "Handoff":
    from crosstraffic.patterns.handoff import handoff
    from crosstraffic.patterns.layout import world_size

    num_prefill, num_decode = world_size(own, framework), world_size(other, framework)
    return handoff(
        shape,
        own,
        other,
        workload,
        prefill_ranks=range(num_prefill),
        decode_ranks=range(num_prefill, num_prefill + num_decode),
        framework=framework,
    )


def _degrees(layout: "Layout") -> dict[str, int]:
    from dataclasses import asdict

    return {name: value for name, value in asdict(layout).items() if value is not None}


def _data(
    shape: "ModelShape", layout: "Layout", phase: str, framework: str, streams: "Sequence[Stream]"
) -> dict[str, Any]:
    from crosstraffic.patterns.wire import wire_bytes_per_rank

    return {
        "schema_version": SCHEMA_VERSION,
        "model": shape.name,
        "layout": _degrees(layout),
        "phase": phase,
        "framework": framework,
        "streams": [
            {
                "name": stream.name,
                "pattern": stream.pattern,
                "op": stream.op,
                "groups": stream.groups,
                "group_size": stream.group_size,
                "payload_bytes": stream.payload_bytes,
                "wire_bytes_per_rank": wire_bytes_per_rank(stream),
                "calls_per_step": stream.calls_per_step,
                "dtype": stream.dtype,
                "formula": stream.formula,
                "source": stream.source,
            }
            for stream in streams
        ],
    }


def _handoff_data(moved: "Handoff") -> dict[str, Any]:
    found = moved.descriptors
    return {
        "matrix_bytes": moved.matrix_bytes,
        "descriptors": {
            "block_tokens": found.block_tokens,
            "count": found.count,
            "bytes": found.bytes,
            "max_count_per_rank": found.max_count_per_rank,
        },
    }


def _routing_data(streams: "Sequence[Stream]") -> dict[str, Any] | None:
    """Return how even the load of the experts' ranks came out, if tokens are dispatched."""
    from dataclasses import asdict

    from crosstraffic.patterns.routing import Routed, imbalance

    for stream in streams:
        if stream.name == "ep.dispatch" and isinstance(stream.rule, Routed):
            rule = stream.rule
            return {
                "distribution": rule.distribution,
                "parameter": rule.parameter,
                "seed": rule.seed,
                "rank_load": asdict(imbalance(rule.counts(stream.group_size).sum(axis=0))),
            }
    return None


def _print_table(data: "Mapping[str, Any]", layout: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from crosstraffic.units import format_bytes

    console = Console(highlight=False, markup=False)
    console.print(f"{data['model']}, {layout}, {data['phase']}, as {data['framework']} does it", style="bold")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("stream", "op"):
        table.add_column(name, no_wrap=True)
    for name in ("groups", "calls", "payload\nper call", "sent/rank\nper call", "sent/rank\nper step"):
        table.add_column(name, justify="right", no_wrap=True)
    for stream in data["streams"]:
        wire, calls = stream["wire_bytes_per_rank"], stream["calls_per_step"]
        table.add_row(
            stream["name"],
            stream["op"],
            f"{len(stream['groups'])}x{stream['group_size']}",
            str(calls),
            *(format_bytes(size) for size in (stream["payload_bytes"], wire, wire * calls)),
        )
    console.print(table if data["streams"] else "nothing crosses the wire")
    console.print()
    for stream in data["streams"]:
        console.print(f"{stream['name']}: {stream['formula']}", soft_wrap=False)
        console.print(f"    {stream['source']}", style="dim")
    if data.get("routing"):
        load, routing = data["routing"]["rank_load"], data["routing"]
        console.print(
            f"\nrouting {routing['distribution']}: rank load max/mean {load['max_over_mean']:.3g}, "
            f"CV {load['cv']:.3g}, Gini {load['gini']:.3g}, zero {load['zero_share']:.0%}"
        )
    if data.get("left_out"):
        console.print("\nnot on the wire:")
        for name, reason in data["left_out"].items():
            console.print(f"  {name}: {reason}")
    if "matrix_bytes" in data:
        _print_matrix(console, data)


def _print_matrix(console: Any, data: "Mapping[str, Any]") -> None:
    """Write who sends what to whom, if it fits the screen, and the descriptors."""
    from rich.table import Table

    from crosstraffic.units import format_bytes

    matrix, descriptors = data["matrix_bytes"], data["descriptors"]
    num_columns = len(matrix[0])
    if num_columns <= MAX_MATRIX_COLUMNS:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title="\nprefill rank to decode rank")
        for name in ("", *(f"to {rank}" for rank in range(num_columns))):
            table.add_column(name, justify="right", no_wrap=True)
        for rank, row in enumerate(matrix):
            table.add_row(str(rank), *(format_bytes(size) if size else "-" for size in row))
        console.print(table)
    else:
        console.print(f"\n{len(matrix)} x {num_columns} ranks; --json has the matrix")
    console.print(
        f"descriptors: up to {descriptors['max_count_per_rank']} for one decode rank, "
        f"of {format_bytes(max(map(max, descriptors['bytes'])))} "
        f"({descriptors['block_tokens']} tokens a page)"
    )
