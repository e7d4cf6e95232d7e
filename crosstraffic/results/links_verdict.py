"""The verdict on a cluster's links by robust statistics: healthy, or which node, direction or pair is slow.

Model: the rate of a direction is the least of what its sender can send, what its receiver can get, and what the pair
of them carries. Faults are few, so the least set of slow senders, receivers and pairs that explains every slow
direction is what is wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from crosstraffic.results.links import Floats, Links
from crosstraffic.units import format_rate, format_seconds

TOLERANCE = 0.15  # how far under the reference a link may be
COLLAPSE = 0.7  # of the rate that links allow, under which an incast has collapsed
LATENCY_FACTOR, LATENCY_MARGIN_S = 2.0, 20e-6
MAX_NAMED = 6  # directions that a sentence lists

Kind = Literal[
    "slow_node",
    "slow_send",
    "slow_receive",
    "slow_direction",
    "slow_pair",
    "high_latency",
    "incast_collapse",
    "not_measured",
]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong; ``nodes`` are names, the sender first where it is a direction."""

    kind: Kind
    nodes: tuple[str, ...]
    text: str
    bytes_per_s: float | None = None
    reference_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``healthy``, ``slow`` (any finding) or ``incomplete`` (something was not measured), with the reasons."""

    verdict: Literal["healthy", "slow", "incomplete"]
    findings: tuple[Finding, ...]
    reference_bytes_per_s: float | None
    reference_latency_s: float | None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Culprits:
    """What explains a set of bad directions: senders, receivers, and single directions that neither explains."""

    senders: frozenset[int]
    receivers: frozenset[int]


def verdict(links: Links, *, tolerance: float = TOLERANCE) -> Verdict:
    """Judge links; a direction counts as slow only if each of its visits says so, by more than its interval.

    ``tolerance`` is the share of the reference rate that a link may lack. The reference is a high but robust level:
    of what each end point sends to, and gets from, a good peer (upper quartile of its links), the upper quartile.

    Raises:
        ValueError: ``tolerance`` is not between 0 and 1.
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be between 0 and 1: {tolerance}")
    findings = [*_slow(links, tolerance), *_late(links), *_collapsed(links), *_missing(links)]
    kinds = {finding.kind for finding in findings}
    kind: Literal["healthy", "slow", "incomplete"] = "slow" if kinds else "healthy"
    reference, latency_s = reference_rate(links.rate.best), _reference_latency_s(links)
    if "not_measured" in kinds or reference is None:
        kind = "incomplete"
    note = None
    if links.num_end_points == 2:
        note = "2 end points have only each other to compare with: a slow node cannot be told from a slow pair"
    return Verdict(
        verdict=kind,
        findings=tuple(findings),
        reference_bytes_per_s=reference,
        reference_latency_s=latency_s,
        note=note,
    )


def reference_rate(rate: Floats) -> float | None:
    """Return the level that links are compared with, bytes per second; ``rate`` is ``[sender, receiver]``.

    It holds with half of the end points slow: what their links lose on the side of a good peer does not count there.
    None where nothing was measured.

    >>> rate = np.full((4, 4), 24.0); rate[2] = rate[:, 2] = 6.0; np.fill_diagonal(rate, np.nan)
    >>> reference_rate(rate)
    24.0
    """
    ports = np.array([level for line in (*rate, *rate.T) if (level := _good(line)) is not None])
    return float(np.quantile(ports, 0.75, method="lower")) if len(ports) else None


def _good(rates: Floats) -> float | None:
    """Return what an end point reaches with a good peer."""
    measured = rates[~np.isnan(rates)]
    return float(np.quantile(measured, 0.75, method="higher")) if len(measured) else None


def _in_every_visit(by_visit: Floats, is_bad: Callable[[Floats], Flags]) -> Flags:
    """Tell where all visits that were made are bad, and there was one."""
    made = ~np.isnan(by_visit)
    with np.errstate(invalid="ignore"):
        bad = is_bad(by_visit)
    return np.asarray(made.any(axis=0) & (bad | ~made).all(axis=0), dtype=np.bool_)


