"""``crosstraffic predict``: times of streams, of mixes and of steps from a fitted model."""

from pathlib import Path
from typing import Annotated

import typer


def predict(
    model_file: Annotated[Path, typer.Argument(metavar="MODEL_FILE", help="model.json, or the run folder it is in.")],
    stream: Annotated[
        list[str] | None, typer.Option(help="NAME or NAME=SIZE (64KiB); several run at the same time.")
    ] = None,
    mode: Annotated[str, typer.Option(help="steady: each loops; one_shot: all start at one barrier.")] = "steady",
    step: Annotated[str | None, typer.Option(help="A whole step, by name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict how long streams take alone and together, or how long a step takes."""
    import json
    from typing import Any, cast, get_args

    from rich.console import Console
    from rich.table import Table

    from crosstraffic.commands.errors import planning
    from crosstraffic.costmodel.model import load
    from crosstraffic.costmodel.predict import predict_mix, predict_step
    from crosstraffic.errors import UsageError
    from crosstraffic.results.record import Mode
    from crosstraffic.units import format_bytes, format_seconds, parse_bytes

    if mode not in get_args(Mode):
        raise UsageError(f"unknown mode: {mode!r}; allowed: {', '.join(get_args(Mode))}")
    model = load(model_file / "model.json" if model_file.is_dir() else model_file)
    if not stream and step is None:
        names = ", ".join(str(data["name"]) for data in model.streams)
        steps = ", ".join(str(data["name"]) for data in model.steps) or "none"
        raise UsageError(f"nothing to predict: give --stream or --step; streams: {names}; steps: {steps}")
    mix: list[tuple[str, int]] = []
    found: dict[str, Any] = {"streams": [], "step_s": None, "low_s": None, "high_s": None}
    with planning("predict"):
        for text in stream or []:
            name, separator, size = text.partition("=")
            mix.append((name, parse_bytes(size) if separator else model.real_bytes(name)))
        if mix:
            found["streams"] = predict_mix(model, mix, cast("Mode", mode))["streams"]
        if step is not None:
            found.update(predict_step(model, model.step(step)))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console(width=80) if not Console().is_terminal else Console()
    if mix:
        table = Table(title=f"Predicted time per call, {mode}" if len(mix) > 1 else "Predicted time per call")
        table.add_column("stream", overflow="fold")
        for heading in ("size", "alone", "together", "90 % interval", "slowdown"):
            table.add_column(heading, justify="right")
        for (_, size_bytes), row in zip(mix, found["streams"], strict=True):
            table.add_row(
                row["name"],
                format_bytes(size_bytes),
                format_seconds(row["alone_s"]),
                format_seconds(row["together_s"]),
                f"{format_seconds(row['low_s'])} .. {format_seconds(row['high_s'])}",
                f"{row['slowdown']:.2f}",
            )
        console.print(table)
    if step is not None:
        low, high = format_seconds(found["low_s"]), format_seconds(found["high_s"])
        console.print(f"step {step}: {format_seconds(found['step_s'])} ({low} .. {high})", highlight=False)
    talk = Console(stderr=True, highlight=False)
    for whole in [*found["streams"], found]:
        if whole.get("why"):
            talk.print(f"not valid: {whole.get('name', step)}: {whole['why']}", markup=False)
