"""What a run found, as tables for a terminal."""

import json
from typing import TYPE_CHECKING, Any

import pandas as pd

from crosstraffic.results.store import Run
from crosstraffic.results.tables import step_table, stream_table
from crosstraffic.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

ABSENT = "–"


def time_text(median_s: Any, low_s: Any = None, high_s: Any = None) -> str:
    """Write a time with its interval, or a dash.

    >>> time_text(1e-3, 0.9e-3, 1.1e-3), time_text(None)
    ('1 ms [900 µs, 1.1 ms]', '–')
    """
    if pd.isna(median_s):
        return ABSENT
    if pd.isna(low_s) or pd.isna(high_s):
        return format_seconds(float(median_s))
    return f"{format_seconds(float(median_s))} [{format_seconds(float(low_s))}, {format_seconds(float(high_s))}]"


def spread_text(median_s: Any, low_s: Any, high_s: Any) -> str:
    """Write a time with half of its interval's width in percent, or a dash.

    >>> spread_text(1e-3, 0.9e-3, 1.1e-3)
    '1 ms ±10%'
    """
    if pd.isna(median_s) or pd.isna(low_s) or pd.isna(high_s):
        return time_text(median_s)
    return f"{format_seconds(float(median_s))} ±{(high_s - low_s) / (2 * median_s):.0%}"


def rate_text(row: Any) -> str:
    """Write busbw where the op has one, else the busiest rank's rate."""
    for field, label in (("busbw_bytes_per_s", "busbw"), ("bottleneck_bytes_per_s", "busiest rank")):
        if pd.notna(row[field]):
            return f"{format_rate(float(row[field]))} {label}"
    return ABSENT


def summary_table(run: Run) -> "Table":
    """Return one row a stream at its real size: time alone with interval, rate, worst slowdown and by whom."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=f"{run.info.world_size} ranks over {run.info.transport.name}, run {run.info.status}",
        caption="± half of the 95 % interval; rate: busbw, or * of the busiest rank",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("stream", no_wrap=True, overflow="fold")
    for name in ("size", "alone", "rate", "slowed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("most by", overflow="fold")
    for row in stream_table(run).to_dict("records"):
        cells = [
            str(row["stream"]),
            format_bytes(row["payload_bytes"]),
            spread_text(row["isolated_median_s"], row["isolated_low_s"], row["isolated_high_s"]),
            rate_text(row).replace(" busbw", "").replace(" busiest rank", "*"),
            ABSENT if pd.isna(row["worst_slowdown"]) else f"{row['worst_slowdown']:.3g}x",
            ABSENT if pd.isna(row["worst_slowdown"]) else str(row["worst_by"]),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def summary_data(run: Run) -> dict[str, Any]:
    """Return the same as JSON types, absent numbers as null: status, streams, steps."""

    def plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=15))
        return rows

    info = run.info
    return {
        "schema_version": info.schema_version,
        "run_id": info.run_id,
        "folder": str(run.path),
        "status": info.status,
        "why": info.why,
        "num_records": len(run.frame),
        "measured_share": info.measured_share,
        "streams": plain(stream_table(run)),
        "steps": plain(step_table(run, None)),
    }


def steps_table(run: Run, predictions: pd.DataFrame | None = None) -> "Table":
    """Return one row a whole step: measured, and predicted where a model is given."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title="whole steps",
        caption="alone: the calls of its longest lane, one after the other, without the other lanes",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("step")
    for name in ("measured", "alone", "predicted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in step_table(run, predictions).to_dict("records"):
        error = row["predicted_s"] / row["measured_median_s"] - 1
        cells = [
            str(row["step"]),
            spread_text(row["measured_median_s"], row["measured_low_s"], row["measured_high_s"]),
            time_text(row["alone_s"]),
            time_text(row["predicted_s"], row["low_s"], row["high_s"]),
            ABSENT if pd.isna(error) else f"{error:+.0%}",
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table
