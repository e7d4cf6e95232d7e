"""The process groups of a layout as a picture: ranks are cells, nodes are frames, groups are colours with a number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log, sqrt
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from crosstraffic.patterns.layout import Groups
from crosstraffic.results.figures import GROUP_COLOURS, INK, LINE, MUTED, new_figure, short, style
from crosstraffic.results.group_nodes import crossing, kinds_by_groups, num_ranks_of, shown_nodes

SUFFIXES = (".png", ".svg", ".pdf")
MAX_CELLS = 128  # ranks that one panel shows
PAGE = 1000.0  # points, as all sizes below
CELL, GAP, HEAD, NODE_HEAD, MARGIN = 25.0, 13.0, 34.0, 13.0, 20.0
BETWEEN = 26.0  # panels beside each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Where the nodes of a panel lie: ``columns`` cells wide, ``rows`` high, ``across`` of them beside each other."""

    nodes: tuple[int, ...]
    per_node: int
    columns: int
    rows: int
    across: int

    @property
    def width(self) -> float:
        """Points that the panel is wide."""
        return max(self.across * (self.columns * CELL + GAP) - GAP + 8, 170.0)

    @property
    def height(self) -> float:
        """Points that the panel is high."""
        return HEAD + ceil(len(self.nodes) / self.across) * self.node_height + 8

    @property
    def node_height(self) -> float:
        """Points from the top of one node to that of the next one below."""
        return self.rows * CELL + NODE_HEAD + 11


def check_suffix(path: Path) -> None:
    """Raise ValueError for a picture of a kind that is not drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"not a kind of picture: {path.name!r}; allowed: {', '.join(SUFFIXES)}")


def group_figure(
    found: Mapping[str, Groups],
    *,
    title: str,
    ranks_per_node: int = 8,
    names: Mapping[str, str] | None = None,
) -> Figure:
    """Draw one panel for each kind of group with more than one rank; kinds with the same groups share one.

    ``names`` is what the engine calls the kinds. At most ``MAX_CELLS`` ranks are drawn, and the picture says so.
    """
    num_ranks = num_ranks_of(found)
    frames = _frames(found, num_ranks, ranks_per_node)
    panels, notes = list(kinds_by_groups(found).items()), _notes(frames, num_ranks, ranks_per_node)
    alone = [name for name, groups in found.items() if len(groups[0]) == 1]
    if panels and alone:
        notes.append(f"Groups of one rank, not drawn: {', '.join(alone)}.")
    step = frames.width + BETWEEN
    across = _beside(max(1, len(panels)), step, frames.height, 1.4)
    down, head = ceil(len(panels) / across), 36 + 14 * len(notes)
    width, height = max(across * step - BETWEEN, 420.0), head + max(down * frames.height, 20.0)
    with style():
        figure = new_figure(width + 2 * MARGIN, height + 2 * MARGIN)
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(-MARGIN, width + MARGIN)
        axes.set_ylim(height + MARGIN, -MARGIN)
        axes.set_axis_off()
        axes.text(0, 6, title, fontsize=13, weight="bold", va="center", color=INK)
        for line, words in enumerate(notes):
            axes.text(0, 25 + 14 * line, words, fontsize=9, va="center", color=MUTED)
        for index, (groups, kinds) in enumerate(panels):
            left, top = index % across * step, head + index // across * frames.height
            _panel(axes, left, top, groups, _heading(kinds, names or {}, frames.width), frames, num_ranks)
        if not panels:
            axes.text(0, head + 6, "Every rank is alone in its groups.", fontsize=10, va="center", color=MUTED)
    return figure


def _beside(count: int, width: float, height: float, shape: float) -> int:
    """Return how many things to put into a row so that all are about ``shape`` times as wide as high, with few gaps."""

    def badness(across: int) -> float:
        down = ceil(count / across)
        return abs(log(across * width / (down * height) / shape)) + 1.5 * (across * down - count) / count

    return min(range(1, max(1, min(count, int(PAGE / width))) + 1), key=badness)


def _frames(found: Mapping[str, Groups], num_ranks: int, ranks_per_node: int) -> Frames:
    nodes = shown_nodes(found, ranks_per_node, MAX_CELLS)
    shown = min(ranks_per_node, num_ranks, MAX_CELLS)
    columns = min(shown, 4) if shown <= 8 else min(16, 2 * ceil(sqrt(shown) / 2) + 2)
    rows = ceil(shown / columns)
    across = _beside(len(nodes), columns * CELL + GAP, rows * CELL + NODE_HEAD + 11, 2.0)
    return Frames(nodes=nodes, per_node=ranks_per_node, columns=columns, rows=rows, across=across)


def _notes(frames: Frames, num_ranks: int, ranks_per_node: int) -> list[str]:
    """Say how to read the picture, and what it leaves out."""
    num_nodes = ceil(num_ranks / ranks_per_node)
    ranks, nodes = f"{num_ranks:,} rank{'s' * (num_ranks > 1)}", f"{num_nodes:,} node{'s' * (num_nodes > 1)}"
    notes = [f"{ranks} on {nodes} of {ranks_per_node}. A cell is a rank; its colour and small number tell its group."]
    drawn = sum(len(_ranks_of(node, frames, num_ranks)) for node in frames.nodes)
    if drawn < num_ranks:
        what = f"{len(frames.nodes)} nodes, the first ones and those with peers of rank 0"
        what = what if len(frames.nodes) > 1 else f"the first {drawn} ranks"
        notes.append(f"Shown are {what}; the other {num_ranks - drawn:,} ranks are left out.")
    return notes


def _ranks_of(node: int, frames: Frames, num_ranks: int) -> range:
    first = node * frames.per_node
    return range(first, min(first + min(frames.per_node, frames.rows * frames.columns, MAX_CELLS), num_ranks))


def _heading(kinds: Sequence[str], names: Mapping[str, str], width: float) -> str:
    """Write the kinds of a panel, with the engine's own name where it is another one and there is room."""
    own = [(kind, names.get(kind, kind)) for kind in kinds]
    whole = " = ".join(kind if name.lower() == kind.replace("-", "_") else f"{kind} ({name})" for kind, name in own)
    most = int(width / 6.4)
    return whole if len(whole) <= most else short(" = ".join(kinds), most)


