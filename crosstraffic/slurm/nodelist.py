"""Slurm's notation of node lists, ``gpu[001-128,200],login1``: read and written."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

MAX_NODES = 200_000
_PART = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_NUMBERED = re.compile(r"(.*?)(\d+)", re.ASCII)


def _pieces(text: str) -> Iterator[str]:
    """Split at commas that are not in brackets."""
    depth, start = 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"not a node list: {text!r}: brackets do not match")
        if letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ValueError(f"not a node list: {text!r}: brackets do not match")
    yield text[start:]


def _numbers(inside: str, text: str) -> Iterator[str]:
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"not a node list: {text!r}: not a range: {part!r}; write [1-4,7]")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise ValueError(f"not a node list: {text!r}: the range {part} runs backwards")
        if int(last) - int(first) >= MAX_NODES:
            raise ValueError(f"not a node list: {text!r}: more than {MAX_NODES} nodes")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def expand(text: str) -> tuple[str, ...]:
    """Return the nodes of a list in order; several brackets in a name multiply.

    >>> expand("gpu[08-10,2],login1")
    ('gpu08', 'gpu09', 'gpu10', 'gpu2', 'login1')
    >>> expand("r[1-2]n[1-2]")
    ('r1n1', 'r1n2', 'r2n1', 'r2n2')

    Raises:
        ValueError: not such a list, a node twice, or too many nodes.

    Source: Slurm, sbatch(1) --nodelist; hostlist expressions.
    """
    nodes: list[str] = []
    for piece in _pieces(text):
        names = [""]
        for place, part in enumerate(re.split(r"[\[\]]", piece)):
            if place % 2:
                endings = list(_numbers(part, text))
                if len(names) * len(endings) > MAX_NODES:
                    raise ValueError(f"not a node list: {text!r}: more than {MAX_NODES} nodes")
                names = [name + ending for name in names for ending in endings]
            elif part:
                if not _PART.fullmatch(part):
                    raise ValueError(f"not a node list: {text!r}: not a node name: {part!r}")
                names = [name + part for name in names]
        if any(not name or name.startswith("-") for name in names[:1]):
            raise ValueError(f"not a node list: {text!r}: a name is empty or starts with '-'")
        nodes += names
    if len(nodes) > MAX_NODES:
        raise ValueError(f"not a node list: {text!r}: more than {MAX_NODES} nodes")
    twice, times = Counter(nodes).most_common(1)[0]
    if times > 1:
        raise ValueError(f"not a node list: {text!r}: {twice} is named twice")
    return tuple(nodes)


def compress(nodes: Iterable[str]) -> str:
    """Write nodes as a list, runs of numbers of one width in brackets, in order of first appearance of each prefix.

    >>> compress(["gpu08", "gpu09", "gpu10", "login1", "gpu2"])
    'gpu[08-10,2],login1'
    """
    families: dict[tuple[str, bool], list[str]] = {}
    for node in nodes:
        match = _NUMBERED.fullmatch(node)
        families.setdefault((match.group(1), True) if match else (node, False), []).append(
            match.group(2) if match else ""
        )
    written: list[str] = []
    for (prefix, is_numbered), numbers in families.items():
        if not is_numbered:
            written.append(prefix)
            continue
        runs: list[list[str]] = []
        for number in numbers:
            last = runs[-1][-1] if runs else None
            follows = last is not None and f"{int(last) + 1:0{len(last)}d}" == number
            runs[-1].append(number) if follows else runs.append([number])
        ranges = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
        written.append(prefix + (ranges[0] if len(ranges) == 1 and len(runs[0]) == 1 else f"[{','.join(ranges)}]"))
    return ",".join(written)