def _culprits(bad: Flags, measured: Flags) -> _Culprits:
    """Find the fewest senders and receivers, all of whose directions are bad, that explain most bad directions.

    Two directions at least must agree: one alone may as well be its pair's fault.
    """
    n = len(bad)
    whole = {
        **{("send", i): {(i, j) for j in range(n) if bad[i, j]} for i in range(n) if _is_whole(bad[i], measured[i])},
        **{
            ("receive", j): {(i, j) for i in range(n) if bad[i, j]}
            for j in range(n)
            if _is_whole(bad[:, j], measured[:, j])
        },
    }
    chosen: list[tuple[str, int]] = []
    left = set().union(*whole.values()) if whole else set()
    while left:
        most = max(whole, key=lambda port: len(whole[port] & left))
        chosen.append(most)
        left -= whole[most]
    for port in sorted(chosen, key=lambda found: len(whole[found])):
        others = [whole[other] for other in chosen if other != port]
        if others and whole[port] <= set().union(*others):
            chosen.remove(port)
    return _Culprits(
        senders=frozenset(place for way, place in chosen if way == "send"),
        receivers=frozenset(place for way, place in chosen if way == "receive"),
    )


def _is_whole(bad: Flags, measured: Flags) -> bool:
    return int(measured.sum()) >= 2 and bool((bad | ~measured).all())


def _slow(links: Links, tolerance: float) -> list[Finding]:
    best, names = links.rate.best, links.names
    reference = reference_rate(best)
    if reference is None:
        return []
    measured = ~np.isnan(best)
    slow = _in_every_visit(links.rate.high, lambda high: high < (1 - tolerance) * reference)
    culprits = _culprits(slow, measured)
    sends = np.array([_level(best[i], i in culprits.senders, reference) for i in range(len(names))])
    gets = np.array([_level(best[:, j], j in culprits.receivers, reference) for j in range(len(names))])
    findings = []
    for node in sorted(culprits.senders | culprits.receivers):
        is_sender, is_receiver = node in culprits.senders, node in culprits.receivers
        parts = []
        if is_sender:
            parts.append(f"sends at {format_rate(sends[node])}")
        if is_receiver:
            parts.append(f"gets {format_rate(gets[node])}")
        kind: Kind = "slow_node" if is_sender and is_receiver else "slow_send" if is_sender else "slow_receive"
        findings.append(
            Finding(
                kind=kind,
                nodes=(names[node],),
                bytes_per_s=float(min(sends[node], gets[node])),
                reference_bytes_per_s=reference,
                text=f"{_WORDS[kind]}: {names[node]} {' and '.join(parts)}, others {format_rate(reference)}",
            )
        )
    expected = np.minimum(np.minimum(sends[:, np.newaxis], gets[np.newaxis, :]), reference)
    rest = _in_every_visit(links.rate.high, lambda high: high < (1 - tolerance) * expected)
    return findings + [_one(links, pair, rest, expected) for pair in _pairs(rest)]


_WORDS = {"slow_node": "slow node", "slow_send": "slow direction", "slow_receive": "slow direction"}


def _level(rates: Floats, is_culprit: bool, reference: float) -> float:
    """Return what an end point sends or gets at best: the reference where it is no culprit."""
    return float(np.nanmax(rates)) if is_culprit else reference


def _pairs(bad: Flags) -> list[tuple[int, int]]:
    """Return bad directions, those that are bad both ways once."""
    return [(i, j) for i, j in np.argwhere(bad).tolist() if i < j or not bad[j, i]]


def _one(links: Links, pair: tuple[int, int], bad: Flags, expected: Floats) -> Finding:
    here, there = pair
    best, names = links.rate.best, links.names
    is_pair = bool(bad[there, here])
    rate = float(np.nanmin([best[pair], best[there, here]])) if is_pair else float(best[pair])
    words = f"slow pair {names[here]} - {names[there]}" if is_pair else f"slow direction {names[here]} > {names[there]}"
    back = "" if is_pair or np.isnan(best[there, here]) else f", the other way {format_rate(best[there, here])}"
    return Finding(
        kind="slow_pair" if is_pair else "slow_direction",
        nodes=(names[here], names[there]),
        bytes_per_s=rate,
        reference_bytes_per_s=float(expected[pair]),
        text=f"{words}: {format_rate(rate)}{back}, others {format_rate(expected[pair])}",
    )


