"""``crosstraffic export``: measured and predicted times as the files that a planner reads."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from crosstraffic.costmodel.export.known import Known
    from crosstraffic.costmodel.export.target import Target
    from crosstraffic.costmodel.model import Model


def export(
    planner: Annotated[str | None, typer.Argument(help="Which planner; without one, the planners are listed.")] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MODEL_FILE|TABLE...", help="model.json, or tables or run folders of one system."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write into; must be new or empty.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    measured_only: Annotated[
        bool, typer.Option("--measured-only", help="Fit nothing: leave out all that was not measured. Tables only.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="Name of the system in the files; default: the source's.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Default: most ranks measured on one node.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Default: most nodes measured.")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Which kernel's collectives; default: nccl, or the only one.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Further group sizes to predict: 24,40.")] = "",
    framework: Annotated[str, typer.Option(help="aiconfigurator: vllm, sglang or trtllm.")] = "vllm",
    framework_version: Annotated[str, typer.Option(help="aiconfigurator: names a folder.")] = "1.0.0",
    nccl_version: Annotated[
        str | None, typer.Option(help="aiconfigurator: names a folder; default: the source's.")
    ] = None,
    custom_kernel: Annotated[
        str | None, typer.Option(help="aiconfigurator: kernel of its custom all-reduce table.")
    ] = None,
    base_system: Annotated[
        str | None, typer.Option(help="aiconfigurator: an installed system that gives what is not measured.")
    ] = None,
    inter_node_bandwidth: Annotated[
        str | None, typer.Option(help="aiconfigurator: bytes a second between nodes, as 50GB, if not measured.")
    ] = None,
    topology: Annotated[str, typer.Option(help="astra-sim: Switch or Ring.")] = "Switch",
    strided_as_consecutive: Annotated[
        bool,
        typer.Option("--strided-as-consecutive", help="galvatron: which ranks of a node form a group is the same."),
    ] = False,
    overlap_coefficient: Annotated[
        float | None, typer.Option(help="galvatron: slowdown of communication beside compute.")
    ] = None,
) -> None:
    """Write what is known of a system as the files that a planner reads, and crosstraffic.json beside them.

    Measured cells go out as measured, others from the model and marked; what has no room is told on stderr.
    """
    if planner is None:
        _list()
        return
    from crosstraffic import __version__
    from crosstraffic.commands.errors import planning
    from crosstraffic.costmodel.export.files import Export, write_export
    from crosstraffic.costmodel.export.ours import to_ours
    from crosstraffic.costmodel.export.planners import planner_of
    from crosstraffic.errors import UsageError

    with planning("export"):
        wanted = planner_of(planner)
    if not sources:
        raise UsageError(f"nothing to export to {planner}: name a model file, tables or run folders")
    if output is None:
        raise UsageError("give the folder to write into: --output DIR")
    with planning(f"export {planner}"):
        known, model, notes = _read(sources, system, measured_only)
        target = _target(
            known,
            system=system or known.system,
            gpus_per_node=gpus_per_node,
            num_nodes=nodes,
            kernel=kernel,
            ranks=_counts(ranks),
            framework=framework,
            framework_version=framework_version,
            nccl_version=nccl_version,
            custom_kernel=custom_kernel,
            base=None if base_system is None else _base(base_system),
            inter_node_bytes_per_s=_rate(inter_node_bandwidth),
            topology=topology,
            strided_as_consecutive=strided_as_consecutive,
            overlap_coefficient=overlap_coefficient,
        )
        made = Export(files={}) if wanted.make is None else wanted.make(known, target)
        contention = model.contention.model_dump() if model is not None and model.contention.num_points else None
        beside = to_ours(known, planner, made, crosstraffic=__version__, contention=contention, notes=notes)
    for path in write_export(output, {**made.files, **beside.files}, force=force):
        print(path)
    for remark in (*made.remarks, *(line for line in beside.remarks if line not in made.remarks)):
        _say(remark)


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    from crosstraffic.costmodel.export.planners import PLANNERS

    table = Table(title="Planners")
    for heading in ("planner", "files", "needs measured"):
        table.add_column(heading, overflow="fold")
    for name, one in PLANNERS.items():
        table.add_row(name, one.files, one.needs)
    (Console(width=100) if not Console().is_terminal else Console()).print(table)


def _say(line: str) -> None:
    import sys

    print(f"note: {line}", file=sys.stderr)


def _read(
    sources: list[Path], system: str | None, measured_only: bool
) -> "tuple[Known, Model | None, tuple[str, ...]]":
    """Read a model, or tables and fit them; return notes of where they come from too."""
    import importlib

    from crosstraffic.costmodel.export.source import known_of_model, known_of_tables
    from crosstraffic.costmodel.model import load

    first = sources[0] / "model.json" if (sources[0] / "model.json").is_file() else sources[0]
    if len(sources) == 1 and _is_model(first) and not (measured_only and sources[0].is_dir()):
        if measured_only:
            raise ValueError(f"--measured-only takes tables or run folders: {first} is a model")
        model = load(first)
        if getattr(model, "cells", None) is not None or not sources[0].is_dir():
            return known_of_model(model, system), model, model.notes
    try:
        find: Any = importlib.import_module("crosstraffic.results.importers.find")
    except ModuleNotFoundError as error:
        raise ValueError(f"{sources[0]}: this version reads no tables, and no model with cells is named") from error
    tables = find.load_tables(sources)
    notes = [note for table in tables for note in table.notes]
    notes += [
        f"{table.source}: {count} rows not read: {why}" for table in tables for why, count in table.unread.items()
    ]
    return known_of_tables(tables, measured_only=measured_only), None, tuple(notes)


def _is_model(path: Path) -> bool:
    """Tell a model from a table that is JSON too."""
    import json

    if path.suffix != ".json":
        return False
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"schema_version", "transport"} <= set(found)


def _target(known: "Known", **options: Any) -> "Target":
    """Fill in what follows from the cells: how many ranks a node has, how many nodes, which version."""
    import re

    from crosstraffic.costmodel.export.target import Target

    version = re.search(r"\d+(\.\d+)+[A-Za-z0-9.]*", known.library)
    measured: dict[str, Any] = {
        "gpus_per_node": int(known.cells["ranks_per_node"].max()),
        "num_nodes": int(known.cells["num_nodes"].max()),
        "nccl_version": version.group() if version else "unknown",
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return Target(**(measured | given))


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word)
    except ValueError:
        raise ValueError(f"--ranks takes group sizes separated by commas: {text!r}") from None


def _rate(text: str | None) -> float | None:
    from crosstraffic.units import parse_bytes

    return None if text is None else float(parse_bytes(text))


def _base(name: str) -> dict[str, Any]:
    """Read a system file of the installed AIConfigurator.

    Raises:
        ValueError: it is not installed, or has no such system.
    """
    import importlib
    from importlib.util import find_spec

    from crosstraffic.costmodel.export.files import check_name

    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("--base-system reads a system of AIConfigurator: pip install 'crosstraffic[planners]'")
    folder = Path(spec.submodule_search_locations[0]) / "systems"
    path = folder / f"{check_name('base-system', name)}.yaml"
    if not path.is_file():
        known = sorted(found.stem for found in folder.glob("*.yaml"))
        raise ValueError(f"AIConfigurator has no system {name!r}; it has {', '.join(known)}")
    yaml: Any = importlib.import_module("yaml")
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or "gpu" not in found:
        raise ValueError(f"{name} is no system of AIConfigurator: {path.name} has no gpu")
    return found
