"""The report's first screen: what ran where, the answer in words, the headline numbers."""

from collections.abc import Mapping
from typing import Any

from crosstraffic.results.accuracy import noise, ours
from crosstraffic.results.page import ABSENT, Tile, cell
from crosstraffic.results.store import Run
from crosstraffic.results.tables import worst_pair

_KINDS = {"sizes": "sizes left out", "triples": "mixes of three", "steps": "whole steps"}


def _other_errors(validation: Mapping[str, Any] | None) -> dict[str, float | None]:
    kinds = (validation or {}).get("kinds") or {}
    return {kind: ours(kinds.get(kind)).get("median_ape") for kind in ("triples", "steps")}


def title_of(run: Run) -> str:
    """Return the model's name, or the scenario's."""
    return str(run.info.scenario.get("model") or run.info.scenario.get("name") or "Streams of a run")


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Return what was measured where, as names and values."""
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


def answer_of(run: Run, validation: Mapping[str, Any] | None) -> list[str]:
    """Return the few sentences a reader came for."""
    lines = []
    worst = worst_pair(run)
    if worst is not None:
        words = "while both loop" if worst["mode"] == "steady" else "when both start at once"
        lines.append(f"Worst neighbours: {worst['stream']} takes {worst['slowdown']:.2f} times as long beside "
                     f"{worst['other']}, {words}.")  # fmt: skip
    errors = {"sizes": ours(validation).get("median_ape")} | _other_errors(validation)
    told = [f"{100 * error:.1f} % on {_KINDS[kind]}" for kind, error in errors.items() if error is not None]
    if told:
        spread = noise(validation).get("median_ape")
        twice = "" if spread is None else f" Two visits of one point differ by {100 * spread:.1f} %."
        lines.append(f"Where it did not look, the fitted model is off by (median) {', '.join(told)}.{twice}")
    wrong = int((run.frame["status"] == "wrong_data").sum())
    if wrong:
        lines.append(f"Wrong data: {wrong} records found bytes that were not what was sent.")
    if run.info.status != "complete":
        lines.append(f"This run is {run.info.status}: {run.info.why or 'no reason given'}. What was finished is shown.")
    return lines


def tiles_of(run: Run, validation: Mapping[str, Any] | None) -> list[Tile]:
    """Return the headline numbers."""
    frame, info = run.frame, run.info
    good, bad = int((frame["status"] == "ok").sum()), int((frame["status"] != "ok").sum())
    points = int(frame.loc[~frame["status"].isin(["timeout", "oom", "skipped"]), "point"].nunique())
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
    error, spread = ours(validation).get("median_ape"), noise(validation).get("median_ape")
    if error is None:
        tiles.append(Tile(label="model error, held out", value=ABSENT, note="no validation came with this report"))
    else:
        note = "repeat noise " + (ABSENT if spread is None else f"{100 * spread:.1f} %")
        for kind, other in _other_errors(validation).items():
            note += "" if other is None else f"; {_KINDS[kind]} {100 * other:.1f} %"
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
