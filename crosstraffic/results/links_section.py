"""The report's section on links: verdict, heat maps, incast and outcast."""

import numpy as np
import pandas as pd

from crosstraffic.results.figures import COLOURS
from crosstraffic.results.links import Links
from crosstraffic.results.links_plots import plot_fans, plot_links
from crosstraffic.results.links_summary import verdict_lines
from crosstraffic.results.links_verdict import Verdict
from crosstraffic.results.page import Picture, Section, frame_table, picture
from crosstraffic.units import format_rate, format_seconds

SLOW = ("slow_node", "slow_send", "slow_receive", "slow_direction", "slow_pair")


def links_section(links: Links, found: Verdict, where: str) -> Section:
    """Return the section; ``where`` says on what machine, for captions."""
    findings = pd.DataFrame(
        [
            {"kind": item.kind, "nodes": ", ".join(item.nodes), "bytes_per_s": item.bytes_per_s}
            | {"reference_bytes_per_s": item.reference_bytes_per_s, "text": item.text}
            for item in found.findings
        ],
        columns=["kind", "nodes", "bytes_per_s", "reference_bytes_per_s", "text"],
    )
    names = {"kind": "kind", "nodes": "end points", "bytes_per_s": "rate", "reference_bytes_per_s": "reference"}
    tables = (
        (frame_table(findings, "What is wrong", names | {"text": "in words"}, is_open=True),) if len(findings) else ()
    )
    intro = (
        "Each direction between two end points: the better of two visits, as a passing disturbance is not the link's. "
        "A direction counts as slow only if both visits say so. Framed: what the verdict names. "
    )
    return Section(
        key="links",
        title="Links: " + verdict_lines(links, found)[0],
        intro=intro + (found.note or ""),
        legend=(
            ("box", COLOURS["tp"], "incast: gets from others at once"),
            ("box", COLOURS["pp"], "outcast: sends to others at once"),
        ),
        pictures=tuple(_pictures(links, found, where)),
        tables=tables,
    )


def _pictures(links: Links, found: Verdict, where: str) -> list[Picture]:
    rate, latency_s = links.rate.best, links.best_latency_s
    shown = []
    if not np.isnan(rate).all():
        table = frame_table(_directions(links), "Every direction")
        alt = f"Heat map of bandwidth, {format_rate(float(np.nanmin(rate)))} to {format_rate(float(np.nanmax(rate)))}."
        figure = plot_links(rate, links.names, format_rate, framed=_framed(links, found, SLOW))
        shown.append(
            picture(figure, alt=alt, title="Bandwidth", caption=f"Back to back; {where}.", table=table, size="large")
        )
    if not np.isnan(latency_s).all():
        low, high = (format_seconds(float(edge(latency_s))) for edge in (np.nanmin, np.nanmax))
        by = (
            "receiver's end less sender's start" if links.clock == "synchronised" else "time inside the receiver's call"
        )
        figure = plot_links(
            latency_s,
            links.names,
            format_seconds,
            framed=_framed(links, found, ("high_latency",)),
            is_high_good=False,
        )
        caption = f"8 bytes, {by}; clocks within {format_seconds(links.clock_error_s)}; {where}."
        shown.append(
            picture(
                figure, alt=f"Heat map of latency, {low} to {high}.", title="Latency", caption=caption, size="large"
            )
        )
    fans = [links.incast.best, links.outcast.best]
    if links.num_peers and not np.isnan(fans).all():
        frame = pd.DataFrame({"end point": links.names, "incast_bytes_per_s": fans[0], "outcast_bytes_per_s": fans[1]})
        names = {"end point": "end point", "incast_bytes_per_s": "incast", "outcast_bytes_per_s": "outcast"}
        alt = f"Bars of incast and outcast rates of {links.num_end_points} end points."
        caption = f"{links.num_peers} peers at once; the dashed line is the reference of one link."
        figure = plot_fans(links.incast.best, links.outcast.best, links.names, found.reference_bytes_per_s)
        table = frame_table(frame, "Incast and outcast", names)
        shown.append(picture(figure, alt=alt, title="Several at once", caption=caption, table=table, size="large"))
    return shown


def _directions(links: Links) -> pd.DataFrame:
    n = links.num_end_points
    rows = [
        {"from": links.names[i], "to": links.names[j]}
        | {f"visit {visit + 1}_bytes_per_s": links.rate.median[visit, i, j] for visit in range(len(links.rate.median))}
        | {"both ways_bytes_per_s": links.duplex.best[i, j], "latency_s": links.best_latency_s[i, j]}
        for i in range(n)
        for j in range(n)
        if i != j
    ]
    return pd.DataFrame(rows)


def _framed(links: Links, found: Verdict, kinds: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the directions that findings of these kinds name: of a node, all those on the bad side."""
    place = {name: index for index, name in enumerate(links.names)}
    everyone = range(links.num_end_points)
    framed: dict[tuple[int, int], None] = {}
    for item in found.findings:
        if item.kind not in kinds:
            continue
        here = place[item.nodes[0]]
        cells = [(here, other) for other in everyone if other != here and item.kind != "slow_receive"]
        cells += [(other, here) for other in everyone if other != here and item.kind != "slow_send"]
        if len(item.nodes) == 2:
            there = place[item.nodes[1]]
            cells = [(here, there)] if item.kind == "slow_direction" else [(here, there), (there, here)]
        framed.update(dict.fromkeys(cells))
    return list(framed)
