"""Parallelisms: what each one cuts, what it puts on the wire, how many bytes a layer, on which group, when it hurts.

``python -m crosstraffic.patterns.parallelism README.md`` rewrites the table between the two markers of a page.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

DimensionRelation = Literal["same", "nested", "different"]

# What can be cut, and of what it is a part: tokens are those of a request, an expert's columns are columns of weights.
DIMENSIONS: Mapping[str, frozenset[str]] = {
    "requests": frozenset(),
    "tokens": frozenset({"requests"}),
    "cached tokens": frozenset({"requests"}),
    "heads": frozenset(),
    "columns": frozenset(),
    "layers": frozenset(),
    "experts": frozenset(),
    "columns of an expert": frozenset({"experts", "columns"}),
    "phases": frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One way in which a parallelism communicates: its streams, and the bytes that a rank sends in one layer.

    ``formula`` is an expression in the names of ``SYMBOLS``: see ``evaluate``. ``per`` says what it counts.
    """

    streams: tuple[str, ...]
    collective: str
    formula: str
    per: Literal["layer", "boundary"] = "layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """One parallelism; ``cuts`` are names of ``DIMENSIONS``, ``exchanges`` are alternatives."""

    title: str
    cuts: tuple[str, ...]
    what: str
    group: str
    hurts: str
    exchanges: tuple[Exchange, ...] = ()


SYMBOLS: Mapping[str, str] = {
    "P": "ranks of the group",
    "T": "tokens of a step on one replica, in EP and ETP on one rank",
    "H": "hidden size",
    "b": "bytes of an element",
    "Hq": "query heads",
    "K": "KV heads, at least TP",
    "d": "head size",
    "k": "experts of a token",
    "TP": "tensor-parallel ranks",
}
PARALLELISMS: Mapping[str, Parallelism] = {
    "tp": Parallelism(
        title="TP, tensor",
        cuts=("heads", "columns"),
        what="heads, columns of weights",
        group="neighbouring ranks",
        hurts="decode: latency; prefill: bandwidth; nothing hides it",
        exchanges=(
            Exchange(
                streams=("tp.attention_output", "tp.mlp_output"),
                collective="2 all-reduces",
                formula="2 * 2 * (P - 1) / P * T * H * b",
            ),
        ),
    ),
    "sp": Parallelism(
        title="SP, sequence",
        cuts=("tokens",),
        what="tokens between the blocks of TP",
        group="those of TP",
        hurts="as TP; more and smaller calls",
        exchanges=(
            Exchange(
                streams=("sp.all_gather", "sp.reduce_scatter"),
                collective="2 all-gathers, 2 reduce-scatters",
                formula="4 * (P - 1) / P * T * H * b",
            ),
        ),
    ),
    "cp": Parallelism(
        title="CP, context",
        cuts=("tokens", "cached tokens"),
        what="the prompt and its KV",
        group="one rank of each TP group",
        hurts="long prompts, few query heads a KV head, across nodes",
        exchanges=(
            Exchange(
                streams=("cp.kv_ring",),
                collective="P - 1 sends to the next rank",
                formula="(P - 1) * T / P * 2 * K / TP * d * b",
            ),
            Exchange(
                streams=("cp.kv_all_gather",),
                collective="all-gather of K and V",
                formula="(P - 1) * T / P * 2 * K / TP * d * b",
            ),
            Exchange(
                streams=("cp.ulysses_query", "cp.ulysses_key", "cp.ulysses_value", "cp.ulysses_output"),
                collective="4 all-to-alls (Ulysses), heads for tokens",
                formula="(P - 1) / P * T / P * (2 * Hq + 2 * K) / TP * d * b",
            ),
            Exchange(
                streams=("cp.query_ring", "cp.partial_output"),
                collective="P - 1 sends of queries, all-to-all of outputs (pass-Q)",
                formula="(P - 1) * T / P * Hq / TP * (2 * d * b + 4)",
            ),
        ),
    ),
    "dcp": Parallelism(
        title="DCP, decode context",
        cuts=("cached tokens",),
        what="cached tokens, where TP would repeat the KV",
        group="a part of TP's",
        hurts="decode: latency of three more calls a layer",
        exchanges=(
            Exchange(
                streams=("dcp.query", "dcp.lse", "dcp.output"),
                collective="2 all-gathers, reduce-scatter",
                formula="(P - 1) * T * Hq / TP * (2 * d * b + 4 * P)",
            ),
            Exchange(
                streams=("dcp.query", "dcp.exchange"),
                collective="all-gather, all-to-all of outputs packed with their weights",
                formula="(P - 1) * T * Hq / TP * d * b + (P - 1) * T * Hq / TP * (d + 2) * b",
            ),
        ),
    ),
    "pp": Parallelism(
        title="PP, pipeline",
        cuts=("layers",),
        what="layers",
        group="a rank of each stage",
        hurts="few micro-batches, slow nodes between stages",
        exchanges=(
            Exchange(
                streams=("pp.activation",),
                collective="send to the next stage",
                formula="2 * T * H * b / TP",
                per="boundary",
            ),
        ),
    ),
    "ep": Parallelism(
        title="EP, expert",
        cuts=("experts",),
        what="experts",
        group="ranks of DP, CP and TP together",
        hurts="every layer with experts, uneven routing, across nodes",
        exchanges=(
            Exchange(
                streams=("ep.dispatch", "ep.combine"),
                collective="2 all-to-all-v, uneven as the routing",
                formula="(P - 1) / P * T * k * (16 + H + 4 * H / 128 + 2 * H)",
            ),
            Exchange(
                streams=("ep.all_gather", "ep.reduce_scatter"),
                collective="all-gather, reduce-scatter",
                formula="(P - 1) * T * (2 * H * b + 8 * k)",
            ),
        ),
    ),
    "etp": Parallelism(
        title="ETP, expert tensor",
        cuts=("columns of an expert",),
        what="columns of each expert",
        group="innermost (SGLang, Megatron-Core)",
        hurts="doubles what EP moves",
        exchanges=(
            Exchange(
                streams=("etp.all_gather", "etp.reduce_scatter"),
                collective="all-gather, reduce-scatter",
                formula="2 * (P - 1) * T * k * H * b",
            ),
        ),
    ),
    "dp": Parallelism(
        title="DP, data",
        cuts=("requests",),
        what="requests",
        group="the same rank of each replica",
        hurts="uneven replicas; alone it sends nothing",
        exchanges=(
            Exchange(
                streams=("dp.gather", "dp.scatter"),
                collective="none; DP attention in TP: all-gather, reduce-scatter",
                formula="2 * (P - 1) * T * H * b",
            ),
        ),
    ),
    "replicas": Parallelism(
        title="replicas, DP without a group",
        cuts=("requests",),
        what="requests, among engines of their own",
        group="none; the same rank of each engine",
        hurts="only what engines on one node share",
    ),
    "moe_dp": Parallelism(
        title="MoE DP, copies of the experts",
        cuts=("tokens",),
        what="tokens, among copies of the experts",
        group="a rank of each copy",
        hurts="memory",
    ),
    "moe_cluster": Parallelism(
        title="MoE clusters",
        cuts=("experts",),
        what="experts, among clusters of ranks",
        group="a rank of each cluster",
        hurts="as EP",
    ),
    "pd": Parallelism(
        title="PD, prefill from decode",
        cuts=("phases",),
        what="prefill from decode",
        group="ranks that hold the same KV",
        hurts="bursts beside decode steps",
        exchanges=(
            Exchange(
                streams=("pd.kv",),
                collective="KV transfer, heads resharded",
                formula="T * 2 * K / TP * d * b",
            ),
        ),
    ),
}


def parallelism(name: str) -> Parallelism:
    """Return a parallelism by name.

    Raises:
        ValueError: no such parallelism.
    """
    if name not in PARALLELISMS:
        raise ValueError(f"unknown parallelism: {name!r}; allowed: {', '.join(PARALLELISMS)}")
    return PARALLELISMS[name]


def dimension_relation(first: tuple[str, ...], second: tuple[str, ...]) -> DimensionRelation:
    """Tell whether two parallelisms cut the same dimension, one cuts a part of what the other cuts, or neither.

    >>> dimension_relation(("tokens",), ("tokens", "cached tokens")), dimension_relation(("requests",), ("tokens",))
    ('same', 'nested')
    >>> dimension_relation(("heads", "columns"), ("layers",))
    'different'
    """
    if set(first) & set(second):
        return "same"
    wholes = {whole for name in first for whole in DIMENSIONS[name]} & set(second)
    wholes |= {whole for name in second for whole in DIMENSIONS[name]} & set(first)
    return "nested" if wholes else "different"


def evaluate(formula: str, symbols: Mapping[str, int]) -> Fraction:
    """Work out an expression of whole numbers, names, ``+ - * /`` and parentheses, exactly.

    >>> evaluate("2 * (P - 1) / P * M", {"P": 8, "M": 1048576})
    Fraction(1835008, 1)

    Raises:
        ValueError: anything else in the expression, or an unknown name.
    """

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.Name(id=name):
                if name not in symbols:
                    raise ValueError(f"unknown symbol in {formula!r}: {name}; allowed: {', '.join(symbols)}")
                return Fraction(symbols[name])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return value(left) - value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return value(left) / value(right)
        raise ValueError(f"not a sum or product of numbers and names: {ast.unparse(node)} in {formula!r}")

    return value(ast.parse(formula, mode="eval").body)


BEGIN = "<!-- parallelisms: written by python -m crosstraffic.patterns.parallelism README.md -->"
END = "<!-- end of parallelisms -->"


def table_text() -> str:
    """Return the table of parallelisms as Markdown, a row for each way to communicate."""
    heads = (
        "parallelism",
        "what is cut",
        "on the wire, a layer",
        "bytes a rank sends, a layer",
        "group",
        "when it hurts",
    )
    lines = [f"| {' | '.join(heads)} |"]
    lines.append("|---|---|---|---|---|---|")
    for entry in PARALLELISMS.values():
        for index, way in enumerate(entry.exchanges):
            names = ", ".join(f"`{name}`" for name in way.streams)
            formula = f"`{way.formula}`" + (" a boundary" if way.per == "boundary" else "")
            cells = (entry.title, entry.what) if index == 0 else ("", "or")
            last = (entry.group, entry.hurts) if index == 0 else ("", "")
            lines.append(f"| {' | '.join((*cells, f'{way.collective}: {names}', formula, *last))} |")
    meaning = "; ".join(f"`{name}` {text}" for name, text in SYMBOLS.items())
    return "\n".join([*lines, "", f"{meaning}.", ""])


def with_table(page: str) -> str:
    """Return a page with the table between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page must have the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table_text()}\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "README.md")
    target.write_text(with_table(target.read_text(encoding="utf-8")), encoding="utf-8")
    print(target)
