"""report.html: one self-contained page about one run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from crosstraffic.results.definitions import definitions
from crosstraffic.results.page import ABSENT, PageTable, Section, Tile, cell, frame_table, picture, text_table
from crosstraffic.results.plots import plot_predicted, plot_validation
from crosstraffic.results.record import Record
from crosstraffic.results.sections import (
    alone_section,
    bytes_section,
    groups_section,
    machine,
    pattern_legend,
    steps_section,
    together_section,
    unfinished,
)
from crosstraffic.results.store import Run
from crosstraffic.results.tables import pattern_of, worst_pair

MAX_RECORDS = 1500
RECORD_COLUMNS = (
    "kind",
    "stream",
    "mix",
    "payload_bytes",
    "cadence",
    "mode",
    "repeat",
    "status",
    "num_samples",
    "time_median_s",
    "time_low_s",
    "time_high_s",
    "time_p95_s",
    "slowdown",
    "overlap_fraction",
    "busbw_bytes_per_s",
    "bottleneck_bytes_per_s",
    "num_verified_calls",
    "late_rank",
    "why",
)
Predictions = pd.DataFrame | None


def render(
    run: Run,
    model: Mapping[str, Any] | None = None,
    predictions: Predictions = None,
    validation: Mapping[str, Any] | None = None,
    curves: pd.DataFrame | None = None,
) -> str:
    """Return the whole page as text. What is None is left out, with a line that says so.

    ``predictions`` has columns kind, stream, mix, payload_bytes, cadence, mode, step, measured_s, predicted_s, low_s,
    high_s, held_out; ``curves`` stream, cadence, payload_bytes, predicted_s, low_s, high_s; ``validation`` is what
    ``validate --json`` prints; ``model`` what model.json holds.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = (
        bytes_section(run),
        groups_section(run),
        alone_section(run, curves),
        together_section(run),
        steps_section(run, predictions),
        model_section(run, model, predictions, validation),
        records_section(run),
        provenance_section(run),
        definitions_section(),
    )
    return environment.get_template("report.html.j2").render(
        title=_title(run),
        run=run.info,
        facts=_facts(run),
        answer=_answer(run, validation),
        tiles=_tiles(run, validation),
        sections=sections,
        where=machine(run),
    )


def _title(run: Run) -> str:
    return str(run.info.scenario.get("model") or run.info.scenario.get("name") or "Streams of a run")


def _facts(run: Run) -> list[tuple[str, str]]:
    scenario = run.info.scenario
    facts = [("scenario", str(scenario.get("name") or ABSENT))]
    for phase in ("prefill", "decode"):
        spec = scenario.get(phase)
        if isinstance(spec, Mapping) and spec.get("layout"):
            facts.append((phase, str(spec["layout"])))
    handoff = scenario.get("handoff")
    if isinstance(handoff, Mapping) and handoff.get("prefill_layout"):
        facts.append(("handoff", f"{handoff['prefill_layout']} to {handoff.get('decode_layout', ABSENT)}"))
    num_nodes = len({place.node for place in run.placement})
    return [
        *facts,
        ("ranks", f"{run.info.world_size} on {num_nodes} node{'' if num_nodes == 1 else 's'}"),
        ("machine", ", ".join(dict.fromkeys(place.host for place in run.placement)) or ABSENT),
        ("transport", run.info.transport.name),
        ("measured", run.info.created.strftime("%Y-%m-%d %H:%M UTC")),
    ]


