"""The report's sections on traffic and times: each takes a run and returns a part of the page."""

import numpy as np
import pandas as pd

from crosstraffic.results.figures import colour
from crosstraffic.results.page import PageTable, Picture, Section, frame_table, picture
from crosstraffic.results.plots import (
    plot_groups,
    plot_slowdowns,
    plot_step_bytes,
    plot_steps,
    plot_time_against_size,
)
from crosstraffic.results.store import Run
from crosstraffic.results.summary import rate_text, time_text
from crosstraffic.results.tables import (
    PATTERNS,
    larger_mixes,
    ok_alone,
    pairs,
    pattern_of,
    slowdown_matrix,
    step_bytes,
    step_lanes,
    step_table,
    stream_table,
)
from crosstraffic.units import format_bytes

Legend = tuple[tuple[str, str, str], ...]


def machine(run: Run) -> str:
    """Say in a few words where a run ran, for captions."""
    hosts = list(dict.fromkeys(place.host for place in run.placement))
    where = (
        hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes ({', '.join(hosts[:3])}{', ...' if hosts[3:] else ''})"
    )
    ranks = f"{run.info.world_size} rank{'' if run.info.world_size == 1 else 's'}"
    return f"{ranks} on {where or 'an unknown host'}, {run.info.transport.name}"


def pattern_legend(patterns: list[str]) -> Legend:
    """Return the colours of the patterns in use, in their fixed order."""
    used = [name for name in PATTERNS if name in patterns]
    extra = ["other"] if any(name not in PATTERNS for name in patterns) else []
    return tuple(("box", colour(name), f"{name} {PATTERNS.get(name, '')}".strip()) for name in used + extra)


def unfinished(run: Run) -> str:
    """Say how a run ended where that explains a gap."""
    return (
        "" if run.info.status == "complete" else f" The run is {run.info.status}: {run.info.why or 'no reason given'}."
    )


def bytes_section(run: Run) -> Section:
    """Bytes of each whole step by pattern."""
    title = "What goes over the wire"
    frame = step_bytes(run)
    if frame.empty or not frame["wire_bytes"].sum():
        why = "This run has no whole steps" if not run.steps else "The steps of this run send nothing between ranks"
        return Section(key="bytes", title=title, missing=f"{why}, so there are no bytes per step to show.")
    totals = frame.groupby("step", sort=False)["wire_bytes"].sum()
    words = "; ".join(f"{step} {format_bytes(float(total))}" for step, total in totals.items())
    table = frame_table(
        frame,
        "Bytes per step and stream",
        {"step": "step", "lane": "lane", "stream": "stream", "pattern": "pattern"}
        | {"num_calls": "calls", "wire_bytes": "bytes between ranks"},
    )
    shown = picture(
        plot_step_bytes(frame),
        alt=f"Stacked bars of bytes per step by pattern. Totals: {words}.",
        caption=f"From the model's shape and the layout; nothing here is measured. {machine(run)}.",
        table=table,
        size="large",
    )
    intro = "Bytes that one whole step sends between ranks, by parallelism. What a rank keeps for itself is left out."
    legend = pattern_legend(frame["pattern"].tolist())
    return Section(key="bytes", title=title, intro=intro, legend=legend, pictures=(shown,))


def groups_section(run: Run) -> Section:
    """The process groups, one small panel for each way of grouping."""
    if not run.streams:
        return Section(key="groups", title="Who talks to whom", missing="This run has no streams.")
    by_groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for stream in run.streams:
        by_groups.setdefault(stream.groups, []).append(stream.name)
    pictures: list[Picture] = []
    for groups, names in by_groups.items():
        words = ", ".join("{" + " ".join(map(str, group)) + "}" for group in groups[:16])
        count = f"{len(groups)} group{'' if len(groups) == 1 else 's'} of {max(map(len, groups))}"
        shown = plot_groups(groups, run.nodes or tuple([0] * run.info.world_size))
        alt = f"Process groups of {', '.join(names)}: {words}"
        pictures.append(picture(shown, alt=alt, title=", ".join(names), caption=count, size="tiny"))
    rows = [
        {"stream": s.name, "op": s.op, "num_groups": len(s.groups), "group_size": s.group_size}
        | {"groups": "  ".join("{" + " ".join(map(str, group)) + "}" for group in s.groups)}
        for s in run.streams
    ]
    table = frame_table(pd.DataFrame(rows), "Process groups of each stream")
    intro = "Ranks are cells, nodes are frames; ranks of one colour make a collective call with each other."
    return Section(key="groups", title="Who talks to whom", intro=intro, pictures=tuple(pictures), tables=(table,))


