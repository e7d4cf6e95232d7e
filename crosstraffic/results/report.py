"""report.html: one self-contained page about one run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from crosstraffic.results.accuracy import model_section
from crosstraffic.results.definitions import definitions
from crosstraffic.results.headline import answer_of, facts_of, tiles_of, title_of
from crosstraffic.results.links import is_links, links_of
from crosstraffic.results.links_section import links_section
from crosstraffic.results.links_summary import verdict_lines
from crosstraffic.results.links_verdict import verdict
from crosstraffic.results.page import ABSENT, Section, cell, frame_table, text_table
from crosstraffic.results.record import Record
from crosstraffic.results.sections import (
    alone_section,
    bytes_section,
    groups_section,
    machine,
    steps_section,
    together_section,
    unfinished,
)
from crosstraffic.results.store import Run

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


def render(
    run: Run,
    model: Mapping[str, Any] | None = None,
    predictions: pd.DataFrame | None = None,
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
    found: tuple[Section, ...]
    answer, tiles = answer_of(run, validation), tiles_of(run, validation)
    if is_links(run):  # no mixtures, no steps, nothing to fit: the links are what there is to say
        links = links_of(run)
        judged = verdict(links)
        found = (links_section(links, judged, machine(run)),)
        answer = [*verdict_lines(links, judged), *answer]
        tiles = [tile for tile in tiles if tile.value != ABSENT]
    else:
        found = (
            bytes_section(run),
            groups_section(run),
            alone_section(run, curves),
            together_section(run),
            steps_section(run, predictions),
            model_section(run, model, predictions, validation),
        )
    sections = (
        *found,
        records_section(run),
        provenance_section(run),
        definitions_section(),
    )
    return environment.get_template("report.html.j2").render(
        title=title_of(run),
        run=run.info,
        facts=facts_of(run),
        answer=answer,
        tiles=tiles,
        sections=sections,
        where=machine(run),
    )


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
