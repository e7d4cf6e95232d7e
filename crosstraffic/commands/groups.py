"""``crosstraffic groups``: the process groups of a layout in the rank order of an engine."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from crosstraffic.patterns.layout import Groups

WIDTH = 80
MAX_LINES = 4
MAX_GRID_RANKS = 64


def groups(
    layout: Annotated[str, typer.Option("--layout", help="Degrees, as tp=2,pp=2,cp=2,ep=4.")],
    world: Annotated[int | None, typer.Option("--world", help="Ranks; fills dp if --layout does not name it.")] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            "--framework", help="vllm, megatron, sglang or tensorrt_llm; default vllm, or megatron where vllm refuses."
        ),
    ] = None,
    order: Annotated[
        str | None, typer.Option("--order", help="Megatron-Core's order, leftmost fastest; default tp-cp-ep-dp-pp.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print which ranks form which process group, in the engine's own order."""
    import json

    from crosstraffic.commands.engine import plan_with, say_chosen
    from crosstraffic.commands.errors import planning
    from crosstraffic.patterns.layout import Layout, check_framework, parse_layout, process_groups, world_size

    def plan(name: str) -> "tuple[Layout, Mapping[str, Groups]]":
        check_framework(name)
        parsed = parse_layout(layout, world=world, framework=name)
        return parsed, process_groups(parsed, name, order=order)

    asked = framework or ("megatron" if order is not None else None)
    with planning("groups"):
        framework, (parsed, found) = plan_with(asked, plan)
    say_chosen(asked, framework)
    if as_json:
        print(json.dumps(found))
        return
    num_ranks = world_size(parsed, framework)
    print(f"{parsed} in {framework}: {num_ranks} ranks\n")
    for name, members in found.items():
        for line in _listed(name, members):
            print(line)
    if num_ranks <= MAX_GRID_RANKS:
        print("\nsame number in a row: same group")
        for line in _grid(found, num_ranks):
            print(line)


def _listed(name: str, members: "Groups") -> "Iterator[str]":
    """Write the groups of one name, wrapped; the last line says how many are not shown."""
    start = f"{name:<8}{len(members)} x {len(members[0])}"
    lines, line, shown = 0, f"{start:<22}", 0
    if len(members[0]) == 1:
        yield f"{start:<22}each rank alone"
        return
    for index, group in enumerate(members):
        text = " ".join(map(str, group))
        text = f"[{text}]" if len(text) <= 54 else f"[{group[0]} {group[1]} {group[2]} ... {group[-1]}]"
        if len(line) + len(text) > WIDTH - 1:
            yield line.rstrip()
            lines, line = lines + 1, " " * 22
        if lines == MAX_LINES:
            yield f"{' ' * 22}and {len(members) - shown} more; --json has all"
            return
        line, shown = f"{line}{text} ", index + 1
    yield line.rstrip()


def _grid(found: "Mapping[str, Groups]", num_ranks: int) -> "Iterator[str]":
    """Write a row for each name with the number of each rank's group under the rank."""
    cell = len(str(num_ranks - 1)) + 1
    step = max(1, (WIDTH - 8) // cell)
    if step >= 8:
        step -= step % 8
    for start in range(0, num_ranks, step):
        ranks = range(start, min(start + step, num_ranks))
        yield f"{'rank':<8}" + "".join(f"{rank:>{cell}}" for rank in ranks)
        for name, members in found.items():
            if len(members[0]) > 1:
                group_of = {rank: index for index, group in enumerate(members) for rank in group}
                yield f"{name:<8}" + "".join(f"{group_of[rank]:>{cell}}" for rank in ranks)
        if ranks.stop < num_ranks:
            yield ""
