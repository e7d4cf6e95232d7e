"""The page of combinations, as Markdown: what ``crosstraffic coupling --combinations`` prints."""

from collections.abc import Iterator, Mapping, Sequence

from crosstraffic.commands.coupling_words import LIES, cuts, lies
from crosstraffic.patterns.combinations import PAIRS, TITLES, Combination
from crosstraffic.patterns.coupling import Overlap, Pair
from crosstraffic.patterns.load import KINDS
from crosstraffic.results.neighbours import Slowdowns

HEAD = """# Which parallelisms go together

For each pair of parallelisms the smallest layout that has both was tried on each engine's rank order and rules, and
then larger ones, for other ways in which their groups lie.

- **natural**: independent; any degree of one goes with any degree of the other, and groups meet in one rank at most.
- **coupled**: a rule ties the two degrees, both cut the same dimension, or groups meet in several ranks.
- **part of the other**: one takes no ranks of its own; its groups are made of the other's ranks.
- **refused**: the engine does not run it.

Where an engine's dp lies inside tp (attention data parallelism), `replicas` are data parallelism as usual: engines of
their own behind a router. What both load is the scarcest link that carries bytes of both in one step, ranks on two
nodes (with PD two for each pool); the column has the worst case of the four engines.

`crosstraffic coupling MODEL --layout ...` answers the same for a layout of your own, with bytes per step.
"""
LINKS: Mapping[str, str] = {"nic": "a node's network", "port": "a rank's port", "fabric": "links inside a node"}
TIMES: Mapping[Overlap, str] = {"together": "at the same time", "replicas": "by turns", "serial": "by turns"}


def page(found: Sequence[Combination], seen: Mapping[tuple[str, str], Slowdowns]) -> str:
    """Return the page; ``seen`` are slowdowns of a measured run by (slowed, beside)."""
    by_pair = {(one.first, one.second, one.framework): one for one in found}
    heads = ["pair", *TITLES.values(), "both load", *(["measured"] if seen else [])]
    lines = [HEAD, f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for first, second in PAIRS:
        own = [by_pair[first, second, framework] for framework in TITLES]
        name = f"[{first.upper()} + {second.upper()}](#{first}--{second})"
        cells = [name, *map(_judged, own), _shared(own), *([_measured(first, second, seen)] if seen else [])]
        lines.append(f"| {' | '.join(cells)} |")
    for first, second in PAIRS:
        own = [by_pair[first, second, framework] for framework in TITLES]
        lines += ["", f"## {first.upper()} + {second.upper()}", ""]
        lines += [f"{line}\n" for line in {cuts(one.pair): None for one in own if one.pair is not None}]
        lines += [line for one in own for line in _told(one)]
        for slowed, beside in ((first, second), (second, first)):
            if (slowed, beside) in seen:
                was = seen[slowed, beside]
                lines.append(
                    f"- measured: {slowed} beside {beside} took {was.median:.2f} times as long "
                    f"({was.low:.2f} to {was.high:.2f}, {was.num_pairs} pairs)"
                )
    return "\n".join(lines) + "\n"


def _judged(one: Combination) -> str:
    """Write all verdicts of a combination, that of the smallest layout first."""
    text = ", or ".join(one.verdicts)
    if one.replicas is not None and one.verdict != one.replicas.verdict:
        text += f"; replicas: {one.replicas.verdict}"
    return text


def _shared(own: Sequence[Combination]) -> str:
    """Write the scarcest link that both load on any engine, those loaded at the same time first."""
    pairs = [one.pair for one in own if one.pair is not None and one.pair.shared]
    if not pairs:
        return "nothing"
    most = min(pairs, key=lambda pair: (pair.overlap != "together", KINDS.index(pair.shared[0].resource[0])))
    return f"{_link(most)}, {TIMES[most.overlap]}"


def _link(pair: Pair) -> str:
    return LINKS[pair.shared[0].resource[0].partition("_")[0]]


def _measured(first: str, second: str, seen: Mapping[tuple[str, str], Slowdowns]) -> str:
    """Write the median slowdown of each beside the other."""
    both = [(one, seen[one, two]) for one, two in ((first, second), (second, first)) if (one, two) in seen]
    return ", ".join(f"{name} x{was.median:.2f} ({was.low:.2f}-{was.high:.2f})" for name, was in both)


def _told(one: Combination) -> Iterator[str]:
    where = f"`{one.layout}`, {one.model}, {one.phase}"
    if one.pair is None:
        yield f"- **{TITLES[one.framework]}** refuses {where}: {one.refusal}"
        return
    yield f"- **{TITLES[one.framework]}**, {where}: {one.pair.verdict}; {one.pair.why}"
    yield f"  - groups: {lies(one.pair)}"
    for other in one.others:
        lie = LIES[other.lie].format(first=one.pair.first.name, second=one.pair.second.name, common=2)
        yield f"  - in `{other.layout}`: {other.verdict}; {lie}"
    if one.replicas is not None:
        yield f"  - as replicas: {one.replicas.verdict}; {one.replicas.why}"
    if one.but_for is not None:
        yield f"  - but not every model: {one.but_for}"
    both_load = f"both load {_link(one.pair)}; " if one.pair.shared else ""
    yield f"  - on the wire: {both_load}{one.pair.when}"