def _panel(axes: Axes, left: float, top: float, groups: Groups, heading: str, frames: Frames, num_ranks: int) -> None:
    """Draw the ranks of the shown nodes, coloured by their group."""
    across = crossing(groups, frames.per_node)
    where = "inside nodes" if not across else "across nodes" if across == len(groups) else f"{across:,} across nodes"
    count = f"{len(groups):,} group{'s' * (len(groups) > 1)} of {len(groups[0]):,}, {where}"
    axes.text(left, top + 5, heading, fontsize=10.5, weight="bold", va="center", color=INK)
    axes.text(left, top + 19, count, fontsize=8.5, va="center", color=MUTED)
    wanted = {rank for node in frames.nodes for rank in _ranks_of(node, frames, num_ranks)}
    group_of = {rank: index for index, group in enumerate(groups) for rank in group if rank in wanted}
    colour_of = {group: place for place, group in enumerate(dict.fromkeys(group_of[rank] for rank in sorted(wanted)))}
    for place, node in enumerate(frames.nodes):
        x = left + place % frames.across * (frames.columns * CELL + GAP) + 4
        y = top + HEAD + place // frames.across * frames.node_height
        box = (x - 4, y + NODE_HEAD - 4), frames.columns * CELL + 7, frames.rows * CELL + 7
        axes.add_patch(FancyBboxPatch(*box, boxstyle="round,pad=0,rounding_size=4", fc="none", ec=LINE))
        axes.text(x - 2, y + 4, f"node {node:,}", fontsize=7.5, va="center", color=MUTED)
        for cell, rank in enumerate(_ranks_of(node, frames, num_ranks)):
            corner = x + cell % frames.columns * CELL, y + NODE_HEAD + cell // frames.columns * CELL
            _cell(axes, corner, rank, group_of[rank], colour_of[group_of[rank]])


def _cell(axes: Axes, corner: tuple[float, float], rank: int, group: int, place: int) -> None:
    """Draw one rank: its number, and that of its group below; a second round of colours is light with a dark edge."""
    x, y = corner
    edge = GROUP_COLOURS[place % len(GROUP_COLOURS)]
    is_light = place // len(GROUP_COLOURS) % 2 == 1
    fill = to_hex([1 - 0.26 * (1 - part) for part in to_rgb(edge)]) if is_light else edge
    ink = INK if is_light else "#ffffff"
    axes.add_patch(Rectangle((x + 0.8, y + 0.8), CELL - 2.6, CELL - 2.6, fc=fill, ec=edge, linewidth=1.0))
    size = 9.0 if rank < 1000 else 7.5 if rank < 10_000 else 5.8
    middle = x + CELL / 2 - 0.5
    axes.text(middle, y + 9.5, str(rank), ha="center", va="center", fontsize=size, color=ink, weight="bold")
    small = 6.2 if group < 100_000 else 5.4
    axes.text(middle, y + 18.6, str(group), ha="center", va="center", fontsize=small, color=ink)


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as the kind of picture that the name of the file asks for.

    Raises:
        ValueError: a suffix that is not drawn.
        OSError: the file cannot be written.
    """
    check_suffix(path)
    kind = path.suffix.lower().removeprefix(".")
    dates: Mapping[str, Mapping[str, None]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
    with style():
        figure.savefig(path, format=kind, dpi=160, facecolor="white", metadata=dict(dates[kind]))
