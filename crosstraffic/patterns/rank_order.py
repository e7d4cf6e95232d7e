"""Rank order: what an engine makes of the degrees of a layout, and how ranks are cut into process groups."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from crosstraffic.patterns.layout import Layout

Groups = tuple[tuple[int, ...], ...]
Ranks = npt.NDArray[np.object_]
Rules = Iterable[tuple[bool, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """How one engine orders its ranks.

    ``degrees`` are the fields of a layout that it has beside tp, pp, dp, cp, ep, etp and replicas. ``world`` counts the
    ranks of one instance, ``world_rule`` says how, ``world_refusal`` what the engine says of a world that does not fit
    (to be formatted with the degrees, ``world`` and ``ranks``). ``fills_dp``: dp is what a world leaves.

    ``rules`` yields (holds, what the engine says if not) for a layout and an order string. ``groups`` gives the process
    groups by name for the ranks of all instances, each group in the engine's own order. ``names`` is what the engine
    calls them; ``same_ranks`` are further communicators by the name of the groups whose ranks they have. ``notes``
    yields what a reader of a layout's groups must know.
    """

    title: str
    degrees: frozenset[str]
    world: Callable[["Layout"], int]
    world_rule: str
    world_refusal: str
    fills_dp: bool
    expert_tp: Callable[["Layout"], int]
    rules: Callable[["Layout", str | None], Rules]
    groups: Callable[["Layout", Ranks, str | None], Mapping[str, Groups]]
    names: Mapping[str, str]
    same_ranks: Mapping[str, str]
    notes: Callable[["Layout"], Iterable[str]]
    source: str


def all_ranks(num_ranks: int) -> Ranks:
    """Return ranks 0, 1, ... as Python's own integers, which groups of every kind then share."""
    return np.array(range(num_ranks), dtype=np.object_)


def cut(ranks: Ranks, size: int) -> Groups:
    """Cut ranks, the last axes fastest, into groups of ``size``.

    >>> cut(all_ranks(4).reshape(2, 2).T, 2)
    ((0, 2), (1, 3))
    """
    return tuple(map(tuple, ranks.reshape(-1, size).tolist()))
