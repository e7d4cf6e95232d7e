"""How wrong a model is on what it did not see, beside the baselines and beside the repeat noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from crosstraffic.costmodel.baselines import BASELINES, curve_points
from crosstraffic.costmodel.calls import alone, pick_cadence
from crosstraffic.costmodel.fit import fit_alone, fit_runs
from crosstraffic.costmodel.model import Contention, Model
from crosstraffic.costmodel.observations import Mix, alone_observations, mixes_of, steps_of
from crosstraffic.costmodel.predict import predict_mix, predict_step
from crosstraffic.costmodel.solo import Observation
from crosstraffic.costmodel.steps import calls_of
from crosstraffic.costmodel.together import CADENCE_OF_MODE
from crosstraffic.results.record import Cadence
from crosstraffic.results.store import Run

HoldOut = Literal["sizes", "pairs", "triples", "steps", "all"]
KINDS: tuple[HoldOut, ...] = ("sizes", "pairs", "triples", "steps")
HOLD_OUTS: tuple[str, ...] = get_args(HoldOut)
OURS = "ours"
_SIZE_BINS = ((4096, "below 4 KiB"), (2**18, "4 KiB to 256 KiB"), (2**22, "256 KiB to 4 MiB"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One prediction beside what was measured, s; ``inside`` tells whether its 90 % interval held it."""

    model: str
    op: str
    payload_bytes: int | None
    predicted_s: float
    measured_s: float
    inside: bool | None

    @property
    def error(self) -> float:
        """Absolute error as a fraction of what was measured."""
        return abs(self.predicted_s / self.measured_s - 1.0)


def validate_runs(runs: Sequence[Run], hold_out: HoldOut = "all") -> dict[str, Any]:
    """Compare predictions with what was measured; the shape of ``validate --json``.

    ``sizes``: every other size of each curve is predicted by a model fitted without it (twice, so that each inner size
    has its turn). ``triples`` and ``steps`` are never fitted. ``pairs`` are fitted: ``in_sample`` says so. With ``all``
    the numbers at the top are those of ``sizes``, and ``kinds`` holds a block of the same shape for each kind.

    Raises:
        ValueError: an unknown kind, or runs that cannot be fitted.
    """
    if hold_out not in HOLD_OUTS:
        raise ValueError(f"unknown hold-out: {hold_out!r}; allowed: {', '.join(HOLD_OUTS)}")
    model = fit_alone(runs) if hold_out == "sizes" else fit_runs(runs)
    blocks: dict[str, dict[str, Any]] = {}
    for kind in KINDS if hold_out == "all" else (hold_out,):
        if kind == "sizes":
            scored = _sizes(runs)
        elif kind == "steps":
            scored = _steps(runs, model)
        else:
            wanted = [mix for mix in mixes_of(runs) if (len(mix.parts) == 2) == (kind == "pairs")]
            scored = [row for mix in wanted for row in _mix(model, mix)]
        blocks[kind] = _block(kind, scored, model)
    if hold_out != "all":
        return {"schema_version": 1, **blocks[hold_out]}
    return {"schema_version": 1, **blocks["sizes"], "kinds": blocks}


def _block(kind: str, scored: Sequence[Scored], model: Model) -> dict[str, Any]:
    return {
        "hold_out": kind,
        "in_sample": kind == "pairs",
        "noise": {"median_ape": model.noise.median_ape, "p90_ape": model.noise.p90_ape},
        "models": _by_model(scored),
        "by_op": {op: _by_model([row for row in scored if row.op == op]) for op in sorted({row.op for row in scored})},
        "by_size": {
            label: _by_model([row for row in scored if size_bin(row.payload_bytes) == label])
            for label in [*(label for _, label in _SIZE_BINS), "4 MiB and above"]
            if any(size_bin(row.payload_bytes) == label for row in scored)
        },
    }


def size_bin(payload_bytes: int | None) -> str | None:
    """Name the range that a size lies in.

    >>> size_bin(100), size_bin(4096), size_bin(2**22), size_bin(None)
    ('below 4 KiB', '4 KiB to 256 KiB', '4 MiB and above', None)
    """
    if payload_bytes is None:
        return None
    return next((label for top, label in _SIZE_BINS if payload_bytes < top), "4 MiB and above")


def _by_model(scored: Sequence[Scored]) -> dict[str, dict[str, float | int | None]]:
    found: dict[str, dict[str, float | int | None]] = {}
    for name in dict.fromkeys(row.model for row in scored):
        mine = [row for row in scored if row.model == name]
        errors = [row.error for row in mine]
        judged = [row.inside for row in mine if row.inside is not None]
        found[name] = {
            "median_ape": float(np.median(errors)),
            "p90_ape": float(np.quantile(errors, 0.9)),
            "coverage_90": float(np.mean(judged)) if judged else None,
            "num_points": len(mine),
        }
    return found


