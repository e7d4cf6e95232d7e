"""Transfers that share capacity: max-min fair speeds over footprints, advanced in time.

A transfer has a footprint: for each resource that it loads, the share of that resource's capacity it uses while it
runs at full speed. Speed 1 is the speed it has alone. Progressive filling: Bertsekas and Gallager, "Data Networks"
(2nd ed., 1992), section 6.5.2.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_TOLERANCE = 1e-12
_FINISHED = 1e-9  # of a transfer's work; transfers that end this close together end at once
_MEMORY = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footprint:
    """What a transfer needs alone: its time, and the share of each resource in use during that time (at most 1)."""

    alone_s: float
    utilisation: Mapping[Hashable, float]


def footprint(needs_s: Mapping[Hashable, float]) -> Footprint:
    """Turn the seconds that a transfer would keep each resource busy into a footprint.

    >>> footprint({"egress": 2.0, "nic": 4.0})
    Footprint(alone_s=4.0, utilisation={'egress': 0.5, 'nic': 1.0})
    """
    alone_s = max(needs_s.values(), default=0.0)
    return Footprint(
        alone_s=alone_s,
        utilisation={resource: need / alone_s for resource, need in needs_s.items() if need > 0},
    )


def allocate(utilisations: Sequence[Mapping[Hashable, float]]) -> tuple[float, ...]:
    """Return the max-min fair speed of each transfer, in (0, 1].

    All speeds rise together from 0; a transfer stops rising when a resource that it loads is full, or at speed 1. For
    each resource the sum of speed x utilisation stays at most 1.

    >>> allocate([{"nic": 1.0}, {"nic": 1.0}, {"port": 0.5}])
    (0.5, 0.5, 1.0)
    >>> allocate([{"a": 1.0}, {"a": 1.0, "b": 0.5}, {"b": 1.0}])
    (0.5, 0.5, 0.75)
    """
    users: dict[Hashable, list[int]] = {}
    for index, utilisation in enumerate(utilisations):
        for resource, share in utilisation.items():
            if share > 0:
                users.setdefault(resource, []).append(index)
    open_load = {
        resource: sum(utilisations[index][resource] for index in members) for resource, members in users.items()
    }
    room = dict.fromkeys(users, 1.0)
    speeds = [1.0] * len(utilisations)
    rising = set(range(len(utilisations)))
    contended = {resource for resource, load in open_load.items() if load > 1 + _TOLERANCE}
    while contended:
        levels = {resource: room[resource] / open_load[resource] for resource in contended}
        level = min(levels.values())
        if level >= 1:
            break
        full = [resource for resource, reached in levels.items() if reached <= level * (1 + _TOLERANCE)]
        for index in sorted({index for resource in full for index in users[resource] if index in rising}):
            rising.discard(index)
            speeds[index] = level
            for resource, share in utilisations[index].items():
                if share > 0:
                    room[resource] -= level * share
                    open_load[resource] -= share
        contended.difference_update(full)
        contended = {resource for resource in contended if any(index in rising for index in users[resource])}
    return tuple(speeds)


@dataclass(slots=True, eq=False)
class _Transfer:
    tag: object
    footprint: Footprint
    work_s: float
    left_s: float
    speed: float = 1.0


@dataclass(slots=True)
class Fluid:
    """The transfers in progress. ``now_s`` only moves forward, with ``advance``."""

    now_s: float = 0.0
    _transfers: list[_Transfer] = field(default_factory=list)
    _next_s: float | None = None
    _is_stale: bool = False
    _memory: dict[tuple[int, ...], tuple[tuple[Footprint, ...], tuple[float, ...]]] = field(default_factory=dict)

    def add(self, tag: object, need: Footprint, factor: float = 1.0) -> None:
        """Begin a transfer now that takes ``factor`` times the time of its footprint when alone."""
        work_s = need.alone_s * factor
        self._transfers.append(_Transfer(tag=tag, footprint=need, work_s=work_s, left_s=work_s))
        self._is_stale = True

    def next_s(self) -> float | None:
        """Return when the next transfer ends if no other begins; None where none is in progress."""
        if self._is_stale:
            self._settle()
        return self._next_s

    def advance(self, now_s: float) -> list[object]:
        """Move on to ``now_s``, not past ``next_s()``; return the tags of the transfers that end there."""
        if self._is_stale:
            self._settle()
        passed_s, self.now_s = now_s - self.now_s, now_s
        blur_s = 4 * math.ulp(now_s)
        ended: list[object] = []
        going: list[_Transfer] = []
        for transfer in self._transfers:
            transfer.left_s -= passed_s * transfer.speed
            if now_s == self._next_s and transfer.left_s <= max(_FINISHED * transfer.work_s, blur_s):
                ended.append(transfer.tag)
            else:
                going.append(transfer)
        if ended:
            self._transfers = going
            self._is_stale = True
        return ended

    def _settle(self) -> None:
        self._is_stale = False
        transfers = self._transfers
        if not transfers:
            self._next_s = None
            return
        if len(transfers) == 1:
            transfers[0].speed = 1.0
        else:
            for transfer, speed in zip(transfers, self._speeds(item.footprint for item in transfers), strict=True):
                transfer.speed = speed
        self._next_s = self.now_s + max(0.0, min(transfer.left_s / transfer.speed for transfer in transfers))

    def _speeds(self, footprints: Iterable[Footprint]) -> tuple[float, ...]:
        needs = tuple(footprints)
        key = tuple(map(id, needs))
        known = self._memory.get(key)
        if known is None:
            if len(self._memory) >= _MEMORY:
                self._memory.clear()
            known = self._memory[key] = (needs, allocate([need.utilisation for need in needs]))
        return known[1]