def alone_section(run: Run, curves: pd.DataFrame | None) -> Section:
    """Time against size of each stream alone."""
    title = "Each stream alone"
    frame = ok_alone(run)
    sized = frame[(frame["payload_bytes"] > 0) & (frame["time_median_s"] > 0)]
    if sized.empty:
        return Section(key="alone", title=title, missing=f"No stream was measured alone.{unfinished(run)}")
    limits_s = float(sized["time_median_s"].min()), float(sized["time_median_s"].max())
    limits_bytes = float(sized["payload_bytes"].min()), float(sized["payload_bytes"].max())
    pictures = []
    for stream in run.streams:
        own = sized[sized["stream"] == stream.name]
        if own.empty:
            continue
        figure = plot_time_against_size(
            sized,
            stream.name,
            curves=curves,
            real_bytes=run.info.real_sizes.get(stream.name, ()),
            pattern=pattern_of(run, stream.name),
            limits_s=limits_s,
            limits_bytes=limits_bytes,
        )
        table = frame_table(
            own.sort_values(["cadence", "payload_bytes", "repeat"]),
            "Times",
            {"cadence": "cadence", "payload_bytes": "size", "repeat": "visit", "time_median_s": "median"}
            | {"time_low_s": "low", "time_high_s": "high", "num_samples": "n"},
        )
        span = _span(own["num_samples"], "calls a point")
        alt = (
            f"Time per call of {stream.name} against payload, both cadences, "
            f"{format_bytes(float(own['payload_bytes'].min()))} to {format_bytes(float(own['payload_bytes'].max()))}."
        )
        caption = f"{stream.op}, groups of {stream.group_size}; {span}"
        pictures.append(picture(figure, alt=alt, title=stream.name, caption=caption, table=table, size="small"))
    legend: Legend = (
        ("dot", "var(--ink)", "isolated: a barrier before each call"),
        ("ring", "var(--ink)", "streaming: back to back"),
    )
    if curves is not None and len(curves):
        legend += (("line", "var(--ink)", "fitted model with its interval"),)
    legend += (("dotted", "var(--muted)", "size in the model"),)
    table = _streams_table(run)
    intro = f"Median time per call, with a 95 % interval of the median. All panels share their axes. {machine(run)}."
    if curves is None or curves.empty:
        intro += " No fitted model came with this report, so there are no lines."
    return Section(key="alone", title=title, intro=intro, legend=legend, pictures=tuple(pictures), tables=(table,))


def _streams_table(run: Run) -> PageTable:
    rows = [
        {
            "stream": row["stream"],
            "op": row["op"],
            "payload_bytes": row["payload_bytes"],
            "isolated": time_text(row["isolated_median_s"], row["isolated_low_s"], row["isolated_high_s"]),
            "streaming": time_text(row["streaming_median_s"], row["streaming_low_s"], row["streaming_high_s"]),
            "rate": rate_text(row),
            "first_call_s": row["first_call_s"],
            "worst": "–" if pd.isna(row["worst_slowdown"]) else f"{row['worst_slowdown']:.2f} by {row['worst_by']}",
        }
        for row in stream_table(run).to_dict("records")
    ]
    names = {"stream": "stream", "op": "op", "payload_bytes": "real size", "isolated": "isolated [95 %]"}
    names |= {"streaming": "streaming [95 %]", "rate": "rate", "first_call_s": "first call", "worst": "worst slowdown"}
    return frame_table(pd.DataFrame(rows), "Streams at their real sizes", names, is_open=True)


def _span(counts: pd.Series, what: str) -> str:
    low, high = int(counts.min()), int(counts.max())
    return f"{low} {what}" if low == high else f"{low} to {high} {what}"


