"""The report's section on the fitted model: its errors on what it did not see, beside the repeat noise."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from crosstraffic.results.page import PageTable, Picture, Section, frame_table, picture, text_table
from crosstraffic.results.plots import plot_predicted, plot_validation
from crosstraffic.results.sections import machine, pattern_legend, unfinished
from crosstraffic.results.store import Run
from crosstraffic.results.tables import pattern_of


def ours(validation: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the fitted model's own errors on what was held out; empty where there are none."""
    return {} if validation is None else (validation.get("models") or {}).get("ours") or {}


def noise(validation: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return how much two visits of one point differ; empty where that was not measured."""
    return {} if validation is None else validation.get("noise") or {}


def model_section(
    run: Run, model: Mapping[str, Any] | None, predictions: pd.DataFrame | None, validation: Mapping[str, Any] | None
) -> Section:
    """How well the fitted model predicts, beside the repeat noise and simpler models."""
    title = "Can the model be trusted"
    pictures: list[Picture] = []
    tables: list[PageTable] = []
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
    if validation is not None and (ours(validation) or noise(validation)):
        words = _held_out_words(validation.get("hold_out"))
        usable = {"noise": noise(validation), "models": validation.get("models") or {}}
        words = f"Held out: {words}." if words else ""
        alt = "Held-out error of each model beside the repeat noise."
        pictures.append(picture(plot_validation(usable), alt=alt, title="Error beside the repeat noise",
                                caption=words, table=_errors(validation)))  # fmt: skip
        tables += [table for key in ("kinds", "by_op", "by_size") if (table := _errors_by(validation, key)) is not None]
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


def _held_out_words(value: Any) -> str:
    if value in ("all", "sizes"):
        others = "; mixes of three and whole steps are listed below" if value == "all" else ""
        return f"every other size of each stream, in two turns{others}"
    return "" if value is None else str(value)


_ERROR_NAMES = {"name": "model", "median_ape": "median error", "p90_ape": "90th percentile"}
_ERROR_NAMES |= {"coverage_90": "inside 90 % interval", "num_points": "points"}


def _errors(validation: Mapping[str, Any]) -> PageTable:
    rows = [{"name": "repeat noise"} | dict(noise(validation))]
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
        if isinstance(value, Mapping) and value.get("in_sample"):
            name = f"{name} (fitted)"
        models = value.get("models", value) if isinstance(value, Mapping) else {}
        row = (models.get("ours") or {}) if "median_ape" not in models else models
        rows.append({"name": str(name)} | {field: row.get(field) for field in list(_ERROR_NAMES)[1:]})
    frame = pd.DataFrame(rows).astype({"median_ape": float, "p90_ape": float, "coverage_90": float})
    frame["num_points"] = frame["num_points"].astype("Int64")
    label = {"kinds": "what was held out"}.get(key, key.removeprefix("by_"))
    is_open = key == "kinds"
    return frame_table(frame, f"This model's errors by {label}", _ERROR_NAMES | {"name": label}, is_open=is_open)
