"""``crosstraffic coupling``: what the parallelisms of a layout have to do with each other."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from crosstraffic.patterns.coupling import Coupling, Use
    from crosstraffic.results.neighbours import Slowdowns

SCHEMA_VERSION = 1


def coupling(
    model: Annotated[str | None, typer.Argument(help="Catalogue name, or path of a Hugging Face config.json.")] = None,
    layout: Annotated[str | None, typer.Option("--layout", help="Degrees, as tp=8,dp=4,ep=32.")] = None,
    phase: Annotated[str, typer.Option("--phase", help="prefill or decode.")] = "decode",
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework", help="vllm, megatron, sglang or tensorrt_llm; default vllm, or megatron where vllm refuses."
        ),
    ] = None,
    decode_layout: Annotated[
        str | None,
        typer.Option("--decode-layout", help="Two pools: --layout prefills, this decodes, KV moves between."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Requests per data-parallel replica.")] = 1,
    context: Annotated[int, typer.Option("--context", help="Tokens of each request.")] = 4096,
    tokens: Annotated[
        int | None, typer.Option("--tokens", help="Tokens of a prefill; default batch x context.")
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Gather and scatter on the TP group instead of all-reduces.")
    ] = False,
    two_batch: Annotated[
        bool, typer.Option("--two-batch", help="Two half batches against each other (DBO, TBO).")
    ] = False,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", help="Ranks fill nodes in order; default 8.")
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="Nodes of a pool, instead of --ranks-per-node.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="A measured run: show the slowdowns that it saw.")
    ] = None,
    combinations: Annotated[
        bool, typer.Option("--combinations", help="Instead of one layout: every pair on every engine, as Markdown.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print for each pair of parallelisms what both cut, how their groups lie, and what both load in one step."""
    import json

    from crosstraffic.commands.engine import plan_with
    from crosstraffic.commands.errors import planning
    from crosstraffic.errors import UsageError
    from crosstraffic.patterns import coupling as patterns
    from crosstraffic.patterns.layout import check_framework, parse_layout, world_size
    from crosstraffic.patterns.model import load_model
    from crosstraffic.patterns.workload import Workload

    if combinations:
        if model is not None or layout is not None or as_json:
            raise UsageError("--combinations takes no MODEL, --layout or --json")
        _print_combinations(run)
        return
    if model is None or layout is None:
        raise UsageError("give MODEL and --layout, or --combinations")
    with planning("model"):
        shape = load_model(model)
    with planning("coupling"):
        if framework is not None:
            check_framework(framework)
        if nodes is not None and ranks_per_node is not None:
            raise ValueError("give --nodes or --ranks-per-node, not both")
        if nodes is not None and nodes < 1:
            raise ValueError(f"--nodes must be a whole number from 1: {nodes}")
        if phase not in ("prefill", "decode"):
            raise ValueError(f"--phase must be prefill or decode (the handoff is added by --decode-layout): {phase!r}")
        own = parse_layout(layout)
        other = None if decode_layout is None else parse_layout(decode_layout)

        def plan(name: str) -> "Coupling":
            per_node = ranks_per_node or 8
            if nodes is not None:
                num_ranks = world_size(other if other is not None and phase == "decode" else own, name)
                if num_ranks % nodes:
                    raise ValueError(f"{num_ranks} ranks do not divide over {nodes} nodes")
                per_node = num_ranks // nodes
            workload = Workload(
                phase=phase,  # type: ignore[arg-type]
                batch=batch,
                context=context,
                tokens=tokens,
                sequence_parallel=sequence_parallel,
                two_batch=two_batch,
                ranks_per_node=per_node,
            )
            return patterns.coupling(shape, own, workload, name, decode_layout=other)

        _, found = plan_with(framework, plan)
    seen = _seen(run)
    if as_json:
        print(json.dumps(_data(found, seen)))
    else:
        _print(found, seen)


def _print_combinations(run: Path | None) -> None:
    from crosstraffic.commands.combinations_page import page
    from crosstraffic.patterns.combinations import combinations

    print(page(combinations(), _seen(run)), end="")


def _seen(run: Path | None) -> "Mapping[tuple[str, str], Slowdowns]":
    if run is None:
        return {}
    from crosstraffic.results.neighbours import pattern_slowdowns
    from crosstraffic.results.store import load_run

    return pattern_slowdowns(load_run(run))


