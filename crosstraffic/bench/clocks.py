"""Clocks in step: each rank's clock against rank 0's by ping-pong, with an error that is a bound and not a guess.

One round trip confines the offset: rank r read its clock somewhere between rank 0's two readings, so the middle of
them is wrong by at most half the round trip, however unequal the two ways are (Cristian, "Probabilistic clock
synchronization", 1989). Repeating this over the run gives the drift by a straight line through the offsets (the JK
and HCA schemes: Jones and Koenig, CCPE 2013; Hunold and Carpen-Amarie, CLUSTER 2018).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crosstraffic.bench.transport import Floats, Transport
from crosstraffic.results.record import ClockModel

MAX_DRIFT = 2e-4  # between two clocks whose drift is not known: two quartz oscillators of 100 ppm each
_BEST_SHARE = 4  # the quarter of the rounds with the smallest round trips says how far estimates scatter


def synchronise(transport: Transport, num_rounds: int) -> list[ClockModel] | None:
    """Compare every rank's clock with rank 0's; all ranks call it.

    The offset is that of the smallest round trip, the error half of that round trip plus how far the offsets of the
    best quarter of the rounds lie apart. ``at_s`` is on the rank's own clock; the drift is left at 0 (see ``Clocks``).

    Returns:
        One model per rank on rank 0, None elsewhere.

    Raises:
        ValueError: less than one round.
    """
    if num_rounds < 1:
        raise ValueError(f"num_rounds must be at least 1: {num_rounds}")
    if transport.rank:
        for _ in range(num_rounds):
            transport.receive_float(0)
            transport.send_float(0, transport.now_s())
        return None
    models = [ClockModel(rank=0, offset_s=0.0, drift=0.0, at_s=transport.now_s(), error_s=0.0)]
    for peer in range(1, transport.world_size):
        rounds = []
        for _ in range(num_rounds):
            sent_s = transport.now_s()
            transport.send_float(peer, sent_s)
            remote_s = transport.receive_float(peer)
            rounds.append((sent_s, remote_s, transport.now_s()))
        models.append(model_of_rounds(peer, rounds))
    return models


def model_of_rounds(rank: int, rounds: Sequence[tuple[float, float, float]]) -> ClockModel:
    """Work out a rank's clock from round trips (sent on rank 0, read on the rank, back on rank 0), each on its clock.

    >>> model = model_of_rounds(1, [(0.0, 5.125, 0.5), (1.0, 6.125, 1.25)])
    >>> model.offset_s, model.at_s, round(model.error_s, 9)
    (-5.0, 6.125, 0.125)
    """
    ordered = sorted(rounds, key=lambda item: item[2] - item[0])
    best = ordered[: max(1, len(ordered) // _BEST_SHARE)]
    offsets = [(sent_s + back_s) / 2 - remote_s for sent_s, remote_s, back_s in best]
    sent_s, remote_s, back_s = ordered[0]
    rounding_s = 4 * math.ulp(max(abs(sent_s), abs(remote_s), abs(back_s)))
    return ClockModel(
        rank=rank,
        offset_s=offsets[0],
        drift=0.0,
        at_s=remote_s,
        error_s=(back_s - sent_s) / 2 + (max(offsets) - min(offsets)) + rounding_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The straight line through one rank's offsets over its own time; arrays are ``[num_syncs]``."""

    offset_s: Floats
    error_s: Floats
    centre_s: float  # weighted mean of at_s
    level: Floats  # the line at t is the sum of (level + (t - centre_s) * slope) * offset_s
    slope: Floats
    residual_s: float

    @property
    def drift(self) -> float:
        return float(self.slope @ self.offset_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Successive results of ``synchronise`` (oldest first), and what follows from them for times in between and after.

    With syncs far enough apart each rank's clock is a straight line through its offsets, and the error at a time is
    the largest that offsets wrong by their errors can make there, plus the largest distance of an offset from the
    line. Where the drift found would be less certain than ``MAX_DRIFT`` (one sync, or syncs close together) the nearest
    offset holds, and its error grows by ``MAX_DRIFT``.
    """

    syncs: tuple[tuple[ClockModel, ...], ...]

    def __post_init__(self) -> None:
        sizes = {len(sync) for sync in self.syncs}
        if not self.syncs or len(sizes) != 1:
            raise ValueError(f"clocks need at least one sync, all of the same ranks: sizes {sorted(sizes)}")

    @property
    def num_ranks(self) -> int:
        return len(self.syncs[0])

    def with_sync(self, models: Sequence[ClockModel]) -> "Clocks":
        """Return the clocks with one more sync."""
        return Clocks(syncs=(*self.syncs, tuple(models)))

    def to_reference(self, rank: int, local_times: npt.ArrayLike) -> Floats:
        """Return times of a rank's clock as times of rank 0's clock; any shape."""
        local_s = np.asarray(local_times, dtype=np.float64)
        if rank == 0:
            return local_s.copy()
        line = self._line(rank)
        if line is None:
            at_s, offset_s, _ = self._offsets(rank)
            return np.asarray(local_s + offset_s[_nearest(at_s, local_s)], dtype=np.float64)
        mean_s = float(line.level @ line.offset_s)
        return np.asarray(local_s + mean_s + line.drift * (local_s - line.centre_s), dtype=np.float64)

    def error_s(self, rank: int, at_s: float) -> float:
        """Return by how much ``to_reference`` may be wrong at a time of the rank's clock; 0 for rank 0."""
        if rank == 0:
            return 0.0
        line = self._line(rank)
        if line is None:
            seen_s, _, error_s = self._offsets(rank)
            nearest = int(_nearest(seen_s, np.array(at_s)))
            return float(error_s[nearest] + MAX_DRIFT * abs(at_s - seen_s[nearest]))
        shares = np.abs(line.level + (at_s - line.centre_s) * line.slope)
        return float(shares @ line.error_s) + line.residual_s

    def models(self) -> tuple[ClockModel, ...]:
        """Return each rank's fitted clock, at its last sync.

        Rank 0's time is ``local + offset_s + drift * (local - at_s)``, local and ``at_s`` on the rank's own clock.
        """
        fitted = []
        for rank, last in enumerate(self.syncs[-1]):
            line = self._line(rank) if rank else None
            offset_s = float(self.to_reference(rank, last.at_s)) - last.at_s
            fitted.append(
                ClockModel(
                    rank=rank,
                    offset_s=offset_s,
                    drift=0.0 if line is None else line.drift,
                    at_s=last.at_s,
                    error_s=self.error_s(rank, last.at_s),
                )
            )
        return tuple(fitted)

    def _offsets(self, rank: int) -> tuple[Floats, Floats, Floats]:
        seen = [sync[rank] for sync in self.syncs]
        table = np.array([(model.at_s, model.offset_s, model.error_s) for model in seen], dtype=np.float64).T
        return table[0], table[1], table[2]

    def _line(self, rank: int) -> _Line | None:
        """Fit a rank's line, weighted by the errors; None where its drift would be too uncertain."""
        at_s, offset_s, error_s = self._offsets(rank)
        if len(at_s) < 2:
            return None
        weight = 1 / np.maximum(error_s, 1e-12) ** 2
        level = weight / weight.sum()
        centre_s = float(level @ at_s)
        spread = float(weight @ (at_s - centre_s) ** 2)
        if spread <= 0:
            return None
        slope = weight * (at_s - centre_s) / spread
        if float(np.abs(slope) @ error_s) > MAX_DRIFT:
            return None
        residual = offset_s - (float(level @ offset_s) + float(slope @ offset_s) * (at_s - centre_s))
        return _Line(
            offset_s=offset_s,
            error_s=error_s,
            centre_s=centre_s,
            level=level,
            slope=slope,
            residual_s=float(np.abs(residual).max()),
        )


def _nearest(at_s: Floats, times_s: Floats) -> npt.NDArray[np.intp]:
    """Return the index of the sync nearest to each time."""
    if len(at_s) == 1:
        return np.zeros(times_s.shape, dtype=np.intp)
    order = np.argsort(at_s, kind="stable")
    middles = (at_s[order][1:] + at_s[order][:-1]) / 2
    return np.asarray(order[np.searchsorted(middles, times_s)], dtype=np.intp)
