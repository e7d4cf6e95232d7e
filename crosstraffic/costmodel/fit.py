"""Fit a model to runs: times alone first, then what sharing adds, from 2-way runs only."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crosstraffic import __version__
from crosstraffic.costmodel.model import Contention, Model, Solo
from crosstraffic.costmodel.observations import alone_observations, mixes_of, repeat_noise
from crosstraffic.costmodel.pairs import fit_contention
from crosstraffic.costmodel.solo import Observation, fit_solo
from crosstraffic.patterns.step import step_to_dict
from crosstraffic.patterns.stream import Stream, stream_to_dict
from crosstraffic.results.record import Cadence
from crosstraffic.results.store import Run

Keep = Callable[[Cadence, Observation], bool]


def fit_runs(runs: Sequence[Run]) -> Model:
    """Fit a model to one or several runs of the same ranks on the same nodes.

    Raises:
        ValueError: no runs, runs that do not go together, or too few, negative or contradictory times; says which.
    """
    model = fit_alone(runs)
    contention, notes = fit_contention(model, mixes_of(runs))
    return model.model_copy(update={"contention": contention, "notes": (*model.notes, *notes)})


def fit_alone(runs: Sequence[Run], keep: Keep | None = None) -> Model:
    """Fit the times alone only (sharing stays the plain fluid one), to the observations that ``keep`` lets through.

    Raises:
        ValueError: as ``fit_runs``.
    """
    streams, nodes = _joined(runs)
    observations = alone_observations(runs)
    solo: dict[Cadence, Solo] = {}
    notes: list[str] = []
    whys: list[str] = []
    for cadence, seen in observations.items():
        kept = seen if keep is None else [one for one in seen if keep(cadence, one)]
        if not kept:
            continue
        try:
            solo[cadence] = fit_solo(kept, streams, nodes)
        except ValueError as error:
            whys.append(f"{cadence}: {error}")
            continue
        notes += [f"{name} ({cadence}) was not fitted: {why}" for name, why in solo[cadence].refused.items()]
    if not solo:
        raise ValueError("; ".join(whys) or "no usable records of streams alone (status ok, with a time)")
    notes += whys
    return Model(
        crosstraffic=__version__,
        run_ids=tuple(run.info.run_id for run in runs),
        transport=", ".join(dict.fromkeys(run.info.transport.name for run in runs)),
        nodes=nodes,
        streams=tuple(_json(stream_to_dict(stream)) for stream in streams.values()),
        steps=tuple({step.name: _json(step_to_dict(step)) for run in runs for step in run.steps}.values()),
        aliases={alias: name for run in runs for alias, name in run.info.aliases.items()},
        solo=solo,
        contention=Contention(),
        noise=repeat_noise(runs),
        notes=tuple(notes),
    )


def _json(data: dict[str, Any]) -> dict[str, Any]:
    """Return the value as it comes back from a file: lists, not tuples."""
    found: dict[str, Any] = json.loads(json.dumps(data))
    return found


def _joined(runs: Sequence[Run]) -> tuple[Mapping[str, Stream], tuple[int, ...]]:
    if not runs:
        raise ValueError("a fit needs at least one run")
    nodes = runs[0].nodes
    streams: dict[str, Stream] = {}
    for run in runs:
        if run.nodes != nodes:
            raise ValueError(
                f"runs of one fit must have the same ranks on the same nodes: {run.info.run_id} has {run.nodes}, "
                f"{runs[0].info.run_id} has {nodes}"
            )
        for stream in run.streams:
            known = streams.setdefault(stream.name, stream)
            if not known.same_communication(stream):
                raise ValueError(f"stream {stream.name} is another communication in run {run.info.run_id}")
    return streams, nodes
