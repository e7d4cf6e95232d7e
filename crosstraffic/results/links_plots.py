"""Pictures of links: heat maps of each direction, bars of incast and outcast."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from crosstraffic.results.figures import COLOURS, INK, LINE, MUTED, new_figure, short, style
from crosstraffic.results.links import Floats
from crosstraffic.units import format_rate

MAX_NUMBERS = 16  # end points up to which each cell holds its number
_MAP = colormaps["cividis"]  # even in lightness, and the same to colour-blind eyes


def plot_links(
    values: Floats,
    names: Sequence[str],
    written: Callable[[float], str],
    *,
    framed: Sequence[tuple[int, int]] = (),
    is_high_good: bool = True,
) -> Figure:
    """Draw ``[sender, receiver]`` as a heat map; ``framed`` directions get a frame. Light is good.

    The scale begins at 0 for rates, so that noise of some percent does not look like a fault.
    """
    count = len(names)
    has_numbers = count <= MAX_NUMBERS
    size = 52 if has_numbers else max(420 / count, 3.0)
    known = values[~np.isnan(values)]
    top = float(known.max()) if len(known) else 1.0
    with style():
        figure = new_figure(110 + size * max(count, 3), 90 + (0.62 * size if has_numbers else size) * max(count, 3))
        axes = figure.subplots()
        for row in range(count):
            for column in range(count):
                value = float(values[row, column])
                place = (column + 0.02, row + 0.03)
                if np.isnan(value):
                    axes.add_patch(Rectangle(place, 0.96, 0.94, fc=LINE, alpha=0.35, linewidth=0))
                    text, ink = ("" if row == column else "–"), INK
                else:
                    share = value / top if is_high_good else 1 - 0.9 * value / top
                    axes.add_patch(Rectangle(place, 0.96, 0.94, fc=_MAP(share), linewidth=0))
                    text, ink = written(value), "#10202c" if share > 0.55 else "#ffffff"
                if has_numbers and text:
                    axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=ink, fontsize=8)
        for row, column in framed:
            frame = Rectangle((column + 0.04, row + 0.05), 0.92, 0.9, fc="none", ec=COLOURS["ep"], linewidth=2.2)
            axes.add_patch(frame)
        step = max(1, count // MAX_NUMBERS)
        places = np.arange(0, count, step) + 0.5
        labels = [short(name, 16) for name in names[::step]]
        axes.set_xticks(places, labels, rotation=35, ha="left", rotation_mode="anchor")
        axes.set_yticks(places, labels)
        axes.xaxis.tick_top()
        axes.tick_params(length=0, labelcolor=INK)
        axes.set_xlim(0, count)
        axes.set_ylim(count, 0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("from the row's end point to the column's")
    return figure


def plot_fans(incast: Floats, outcast: Floats, names: Sequence[str], reference: float | None) -> Figure:
    """Draw what each end point gets from several at once, and sends to several; the line is the reference of a link."""
    count = len(names)
    with style():
        figure = new_figure(430, 80 + max(26 * count, 40) if count <= MAX_NUMBERS else 480)
        axes = figure.subplots()
        places = np.arange(count)
        axes.barh(places - 0.19, np.nan_to_num(incast), height=0.36, color=COLOURS["tp"], label="incast")
        axes.barh(places + 0.19, np.nan_to_num(outcast), height=0.36, color=COLOURS["pp"], label="outcast")
        if reference is not None:
            axes.axvline(reference, color=MUTED, linewidth=1, linestyle="--")
        step = max(1, count // MAX_NUMBERS)
        axes.set_yticks(places[::step], [short(name, 16) for name in names[::step]])
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value) if value else "0"))
        axes.locator_params(axis="x", nbins=5)
    return figure