def _data(found: "Coupling", seen: "Mapping[tuple[str, str], Slowdowns]") -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "schema_version": SCHEMA_VERSION,
        "model": found.setting.shape.name,
        "layout": {name: value for name, value in asdict(found.setting.layout).items() if value is not None},
        "framework": found.setting.framework,
        "phase": found.setting.workload.phase,
        "num_ranks": len(found.nodes),
        "num_nodes": len(set(found.nodes)),
        "parallelisms": [
            {
                "name": use.name,
                "degree": use.degree,
                "cuts": use.cuts,
                "groups": use.groups,
                "takes_ranks": use.takes_ranks,
                "streams": [stream.name for stream in use.streams],
                "bytes_per_step": {f"{kind}.{index}": amount for (kind, index), amount in use.load.items()},
            }
            for use in found.uses
        ],
        "pairs": [
            {
                "first": pair.first.name,
                "second": pair.second.name,
                "verdict": pair.verdict,
                "why": pair.why,
                "dimensions": pair.dimensions,
                "groups": pair.crossing.lie,
                "ranks_in_common": pair.crossing.common,
                "example": pair.crossing.example,
                "shared": [
                    {"resource": one.resource[0], "index": one.resource[1], "bytes": one.num_bytes}
                    for one in pair.shared
                ],
                "overlap": pair.overlap,
                "when": pair.when,
                "slowdown": {
                    f"{one} beside {two}": asdict(seen[one, two])
                    for one, two in ((pair.first.name, pair.second.name), (pair.second.name, pair.first.name))
                    if (one, two) in seen
                },
            }
            for pair in found.pairs
        ],
    }


def _print(found: "Coupling", seen: "Mapping[tuple[str, str], Slowdowns]") -> None:
    from rich.console import Console
    from rich.table import Table

    from crosstraffic.commands.coupling_words import cuts, lies, paragraph, shares
    from crosstraffic.patterns.load import largest
    from crosstraffic.units import format_bytes

    console = Console(highlight=False, markup=False)
    setting = found.setting
    console.print(
        f"{setting.shape.name}, {setting.layout}, {setting.workload.phase}, as {setting.framework} does it",
        style="bold",
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("", "cuts"):
        table.add_column(name)
    for name in ("degree", "groups", "a rank sends\nper step", "a node sends\nper step"):
        table.add_column(name, justify="right", no_wrap=True)
    for use in found.uses:
        sent = (largest(use.load, kind) for kind in ("port_egress", "nic_egress"))
        amounts = (format_bytes(amount) if amount else "-" for amount in sent)
        size = f"{len(use.groups)}x{max(map(len, use.groups))}"
        table.add_row(use.name, ", ".join(use.cuts), str(use.degree), size, *amounts)
    console.print(table if found.uses else "no parallelism is in use: every degree is 1")
    console.print(_ranks(found))
    for pair in found.pairs:
        first, second = pair.first.name, pair.second.name
        console.print(f"\n{first} + {second}: {pair.verdict}", style="bold")
        told = (pair.why, cuts(pair), f"groups: {lies(pair)}", f"time: {pair.when}")
        both_load = shares(pair)
        for line in told if both_load is None else (*told[:3], f"share: {both_load}", told[3]):
            console.print(paragraph(line), soft_wrap=True)
        for slowed, beside in ((first, second), (second, first)):
            if (slowed, beside) in seen:
                was = seen[slowed, beside]
                console.print(
                    f"  seen: {slowed} beside {beside} takes {was.median:.2f} times as long "
                    f"({was.low:.2f} to {was.high:.2f}, {was.num_pairs} pairs)"
                )


def _ranks(found: "Coupling") -> str:
    """Say which degrees make up the ranks, and which reuse them."""

    def told(uses: "list[Use]", sign: str) -> str:
        return sign.join(f"{use.name} {use.degree}" for use in uses)

    own = [use for use in found.uses if use.takes_ranks and use.name != "pd"]
    free = [use for use in found.uses if not use.takes_ranks]
    pool = found.setting.num_ranks
    text = f"{pool} ranks = {told(own, ' x ')}" if own else f"{pool} rank{'s' if pool > 1 else ''}"
    if free:
        text += f"; {told(free, ', ')} reuse{'s' if len(free) == 1 else ''} them"
    if len(found.nodes) > pool:
        text += f"; the other pool has {len(found.nodes) - pool}"
    return f"{text}; {len(set(found.nodes))} node{'s' if len(set(found.nodes)) > 1 else ''}"