def _sizes(runs: Sequence[Run]) -> list[Scored]:
    observations = alone_observations(runs)
    scored: list[Scored] = []
    for turn in (1, 2):
        held = {
            (cadence, name, size)
            for cadence, seen in observations.items()
            for name, sizes in _sizes_by_stream(seen).items()
            for size in sizes[turn:-1:2]
            if len(sizes) >= 5
        }
        if not held:
            continue

        def keep(cadence: Cadence, one: Observation, held: set[tuple[Cadence, str, int]] = held) -> bool:
            return (cadence, one.stream, one.payload_bytes) not in held

        model = fit_alone(runs, keep)
        for cadence, seen in observations.items():
            if cadence not in model.solo:
                continue
            tables = _tables([one for one in seen if keep(cadence, one)])
            for one in seen:
                if keep(cadence, one) or one.stream not in model.solo[cadence].curves:
                    continue
                op = model.stream(one.stream).op
                guess = alone(model, one.stream, one.payload_bytes, cadence)
                scored.append(
                    Scored(
                        model=OURS,
                        op=op,
                        payload_bytes=one.payload_bytes,
                        predicted_s=guess.time_s,
                        measured_s=one.time_s,
                        inside=guess.low_s <= one.time_s <= guess.high_s,
                    )
                )
                sizes, times = tables[one.stream]
                for name, baseline in BASELINES.items():
                    scored.append(
                        Scored(
                            model=name,
                            op=op,
                            payload_bytes=one.payload_bytes,
                            predicted_s=baseline(sizes, times, one.payload_bytes),
                            measured_s=one.time_s,
                            inside=None,
                        )
                    )
    return scored


def _sizes_by_stream(seen: Sequence[Observation]) -> dict[str, list[int]]:
    found: dict[str, set[int]] = {}
    for one in seen:
        found.setdefault(one.stream, set()).add(one.payload_bytes)
    return {name: sorted(sizes) for name, sizes in found.items()}


def _tables(seen: Sequence[Observation]) -> dict[str, tuple[Any, Any]]:
    by_stream: dict[str, list[Observation]] = {}
    for one in seen:
        by_stream.setdefault(one.stream, []).append(one)
    return {
        name: curve_points(np.array([float(one.payload_bytes) for one in mine]), np.array([one.time_s for one in mine]))
        for name, mine in by_stream.items()
    }


def _mix(model: Model, mix: Mix) -> list[Scored]:
    """Score one mix: ours, fair sharing without factors, all free (nobody slows), all serial (one after the other)."""
    try:
        found = predict_mix(model, mix.sizes, mix.mode)["streams"]
        plain = predict_mix(model, mix.sizes, mix.mode, Contention())["streams"]
    except ValueError:  # a stream of it was refused: the model's notes say so
        return []
    alone_s = {row["name"]: row["alone_s"] for row in found}
    serial = sum(alone_s.values())
    scored = []
    for row, fair, (name, payload_bytes, measured_s, _) in zip(found, plain, mix.parts, strict=True):
        guesses: Mapping[str, float] = {
            OURS: row["together_s"],
            "fair_share": fair["together_s"],
            "free": alone_s[name],
            "serial": serial,
        }
        for label, predicted_s in guesses.items():
            scored.append(
                Scored(
                    model=label,
                    op=model.stream(name).op,
                    payload_bytes=payload_bytes,
                    predicted_s=predicted_s,
                    measured_s=measured_s,
                    inside=row["low_s"] <= measured_s <= row["high_s"] if label == OURS else None,
                )
            )
    return scored


def _steps(runs: Sequence[Run], model: Model) -> list[Scored]:
    """Score whole steps: ours, and the plain sum of all calls by each one-curve baseline."""
    observations = alone_observations(runs)
    cadence = pick_cadence(model, CADENCE_OF_MODE["steady"])
    tables = _tables(observations[cadence])
    scored = []
    for seen in steps_of(runs):
        step = model.step(seen.name)
        try:
            found = predict_step(model, step)
        except ValueError:  # a stream of it was refused: the model's notes say so
            continue
        guesses = {OURS: found["step_s"]}
        for label, baseline in BASELINES.items():
            guesses[label] = sum(
                count * baseline(*tables[model.measured_name(name)], payload_bytes)
                for (name, payload_bytes), count in calls_of(step).items()
                if model.measured_name(name) in tables
            )
        for label, predicted_s in guesses.items():
            scored.append(
                Scored(
                    model=label,
                    op=seen.name,
                    payload_bytes=None,
                    predicted_s=predicted_s,
                    measured_s=seen.time_s,
                    inside=found["low_s"] <= seen.time_s <= found["high_s"] if label == OURS else None,
                )
            )
    return scored
