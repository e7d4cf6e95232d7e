"""How figures look and how they go into a page: neutral inks that follow the page's light or dark scheme."""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from crosstraffic.units import format_bytes, format_seconds

# Okabe and Ito's colour-blind palette, fixed by pattern; yellow is darkened to be seen on white, epd is Tol's wine.
COLOURS: Mapping[str, str] = {
    "tp": "#0072b2",
    "sp": "#56b4e9",
    "cp": "#009e73",
    "pp": "#e69f00",
    "ep": "#d55e00",
    "pd": "#cc79a7",
    "epd": "#882255",
    "dp": "#a89f00",
}
OTHER = "#8a8f98"
# Tol's muted scheme, so that the colour of a group is not taken for that of a pattern; indigo is lightened.
GROUP_COLOURS: Sequence[str] = (
    "#5b4fb0",
    "#2f9a8a",
    "#9c3a68",
    "#7f7f2a",
    "#4a7fb5",
    "#bf5a69",
    "#117733",
    "#a04a96",
)

# Stand-ins that ``to_svg`` turns into variables of the page; a file on its own shows them as they are.
INK, MUTED, LINE, PAPER = "#1b2530", "#66717e", "#d9dee4", "#fefefe"
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", LINE: "var(--line)", PAPER: "var(--card)"}

STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "crosstraffic",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 10.0,
    "axes.labelsize": 10.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "figure.constrained_layout.use": True,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save with our settings, leaving the user's matplotlib as it was."""
    with rc_context(dict(STYLE)):
        yield


def colour(pattern: str) -> str:
    """Return a pattern's colour; grey for one that is not a parallelism of ours."""
    return COLOURS.get(pattern, OTHER)


def ink_on(pattern: str) -> str:
    """Return the ink that is legible on a pattern's colour."""
    return "#10202c" if pattern in ("sp", "pp", "dp", "pd") else "#ffffff"


def short(name: str, most: int = 30) -> str:
    """Cut a name that would push the picture off its page.

    >>> short("a" * 40, 8)
    'aaaaaaa…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; ``width`` and ``height`` in points, the unit of its fonts."""
    return Figure(figsize=(width / 72, height / 72), layout="constrained")


def bytes_axis(axes: Axes, low: float, high: float, max_ticks: int = 6) -> None:
    """Put binary ticks (64 B, 1 KiB, ...) on a logarithmic x axis."""
    axes.set_xscale("log", base=2)
    powers = np.arange(np.ceil(np.log2(max(low, 1))), np.floor(np.log2(max(high, 2))) + 1)
    step = max(1, int(np.ceil(len(powers) / max_ticks)))
    step = 2 * ((step + 1) // 2) if step > 1 else 1
    anchor = next((index for index, power in enumerate(powers) if power % 10 in (0, 4)), 0) % step
    axes.xaxis.set_major_locator(FixedLocator((2.0 ** powers[anchor::step]).tolist()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))


def seconds_axis(axis: Any, low: float, high: float) -> None:
    """Put decades with their unit (10 µs, 1 ms) on a logarithmic axis."""
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    axis.set_major_locator(FixedLocator((10.0**decades).tolist()))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))


def same_unit(top_s: float) -> FuncFormatter:
    """Return a formatter that writes all ticks of a linear time axis in the unit that suits its end."""
    factor, unit = next(((f, u) for f, u in ((1, "s"), (1e3, "ms")) if top_s * f >= 1), (1e6, "µs"))
    return FuncFormatter(lambda value, _: f"{value * factor:g} {unit}")


def to_svg(figure: Figure, prefix: str = "") -> str:
    """Return a figure as an ``<svg>`` element to put into a page: no outer references, its ids under ``prefix``.

    Text stays text, in the page's font; neutral colours become the page's variables ``--ink``, ``--muted``,
    ``--line`` and ``--card``.
    """
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', _open_tag, svg, count=1, flags=re.DOTALL)
    svg = re.sub(r' id="[^"]*_\d+"', "", svg)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    for ink, variable in _VARIABLES.items():
        svg = svg.replace(ink, variable)
    svg = re.sub(r"font: ([^;\"]*?) 'DejaVu Sans'[^;\"]*", r"font: \1 var(--font)", svg)
    return svg.replace("'DejaVu Sans'", "var(--font)").strip()


def _open_tag(found: re.Match[str]) -> str:
    _, _, width, _ = found.group(1).split()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{found.group(1)}" style="--width: {float(width):.0f}px" aria-hidden="true" focusable="false">'
    )
