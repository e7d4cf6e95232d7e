"""The page of combinations, as Markdown: what ``crosstraffic coupling --combinations`` prints."""

from collections.abc import Iterator, Mapping, Sequence

from crosstraffic.commands.coupling_words import RESOURCES, lies
from crosstraffic.patterns.combinations import PAIRS, TITLES, Combination
from crosstraffic.results.neighbours import Slowdowns
from crosstraffic.units import format_bytes

HEAD = """# Which parallelisms go together

For each pair of parallelisms the smallest layout that has both was tried on each engine's rank order and rules.

- **natural**: independent; any degree of one goes with any degree of the other, and groups meet in one rank at most.
- **coupled**: a rule ties the two degrees, or both cut the same dimension.
- **part of the other**: one takes no ranks of its own; its groups are made of the other's ranks.
- **refused**: the engine does not run it.

`crosstraffic coupling MODEL --layout ...` answers the same for a layout of your own, with bytes per step.
"""


def page(found: Sequence[Combination], seen: Mapping[tuple[str, str], Slowdowns]) -> str:
    """Return the page; ``seen`` are slowdowns of a measured run by (slowed, beside)."""
    by_pair = {(one.first, one.second, one.framework): one for one in found}
    lines = [HEAD, f"| pair | {' | '.join(TITLES.values())} |", f"|---|{'---|' * len(TITLES)}"]
    for first, second in PAIRS:
        cells = [by_pair[first, second, framework].verdict for framework in TITLES]
        name = f"{first.upper()} + {second.upper()}"
        anchor = f"{first}--{second}"
        lines.append(f"| [{name}](#{anchor}) | {' | '.join(cells)} |")
    for first, second in PAIRS:
        lines += ["", f"## {first.upper()} + {second.upper()}", ""]
        lines += [line for framework in TITLES for line in _told(by_pair[first, second, framework])]
        for slowed, beside in ((first, second), (second, first)):
            if (slowed, beside) in seen:
                was = seen[slowed, beside]
                lines.append(
                    f"- measured: {slowed.upper()} beside {beside.upper()} took {was.median:.2f} times as long "
                    f"({was.low:.2f} to {was.high:.2f}, {was.num_pairs} pairs)"
                )
    return "\n".join(lines) + "\n"


def _told(one: Combination) -> Iterator[str]:
    where = f"`{one.layout}`, {one.model}, {one.phase}"
    if one.pair is None:
        yield f"- **{TITLES[one.framework]}** refuses {where}: {one.refusal}"
        return
    yield f"- **{TITLES[one.framework]}**, {where}: {one.pair.verdict}; {one.pair.why}"
    yield f"  - groups: {lies(one.pair)}"
    if one.pair.shared:
        kind, index = one.pair.shared[0].resource
        ours, theirs = (format_bytes(amount) for amount in one.pair.shared[0].num_bytes)
        yield (
            f"  - both load {RESOURCES[kind].format(index=index)}: {ours} of {one.pair.first.name.upper()}, "
            f"{theirs} of {one.pair.second.name.upper()} a step"
        )
    yield f"  - in time: {one.pair.when}"
