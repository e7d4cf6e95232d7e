"""``crosstraffic groups``: the process groups of a layout in the rank order of an engine."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from crosstraffic.patterns.layout import Groups, Layout
    from crosstraffic.patterns.rank_order import Engine

WIDTH = 80
MAX_LINES = 3  # of the groups of one kind
MAX_GRID_RANKS = 64  # that are all shown
MAX_CHOSEN_RANKS = 32  # that are shown of more
MAX_NODE_RANKS = 72  # that are shown of one node
PLAIN = {"│": "|", "─": "-", **dict.fromkeys("┌┐├┤└┘", "+")}


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
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Ranks are placed on nodes in order.")] = 8,
    picture: Annotated[
        str | None, typer.Option("--picture", metavar="FILE", help="Draw the groups too: a .png, .svg or .pdf.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print which ranks form which process group, in the engine's own order."""
    import json
    import sys
    from pathlib import Path

    from crosstraffic.commands.engine import plan_with
    from crosstraffic.commands.errors import planning
    from crosstraffic.patterns.layout import engine_of, parse_layout, process_groups

    def plan(name: str) -> "tuple[Layout, Mapping[str, Groups]]":
        engine_of(name)
        parsed = parse_layout(layout, world=world, framework=name)
        return parsed, process_groups(parsed, name, order=order)

    asked = "megatron" if framework is None and order is not None else framework
    with planning("groups"):
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be a whole number from 1: {ranks_per_node}")
        framework, (parsed, found) = plan_with(asked, plan)
    engine = engine_of(framework)
    title = f"{parsed} in {engine.title}" + (f", order {order}" if order else "")
    if picture is not None:
        _draw(found, Path(picture), title, ranks_per_node, engine)
        print(f"wrote {picture}", file=sys.stderr)
    if as_json:
        print(json.dumps(found))
        return
    plain = {} if _has_frames(getattr(sys.stdout, "encoding", None)) else str.maketrans(PLAIN)
    for line in _text(found, title, parsed, ranks_per_node, engine):
        print(line.translate(plain))


def _has_frames(encoding: str | None) -> bool:
    """Tell whether a terminal or file has the lines that frames are drawn with."""
    try:
        "".join(PLAIN).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _draw(found: "Mapping[str, Groups]", path: "Path", title: str, ranks_per_node: int, engine: "Engine") -> None:
    from crosstraffic.commands.errors import planning
    from crosstraffic.errors import UsageError
    from crosstraffic.results.group_picture import check_suffix, group_figure, save_picture

    with planning("picture"):
        check_suffix(path)
        figure = group_figure(found, title=title, ranks_per_node=ranks_per_node, names=engine.names)
    try:
        save_picture(figure, path)
    except OSError as error:
        raise UsageError(f"picture: {path} cannot be written: {error.strerror or error}") from error