def _ours(validation: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if validation is None else (validation.get("models") or {}).get("ours") or {}


def _noise(validation: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if validation is None else validation.get("noise") or {}


def _answer(run: Run, validation: Mapping[str, Any] | None) -> list[str]:
    lines = []
    worst = worst_pair(run)
    if worst is not None:
        words = "while both loop" if worst["mode"] == "steady" else "when both start at once"
        lines.append(f"Worst neighbours: {worst['stream']} takes {worst['slowdown']:.2f} times as long beside "
                     f"{worst['other']}, {words}.")  # fmt: skip
    error, noise = _ours(validation).get("median_ape"), _noise(validation).get("median_ape")
    if error is not None:
        line = f"On what it did not see, the fitted model is {100 * error:.1f} % off (median)"
        lines.append(line + (f"; two visits of one point differ by {100 * noise:.1f} %." if noise is not None else "."))
    wrong = int((run.frame["status"] == "wrong_data").sum())
    if wrong:
        lines.append(f"Wrong data: {wrong} records found bytes that were not what was sent.")
    if run.info.status != "complete":
        lines.append(f"This run is {run.info.status}: {run.info.why or 'no reason given'}. What was finished is shown.")
    return lines


def _tiles(run: Run, validation: Mapping[str, Any] | None) -> list[Tile]:
    frame, info = run.frame, run.info
    good, bad = int((frame["status"] == "ok").sum()), int((frame["status"] != "ok").sum())
    points = int(frame["point"].nunique())
    torn = frame.attrs.get("num_torn_lines", 0)
    note = f"of {info.plan.num_points} planned; {good} good records" + (f", {bad} not" if bad else "")
    note += f"; {torn} torn lines left out" if torn else ""
    tiles = [Tile(label="points measured", value=str(points), note=note)]
    worst = worst_pair(run)
    if worst is None:
        tiles.append(Tile(label="worst slowdown", value=ABSENT, note="nothing ran together"))
    else:
        note = f"{worst['stream']} beside {worst['other']}"
        tiles.append(Tile(label="worst slowdown", value=f"{worst['slowdown']:.2f} ×", note=note))
    error, noise = _ours(validation).get("median_ape"), _noise(validation).get("median_ape")
    if error is None:
        tiles.append(Tile(label="model error, held out", value=ABSENT, note="no validation came with this report"))
    else:
        note = "repeat noise " + (ABSENT if noise is None else f"{100 * noise:.1f} %")
        tiles.append(Tile(label="model error, held out", value=f"{100 * error:.1f} %", note=note))
    share = info.measured_share
    note = "of the wall time inside measured calls"
    tiles.append(Tile(label="measured share", value=ABSENT if share is None else f"{100 * share:.0f} %", note=note))
    checked = int(frame["num_verified_calls"].fillna(0).sum())
    wrong = int((frame["status"] == "wrong_data").sum())
    note = f"{wrong} records with wrong bytes" if wrong else "every byte as sent" if checked else "payloads not checked"
    tone = "bad" if wrong else "good" if checked else "plain"
    tiles.append(Tile(label="verified calls", value=f"{checked:,}".replace(",", " "), note=note, tone=tone))
    if info.late_ranks:
        late = max(info.late_ranks, key=lambda rank: rank.share)
        note = f"by {cell('late_s', late.late_s)}, in {100 * late.share:.0f} % of the points that can tell"
        tiles.append(Tile(label="late rank", value=f"rank {late.rank}", note=note, tone="bad"))
    else:
        tiles.append(Tile(label="late rank", value="none", note="no rank stands out", tone="good"))
    return tiles


def model_section(
    run: Run, model: Mapping[str, Any] | None, predictions: Predictions, validation: Mapping[str, Any] | None
) -> Section:
    """How well the fitted model predicts, beside the repeat noise and simpler models."""
    title = "Can the model be trusted"
    pictures, tables = [], []
    if predictions is not None and len(predictions):
        patterns = {stream.name: pattern_of(run, stream.name) for stream in run.streams}
        held = int(predictions["held_out"].sum())
        names = ("kind", "stream", "mix", "payload_bytes", "cadence", "mode", "measured_s", "predicted_s", "low_s")
        shown = frame_table(
            predictions.assign(error_share=predictions["predicted_s"] / predictions["measured_s"] - 1),
            "Predicted and measured",
            {name: name.removesuffix("_s").replace("_", " ") for name in names}
            | {"high_s": "high", "error_share": "error", "held_out": "held out"},
        )
        caption = f"{len(predictions)} records, {held} held out; {machine(run)}."
        alt = f"Predicted against measured time of {len(predictions)} records; the line is equality."
        pictures.append(picture(plot_predicted(predictions, patterns), alt=alt, title="Predicted against measured",
                                caption=caption, table=shown))  # fmt: skip
    if validation is not None and (_ours(validation) or _noise(validation)):
        words = _plain(validation.get("hold_out"))
        usable = {"noise": _noise(validation), "models": validation.get("models") or {}}
        caption = f"Held out: {words}." if words else None
        alt = "Held-out error of each model beside the repeat noise."
        pictures.append(picture(plot_validation(usable), alt=alt, title="Error beside the repeat noise",
                                caption=caption, table=_errors(validation)))  # fmt: skip
        tables += [table for key in ("by_op", "by_size") if (table := _errors_by(validation, key)) is not None]
    if model is not None and model.get("notes"):
        tables.append(text_table("Notes of the fit", ["note"], [[note] for note in model["notes"]], is_open=True))
    if not pictures:
        why = "No fitted model came with this report; `crosstraffic report DIR` fits one where the run allows it."
        return Section(key="model", title=title, missing=why + unfinished(run), tables=tuple(tables))
    used = [pattern_of(run, stream.name) for stream in run.streams]
    marks = (
        ("dot", "var(--muted)", "alone"),
        ("triangle", "var(--muted)", "together"),
        ("square", "var(--muted)", "step"),
        ("ring", "var(--muted)", "open: fitted; filled: held out"),
    )
    intro = "A model is as good as its error on what it was not fitted to, and no model can beat the repeat noise."
    return Section(key="model", title=title, intro=intro, legend=(*pattern_legend(used), *marks),
                   pictures=tuple(pictures), tables=tuple(tables))  # fmt: skip


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_plain(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(part) for part in value)
    return "" if value is None else str(value)


_ERROR_NAMES = {"name": "model", "median_ape": "median error", "p90_ape": "90th percentile"}
_ERROR_NAMES |= {"coverage_90": "inside 90 % interval", "num_points": "points"}


def _errors(validation: Mapping[str, Any]) -> PageTable:
    rows = [{"name": "repeat noise"} | dict(_noise(validation))]
    rows += [
        {"name": "this model" if name == "ours" else name} | dict(row) for name, row in validation["models"].items()
    ]
    frame = pd.DataFrame(rows).reindex(columns=list(_ERROR_NAMES))
    frame["num_points"] = frame["num_points"].astype("Int64")
    return frame_table(frame, "Held-out errors", _ERROR_NAMES, is_open=True)


def _errors_by(validation: Mapping[str, Any], key: str) -> PageTable | None:
    found = validation.get(key)
    if not isinstance(found, Mapping) or not found:
        return None
    rows = []
    for name, value in found.items():
        row = value.get("ours", value) if isinstance(value, Mapping) else {}
        rows.append({"name": str(name)} | {field: row.get(field) for field in list(_ERROR_NAMES)[1:]})
    frame = pd.DataFrame(rows).astype({"median_ape": float, "p90_ape": float, "coverage_90": float})
    frame["num_points"] = frame["num_points"].astype("Int64")
    label = key.removeprefix("by_")
    return frame_table(frame, f"This model's errors by {label}", _ERROR_NAMES | {"name": label})


def records_section(run: Run) -> Section:
    """All records as a table."""
    if run.frame.empty:
        why = f"There are no records yet.{unfinished(run)}"
        return Section(key="records", title="All records", missing=why)
    frame = run.frame.head(MAX_RECORDS)
    note = "" if len(frame) == len(run.frame) else f"The first {len(frame)} of {len(run.frame)}; "
    table = frame_table(frame, f"{len(run.frame)} records", {name: name for name in RECORD_COLUMNS},
                        note=f"{note}all {len(Record.model_fields)} fields are in records.jsonl.")  # fmt: skip
    intro = "What was measured, as it was kept. `crosstraffic explain NAME` says what a column means."
    return Section(key="records", title="All records", intro=intro, tables=(table,))


def provenance_section(run: Run) -> Section:
    """Where and how the run was made."""
    info = run.info
    budget = info.budget_s if info.budget_s is not None else info.plan.budget_s
    facts = [
        ("run", info.run_id),
        ("status", info.status + (f": {info.why}" if info.why else "")),
        ("command", " ".join(info.command)),
        ("crosstraffic", info.crosstraffic),
        ("transport", ", ".join([info.transport.name, *(f"{k} {v}" for k, v in info.transport.details.items())])),
        ("plan", f"{info.plan.num_points} points in a random order, seed {info.plan.seed}"),
        ("wall time", f"{cell('wall_s', info.wall_s)} of {cell('budget_s', budget)} allowed"),
        ("inside measured calls", cell("measured_s", info.measured_s)),
        *((f"note {number}", note) for number, note in enumerate(info.notes, start=1)),
    ]
    tables = [text_table("This run", ["what", "value"], facts, is_open=True)]
    places = [place.model_dump() | {"cpus": " ".join(map(str, place.cpus))} for place in info.placement]
    tables.append(frame_table(pd.DataFrame(places), "Placement of the ranks", is_open=len(places) <= 8))
    if info.clocks:
        names = {"rank": "rank", "offset_s": "offset", "drift": "drift, s/s", "error_s": "error"}
        clocks = frame_table(
            pd.DataFrame([clock.model_dump() for clock in info.clocks]), "Clocks against rank 0", names
        )
        tables.append(clocks)
    if info.versions:
        tables.append(text_table("Versions", ["what", "version"], info.versions.items()))
    if info.environment:
        tables.append(text_table("Environment (allow-listed)", ["variable", "value"], info.environment.items()))
    if info.aliases:
        note = "Streams that put the same bytes between the same ranks were measured once."
        tables.append(text_table("Measured under another name", ["stream", "as"], info.aliases.items(), note=note))
    return Section(key="provenance", title="Where and how", tables=tuple(tables))


def definitions_section() -> Section:
    """What the names mean."""
    rows = [(entry.name, entry.text, entry.source or "") for entry in definitions().values()]
    table = text_table("Definitions", ["name", "meaning", "source"], rows)
    intro = "Every number names its statistic, its unit and what it is taken over."
    return Section(key="definitions", title="Definitions", intro=intro, tables=(table,))