def _reference_latency_s(links: Links) -> float | None:
    """Return a low robust level of the latency: the lower quartile of what directions show at their best, s."""
    known = links.latency_p05_s[~np.isnan(links.latency_p05_s)]
    return float(np.quantile(known, 0.25, method="lower")) if len(known) else None


def _late(links: Links) -> list[Finding]:
    reference_s = _reference_latency_s(links)
    if reference_s is None:
        return []
    margin_s = LATENCY_MARGIN_S + (links.clock_error_s if links.clock == "synchronised" else 0.0)
    best_s, names = links.best_latency_s, links.names
    usual_s = float(np.quantile(best_s[~np.isnan(best_s)], 0.25, method="lower"))
    # Where processors are short, calls vary by more than the factor: fast calls of one, then, against usual ones.
    limit_s = max(LATENCY_FACTOR * reference_s, reference_s + margin_s, usual_s)
    late = _in_every_visit(links.latency_p05_s, lambda p05: p05 > limit_s)
    culprits = _culprits(late, ~np.isnan(best_s))
    others = f"others {format_seconds(reference_s)}"
    findings = []
    rest = late.copy()
    for node in sorted(culprits.senders | culprits.receivers):
        is_sender, is_receiver = node in culprits.senders, node in culprits.receivers
        lines = [best_s[node]] * is_sender + [best_s[:, node]] * is_receiver
        ways = "of" if is_sender and is_receiver else "from" if is_sender else "to"
        time_s = float(np.nanmedian(np.concatenate(lines)))
        text = f"high latency {ways} {names[node]}: {format_seconds(time_s)}, {others}"
        findings.append(Finding(kind="high_latency", nodes=(names[node],), text=text))
        if is_sender:
            rest[node] = False
        if is_receiver:
            rest[:, node] = False
    for here, there in _pairs(rest):
        sign = "-" if rest[there, here] else ">"
        text = f"high latency {names[here]} {sign} {names[there]}: {format_seconds(best_s[here, there])}, {others}"
        findings.append(Finding(kind="high_latency", nodes=(names[here], names[there]), text=text))
    return findings


def _collapsed(links: Links) -> list[Finding]:
    """Find end points that get far less from several at once than from one, where no slow sender is the reason."""
    best = links.rate.best
    findings = []
    for node, name in enumerate(links.names):
        peers = ~np.isnan(links.incast_peer[:, node])
        rates = best[peers, node]
        rates = rates[~np.isnan(rates)]
        if not len(rates):
            continue
        allowed = min(float(rates.max()), len(rates) * float(rates.min()))
        high = links.incast.high[:, node : node + 1]
        if not _in_every_visit(high, lambda found, most=COLLAPSE * allowed: found < most)[0]:  # type: ignore[misc]
            continue
        seen = float(links.incast.best[node])
        findings.append(
            Finding(
                kind="incast_collapse",
                nodes=(name,),
                bytes_per_s=seen,
                reference_bytes_per_s=allowed,
                text=f"incast collapse at {name}: {format_rate(seen)} from {links.num_peers} at once, "
                f"{format_rate(allowed)} from one",
            )
        )
    return findings


def _missing(links: Links) -> list[Finding]:
    """Say what was not measured, one finding a reason."""
    by_reason: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for gap in links.gaps:
        by_reason.setdefault((gap.what, gap.why), []).extend(gap.links)
    findings = []
    for (what, why), found in by_reason.items():
        directions = sorted(set(found))
        told = ", ".join(f"{links.names[here]} > {links.names[there]}" for here, there in directions[:MAX_NAMED])
        more = f" and {len(directions) - MAX_NAMED} more" if len(directions) > MAX_NAMED else ""
        nodes = sorted({place for pair in directions for place in pair})
        findings.append(
            Finding(
                kind="not_measured",
                nodes=tuple(links.names[place] for place in nodes),
                text=f"{what} not measured: {told}{more} ({why})",
            )
        )
    return findings