def together_section(run: Run) -> Section:
    """Slowdowns of each pair, steady and one-shot, and of larger mixes."""
    title = "How much they slow each other down"
    pictures = []
    for mode, words in (("steady", "Steady: both loop"), ("one_shot", "One-shot: both start at one barrier")):
        matrix = slowdown_matrix(run, mode)
        found = pairs(run, mode)
        if matrix.empty or not matrix.notna().any(axis=None):
            continue
        worst = found.dropna(subset=["slowdown"]).sort_values("slowdown").iloc[-1]
        table = frame_table(
            found,
            f"Pairs, {mode}",
            {"stream": "stream", "other": "while this runs", "slowdown": "slowdown", "time_median_s": "time together"}
            | {"overlap_fraction": "overlap", "status": "status", "why": "why"},
        )
        invalid = int((found["status"] != "ok").sum())
        caption = f"{len(found) // 2} pairs; {machine(run)}." + (
            f" {invalid} entries are not valid (–)." if invalid else ""
        )
        alt = (
            f"Heat map of slowdowns, {mode}: the largest is {worst['slowdown']:.2f}, "
            f"{worst['stream']} while {worst['other']} runs."
        )
        pictures.append(
            picture(plot_slowdowns(matrix), alt=alt, title=words, caption=caption, table=table, size="large")
        )
    tables: tuple[PageTable, ...] = ()
    larger = larger_mixes(run)
    if len(larger):
        names = {"mix": "mix", "mode": "mode", "stream": "stream", "time_median_s": "time together"}
        names |= {"slowdown": "slowdown", "overlap_fraction": "overlap", "status": "status"}
        tables = (frame_table(larger, "Mixes of three and more", names, is_open=True),)
    if not pictures and not tables:
        why = "one rank has nobody to share links with" if run.info.world_size == 1 else "no streams ran together"
        return Section(key="together", title=title, missing=f"There are no slowdowns: {why}.{unfinished(run)}")
    intro = (
        "Time per call together over time alone, both measured in turn so that drift cancels. Read along a row for "
        "what a stream suffers, down a column for what it does to others."
    )
    return Section(key="together", title=title, intro=intro, pictures=tuple(pictures), tables=tables)


def steps_section(run: Run, predictions: pd.DataFrame | None) -> Section:
    """Whole steps: measured, predicted, and their calls alone."""
    title = "Whole steps"
    if not run.steps:
        return Section(key="steps", title=title, missing=f"This run has no whole steps.{unfinished(run)}")
    table, lanes = step_table(run, predictions), step_lanes(run)
    if table["measured_median_s"].isna().all():
        return Section(key="steps", title=title, missing=f"No whole step was measured.{unfinished(run)}")
    words = "; ".join(
        f"{row['step']} {row['measured_median_s'] * 1e3:.3g} ms"
        + ("" if np.isnan(row["predicted_s"]) else f", predicted {row['predicted_s'] * 1e3:.3g} ms")
        for row in table.to_dict("records")
        if not np.isnan(row["measured_median_s"])
    )
    names = {"step": "step", "measured_median_s": "measured", "measured_low_s": "low", "measured_high_s": "high"}
    names |= {"num_samples": "n", "alone_s": "longest lane, calls alone", "predicted_s": "predicted"}
    names |= {"low_s": "predicted low", "high_s": "predicted high", "status": "status", "why": "why"}
    samples = f"n = {_span(table['num_samples'], 'steps')}"
    shown = picture(
        plot_steps(table, lanes),
        alt=f"Bars of whole steps: {words}.",
        caption=f"{samples}; {machine(run)}. Orange lines are intervals.",
        table=frame_table(table, "Whole steps", names, is_open=True),
        size="large",
    )
    intro = (
        "The calls of a step in their real order, lanes at the same time. Beneath, what the calls of each lane would "
        "take if each ran alone: what is beyond the longest lane is the price of sharing and of waiting."
    )
    legend = pattern_legend(lanes["pattern"].tolist())
    return Section(key="steps", title=title, intro=intro, legend=legend, pictures=(shown,))