def _text(
    found: "Mapping[str, Groups]", title: str, layout: "Layout", ranks_per_node: int, engine: "Engine"
) -> "Iterator[str]":
    """Write a grid of ranks framed by node, then the groups of each kind."""
    from textwrap import wrap

    from crosstraffic.results.group_nodes import kinds_by_groups, num_ranks_of, shown_nodes

    num_ranks, kinds = num_ranks_of(found), kinds_by_groups(found)
    num_nodes, most = (
        -(-num_ranks // ranks_per_node),
        MAX_GRID_RANKS if num_ranks <= MAX_GRID_RANKS else MAX_CHOSEN_RANKS,
    )
    size = f"{_count(num_ranks, 'rank')} on {_count(num_nodes, 'node')} of {ranks_per_node}"
    yield from wrap(f"{title}: {size}", WIDTH)
    if kinds:
        yield ""
        yield "below a rank are the numbers of its groups: same number in a row, same group"
        pieces = _pieces(shown_nodes(found, ranks_per_node, most), ranks_per_node, num_ranks)
        yield from _grid({names[0]: members for members, names in kinds.items()}, pieces, ranks_per_node)
        left_out = num_ranks - sum(map(len, pieces))
        if left_out:
            yield f"{_count(left_out, 'rank')} left out: shown are peers of rank 0 and the first nodes"
        yield ""
    labels = {name: _label(name, engine) for name in found}
    width = max(map(len, labels.values())) + 2
    for name, members in found.items():
        start = f"{labels[name]:<{width}}{f'{len(members)} x {len(members[0])}':<12}"
        if len(members[0]) == 1:
            yield f"{start}each rank alone"
        elif kinds[members][0] != name:
            yield f"{start}as {kinds[members][0]}"
        else:
            yield from _listed(f"{start}{_where(members, ranks_per_node)}", members)
    for name, same in engine.same_ranks.items():
        if len(found[same][0]) > 1:
            yield f"{name} (where it is on) has its own communicator over the ranks of {same}"
    yield from engine.notes(layout)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _label(name: str, engine: "Engine") -> str:
    """Return the name of a kind, with the engine's own where that is another one."""
    own = engine.names.get(name, name)
    return name if own.lower() == name.replace("-", "_") else f"{name} ({own})"


def _where(members: "Groups", ranks_per_node: int) -> str:
    from crosstraffic.results.group_nodes import crossing

    across = crossing(members, ranks_per_node)
    if across in (0, len(members)):
        return f"{'across nodes' if across else 'in a node':<14}"
    return f"{f'{across} across':<14}"


def _listed(start: str, members: "Groups") -> "Iterator[str]":
    """Write the groups of one kind, wrapped; the last line says how many are not shown."""
    indent, room = " " * len(start), WIDTH - 1 - len(start)
    lines, line, shown = 0, start, 0
    for index, group in enumerate(members):
        text = _short(group, room)
        if len(line) + len(text) > WIDTH - 1 and line not in (start, indent):
            yield line.rstrip()
            lines, line = lines + 1, indent
        if lines == MAX_LINES or len(line) + len(text) > WIDTH:
            yield f"{indent}and {len(members) - shown} more; --json has all".rstrip()
            return
        line, shown = f"{line}{text} ", index + 1
    yield line.rstrip()


def _short(group: tuple[int, ...], room: int) -> str:
    """Write a group, its middle left out where there is no room.

    >>> _short(tuple(range(16)), 24)
    '[0 1 2 ... 15]'
    """
    text = f"[{' '.join(map(str, group))}]" if len(group) < 2 * room else ""
    for first in (3, 2, 1):
        if text and len(text) <= room:
            break
        text = f"[{' '.join(map(str, group[:first]))} ... {group[-1]}]"
    return text


def _pieces(nodes: tuple[int, ...], ranks_per_node: int, num_ranks: int) -> list[range]:
    """Return the ranks of each node, of a large one the first."""
    wide = min(ranks_per_node, MAX_NODE_RANKS)
    return [range(node * ranks_per_node, min(node * ranks_per_node + wide, num_ranks)) for node in nodes]


def _grid(kinds: "Mapping[str, Groups]", pieces: list[range], ranks_per_node: int) -> "Iterator[str]":
    """Write bands of nodes: ranks in a row, and below them for each kind the number of each rank's group."""
    shown = {rank for piece in pieces for rank in piece}
    rows = {"rank": {rank: rank for rank in shown}}
    for name, members in kinds.items():
        rows[name] = {rank: index for index, group in enumerate(members) for rank in group if rank in shown}
    cell = 1 + max(len(str(max(numbers.values()))) for numbers in rows.values())
    width = max(map(len, rows)) + 1
    wide = min(ranks_per_node, max(1, (WIDTH - width - 3) // cell))  # ranks of a node in one band
    pieces = [piece[start : start + wide] for piece in pieces for start in range(0, len(piece), wide)]
    per_band = max(1, (WIDTH - width) // (cell * wide + 3))
    for start in range(0, len(pieces), per_band):
        band = pieces[start : start + per_band]
        sizes = [cell * len(piece) + 1 for piece in band]
        heads = [_head(piece.start // ranks_per_node, size) for piece, size in zip(band, sizes, strict=True)]
        yield " " * width + "".join(f"┌{head}┐" for head in heads)
        for name, numbers in rows.items():
            yield f"{name:<{width}}" + _row(band, numbers, cell)
            if name == "rank":
                yield " " * width + "".join(f"├{'─' * size}┤" for size in sizes)
        yield " " * width + "".join(f"└{'─' * size}┘" for size in sizes)


def _head(node: int, size: int) -> str:
    """Write the upper edge of a node's frame with the node's number, if there is room."""
    words = next((words for words in (f" node {node} ", f" {node} ") if len(words) <= size), "")
    return f"{words:─<{size}}"


def _row(band: "list[range]", numbers: "Mapping[int, int]", cell: int) -> str:
    return "".join("│" + "".join(f"{numbers[rank]:>{cell}}" for rank in piece) + " │" for piece in band)
