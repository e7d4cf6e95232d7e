"""Plots of a run. Each takes a tidy frame and returns a figure; the report shows each frame beneath its picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from crosstraffic.results.figures import (
    COLOURS,
    GROUP_COLOURS,
    INK,
    LINE,
    MUTED,
    PAPER,
    bytes_axis,
    colour,
    ink_on,
    new_figure,
    same_unit,
    seconds_axis,
    short,
    style,
)
from crosstraffic.units import format_bytes

CADENCES: Mapping[str, tuple[str, str]] = {"isolated": ("o", "-"), "streaming": ("s", "--")}
OUTLINE = "#e69f00"  # an interval on a dark or light bar
MARKERS: Mapping[str, str] = {"alone": "o", "together": "^", "step": "s"}


def plot_step_bytes(frame: pd.DataFrame) -> Figure:
    """Draw bytes of each whole step by pattern as shares of one bar, the total beside it (frame: ``step_bytes``)."""
    totals = frame.groupby(["step", "pattern"], sort=False)["wire_bytes"].sum()
    steps = list(dict.fromkeys(frame["step"]))
    with style():
        figure = new_figure(430, 56 + 44 * len(steps))
        axes = figure.subplots()
        for index, step in enumerate(steps):
            part = totals[step]
            whole, left = max(float(part.sum()), 1.0), 0.0
            for pattern in sorted(part.index, key=lambda name: list(COLOURS).index(name) if name in COLOURS else 99):
                share = float(part[pattern]) / whole
                axes.barh(index, share, left=left, height=0.58, color=colour(pattern), edgecolor=PAPER, linewidth=1.5)
                if share > 0.13:
                    text = f"{pattern} {share:.0%}"
                    axes.text(
                        left + share / 2, index, text, ha="center", va="center", color=ink_on(pattern), weight="bold"
                    )
                left += share
            axes.text(1.015, index, format_bytes(whole), ha="left", va="center")
        axes.set_yticks(range(len(steps)), [short(step) for step in steps])
        axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=9.5)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.17)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        axes.grid(visible=False, axis="y")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("share of the bytes in one step; the total at the right")
    return figure


def plot_groups(groups: Sequence[Sequence[int]], nodes: Sequence[int], *, columns: int = 8) -> Figure:
    """Draw ranks as cells, nodes as frames and process groups as colours; a rank in no group stays empty."""
    group_of = {rank: index for index, group in enumerate(groups) for rank in group}
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    wide = min(columns, max((len(ranks) for ranks in by_node.values()), default=1))
    rows = {node: -(-len(ranks) // wide) for node, ranks in by_node.items()}
    height = sum(rows.values()) + 0.75 * len(rows)
    cell = 36 if wide <= 4 else 26
    with style():
        figure = new_figure(max(cell * (wide + 0.6), 90), cell * (height + 0.1))
        figure.set_layout_engine("none")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        top = 0.0
        for node, ranks in by_node.items():
            frame = (-0.15, top + 0.42), wide + 0.3, rows[node] + 0.25
            axes.add_patch(FancyBboxPatch(*frame, boxstyle="round,pad=0,rounding_size=0.14", fc="none", ec=LINE))
            axes.text(0.0, top + 0.3, f"node {node}", color=MUTED, fontsize=9, va="center")
            for place, rank in enumerate(ranks):
                x, y = place % wide, top + 0.55 + place // wide
                group = group_of.get(rank)
                fill = "none" if group is None else GROUP_COLOURS[group % len(GROUP_COLOURS)]
                axes.add_patch(Rectangle((x + 0.05, y + 0.04), 0.9, 0.9, fc=fill, ec=LINE if group is None else fill))
                ink = MUTED if group is None else "#ffffff"
                axes.text(x + 0.5, y + 0.5, str(rank), ha="center", va="center_baseline", color=ink, weight="bold")
            top += rows[node] + 0.75
        axes.set_xlim(-0.3, wide + 0.3)
        axes.set_ylim(top + 0.1, 0)
        axes.set_axis_off()
    return figure


def plot_time_against_size(
    frame: pd.DataFrame,
    stream: str,
    *,
    curves: pd.DataFrame | None = None,
    real_bytes: Sequence[int] = (),
    pattern: str = "other",
    limits_s: tuple[float, float] | None = None,
    limits_bytes: tuple[float, float] | None = None,
) -> Figure:
    """Draw one stream's time alone against its size: points with intervals, the model as a line with its interval.

    Filled circles and full lines are isolated calls, open squares and dashed lines are streaming ones.
    """
    own = frame[(frame["stream"] == stream) & (frame["payload_bytes"] > 0) & frame["time_median_s"].notna()]
    ink = colour(pattern)
    with style():
        figure = new_figure(330, 226)
        axes = figure.subplots()
        for size in real_bytes:
            axes.axvline(size, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
        for cadence, (marker, dashes) in CADENCES.items():
            part = own[own["cadence"] == cadence].sort_values("payload_bytes")
            sizes, times = part["payload_bytes"].to_numpy(float), part["time_median_s"].to_numpy(float)
            low, high = (
                part["time_low_s"].fillna(part["time_median_s"]),
                part["time_high_s"].fillna(part["time_median_s"]),
            )
            fill = ink if cadence == "isolated" else PAPER
            axes.errorbar(
                sizes,
                times,
                yerr=np.clip([times - low.to_numpy(float), high.to_numpy(float) - times], 0, None),
                fmt=marker,
                color=ink,
                markerfacecolor=fill,
                markersize=4.2,
                markeredgewidth=1.0,
                elinewidth=1.0,
                label=cadence,
                zorder=3,
            )
            if curves is not None:
                line = curves[(curves["stream"] == stream) & (curves["cadence"] == cadence)].sort_values(
                    "payload_bytes"
                )
                x = line["payload_bytes"].to_numpy(float)
                axes.plot(x, line["predicted_s"].to_numpy(float), dashes, color=ink, linewidth=1.2, zorder=2)
                band = line["low_s"].to_numpy(float), line["high_s"].to_numpy(float)
                axes.fill_between(x, *band, color=ink, alpha=0.16, linewidth=0, zorder=1)
        low_b, high_b = limits_bytes or (own["payload_bytes"].min(), own["payload_bytes"].max())
        low_s, high_s = limits_s or (own["time_median_s"].min(), own["time_median_s"].max())
        bytes_axis(axes, low_b, high_b, max_ticks=5)
        axes.set_yscale("log")
        seconds_axis(axes.yaxis, low_s, high_s)
        axes.set_xlim(low_b / 1.6, high_b * 1.6)
        axes.set_ylim(low_s / 1.5, high_s * 1.5)
        axes.set_xlabel("payload per call")
        axes.set_ylabel("time per call")
    return figure


def plot_slowdowns(matrix: pd.DataFrame) -> Figure:
    """Draw a slowdown matrix: each row's stream, slowed by each column's (frame: ``slowdown_matrix``)."""
    count = len(matrix)
    with style():
        figure = new_figure(130 + 38 * max(count, 2), 120 + 28 * max(count, 2))
        axes = figure.subplots()
        top = max(float(np.nanmax(matrix.to_numpy())) if matrix.notna().any(axis=None) else 1.0, 1.5)
        for row, stream in enumerate(matrix.index):
            for column, other in enumerate(matrix.columns):
                value = float(matrix.loc[stream, other])
                if np.isnan(value):
                    text, fill, alpha = ("" if row == column else "–"), LINE, 0.35 if row == column else 0.0
                else:
                    text = f"{value:.2f}"
                    fill = COLOURS["ep"] if value >= 1 else COLOURS["tp"]
                    alpha = 0.78 * min(abs(np.log(value)) / np.log(top), 1.0)
                axes.add_patch(Rectangle((column + 0.03, row + 0.04), 0.94, 0.92, fc=fill, alpha=alpha, linewidth=0))
                weight = "bold" if value == np.nanmax(matrix.to_numpy()) else "normal"
                axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", weight=weight)
        places = np.arange(count) + 0.5
        axes.set_xticks(
            places, [short(name) for name in matrix.columns], rotation=35, ha="left", rotation_mode="anchor"
        )
        axes.set_yticks(places, [short(name) for name in matrix.index])
        axes.xaxis.tick_top()
        axes.tick_params(length=0, labelcolor=INK)
        axes.set_xlim(0, max(count, 1))
        axes.set_ylim(max(count, 1), 0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("slowdown of the row's stream while the column's runs")
    return figure


def plot_steps(table: pd.DataFrame, lanes: pd.DataFrame) -> Figure:
    """Draw each whole step: its lanes as calls alone, stacked by pattern; measured and predicted with intervals.

    Frames: ``step_table`` and ``step_lanes``. Each step has its own scale.
    """
    steps = table["step"].tolist()
    num_rows = [int(count) + 2 for count in table["num_lanes"]]
    with style():
        figure = new_figure(430, sum(26 * rows + 56 for rows in num_rows))
        figure.set_layout_engine("constrained", h_pad=0.1)
        panels = figure.subplots(len(steps), 1, squeeze=False, gridspec_kw={"height_ratios": num_rows})[:, 0]
        for axes, step, rows, row in zip(panels, steps, num_rows, table.to_dict("records"), strict=True):
            names = ["measured", "predicted", *(f"lane {lane + 1}, alone" for lane in range(rows - 2))]
            for y, kind in enumerate(("measured", "predicted")):
                middle = row["measured_median_s"] if y == 0 else row["predicted_s"]
                low, high = (row["measured_low_s"], row["measured_high_s"]) if y == 0 else (row["low_s"], row["high_s"])
                if np.isnan(middle):
                    axes.text(0, y, f" not {kind}", va="center", color=MUTED)
                    continue
                axes.barh(y, middle, height=0.5, color=INK if y == 0 else MUTED, alpha=0.85 if y == 0 else 0.55)
                if not np.isnan(low):
                    axes.plot([low, high], [y, y], color=OUTLINE, linewidth=1.6, solid_capstyle="butt")
            for lane in range(rows - 2):
                left = 0.0
                for part in lanes[(lanes["step"] == step) & (lanes["lane"] == lane)].to_dict("records"):
                    if np.isnan(part["alone_s"]):
                        continue
                    style_of = {"color": colour(part["pattern"]), "edgecolor": PAPER, "linewidth": 0.8}
                    axes.barh(lane + 2, part["alone_s"], left=left, height=0.6, **style_of)
                    left += part["alone_s"]
            axes.set_yticks(range(rows), names)
            axes.set_ylim(rows - 0.4, -0.6)
            axes.set_title(short(step, 60))
            axes.tick_params(axis="y", length=0, labelcolor=INK)
            axes.grid(visible=False, axis="y")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.xaxis.set_major_formatter(same_unit(axes.get_xlim()[1]))
    return figure


def plot_predicted(frame: pd.DataFrame, patterns: Mapping[str, str]) -> Figure:
    """Draw predicted against measured times; filled marks were held out, open ones were fitted, bars are intervals.

    The line is equality, the band is 20 % to both sides.
    """
    good = frame[(frame["measured_s"] > 0) & (frame["predicted_s"] > 0)]
    with style():
        figure = new_figure(430, 390)
        axes = figure.subplots()
        everything = np.concatenate([good["measured_s"], good["predicted_s"]])
        low, high = float(everything.min()) / 1.4, float(everything.max()) * 1.4
        ends = np.array([low, high])
        axes.fill_between(ends, ends / 1.2, ends * 1.2, color=MUTED, alpha=0.14, linewidth=0)
        axes.plot(ends, ends, color=MUTED, linewidth=1)
        whole = (good["kind"] == "step") | (good["stream"] == "*")
        names = good["stream"].where(~whole, "")
        inks = np.array([colour(patterns.get(name, "other")) if name else INK for name in names], dtype=object)
        held = good["held_out"].to_numpy(bool)
        axes.vlines(good["measured_s"], good["low_s"], good["high_s"], colors=inks.tolist(), linewidth=0.7, alpha=0.45)
        for kind, marker in MARKERS.items():
            for is_held in (False, True):
                part = ((good["kind"] == kind) & (held == is_held)).to_numpy()
                if not part.any():
                    continue
                own = inks[part].tolist()
                axes.scatter(
                    good["measured_s"][part],
                    good["predicted_s"][part],
                    marker=marker,
                    s=30 if kind == "step" else 16,
                    facecolors=own if is_held else PAPER,
                    edgecolors=own,
                    linewidths=0.9,
                    zorder=3,
                )
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            seconds_axis(axis, low, high)
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.set_xlabel("measured time")
        axes.set_ylabel("predicted time")
    return figure


def plot_validation(validation: Mapping[str, Any]) -> Figure:
    """Draw each model's held-out error (median to 90th percentile) beside the repeat noise, in percent."""
    named: list[tuple[str, Mapping[str, Any]]] = [("repeat noise", validation["noise"]), *validation["models"].items()]
    rows = [(name, row) for name, row in named if row.get("median_ape") is not None and row.get("p90_ape") is not None]
    with style():
        figure = new_figure(430, 60 + 30 * len(rows))
        axes = figure.subplots()
        for y, (name, row) in enumerate(rows):
            ink = MUTED if name == "repeat noise" else COLOURS["tp"] if name == "ours" else COLOURS["pp"]
            median, p90 = 100 * row["median_ape"], 100 * row["p90_ape"]
            axes.plot([median, p90], [y, y], color=ink, linewidth=5, alpha=0.35, solid_capstyle="round")
            axes.plot([median], [y], "o", color=ink, markersize=7)
        axes.set_yticks(range(len(rows)), ["this model" if name == "ours" else name for name, _ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_xlabel("error: dot the median, bar to the 90th percentile")
    return figure
