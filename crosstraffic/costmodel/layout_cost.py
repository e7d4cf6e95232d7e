"""Layout cost: how long the communication of one step of each layout takes, from cells measured or predicted.

Each call of a step becomes a cell (op, ranks, nodes, size), all cells of all layouts are priced at once, and times are
added up as the step says. A step has *work* (every call of all passes, one after another) and a *critical path*: lanes
run at the same time, and the passes of a pipeline follow each other through its stages. With s_i the time of one pass
on stage i and m passes, a prefill takes sum s_i + (m - 1) max s_i, and a decode, which never drains,
max(sum s_i, m max s_i).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot, isfinite

import pandas as pd

from crosstraffic.patterns.layouts import Candidate
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.placed import Lie, PlacedCall
from crosstraffic.results.table import CELL, CURVE

Predict = Callable[[pd.DataFrame], pd.DataFrame]  # as costmodel.cells.model.predict_cells with its model
EXPERT_OPS: Mapping[str, str] = {"ep.dispatch": "ep_dispatch", "ep.combine": "ep_combine"}
REDUCING = frozenset({"all_reduce", "reduce_scatter"})
BYTES_OF_DTYPE: Mapping[str, float] = {"float32": 4, "fp32": 4, "float": 4, "nvfp4": 0.5, "fp4": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Time of one call, s, with its 90 % interval (NaN where none is known), what does it, and why it has no price.

    ``source`` and ``kind`` are those of ``predict_cells``: measured or model, and what had to be extrapolated.
    """

    time_s: float
    low_s: float
    high_s: float
    kernel: str
    source: str
    kind: str
    why: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCost:
    """One stream in one step: its calls, and their time, s, one after another."""

    name: str
    pattern: str
    op: str
    payload_bytes: int
    calls: int
    time_s: float
    share: float
    kernels: tuple[str, ...]
    sources: tuple[str, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """Communication of one step: ``time_s`` on the critical path with its 90 % interval, ``sum_s`` all calls in a row.

    Not ``valid``: a call has no price, ``why`` says which, and times are None.
    """

    time_s: float | None
    low_s: float | None
    high_s: float | None
    sum_s: float | None
    valid: bool
    why: str | None
    streams: tuple[StreamCost, ...] = ()

    @property
    def patterns(self) -> dict[str, float]:
        """Share of ``sum_s`` by parallelism, the largest first."""
        shares: dict[str, float] = {}
        for stream in self.streams:
            shares[stream.pattern] = shares.get(stream.pattern, 0.0) + stream.share
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def price_layouts(
    candidates: Sequence[Candidate],
    curves: pd.DataFrame,
    predict: Predict,
    shape: ModelShape,
    phase: str,
    kernel: str | None = None,
) -> list[LayoutCost]:
    """Price layouts found ``with_calls``, in their order, with one prediction of all their cells.

    ``curves`` are what the model was fitted to (columns ``results.table.CURVE``): which kernels and types there are. Of
    several kernels that do an op the fastest is taken, or ``kernel`` where it does the op.

    Raises:
        ValueError: no curve is of ``kernel``.
    """
    known = curves[list(CURVE)].drop_duplicates()
    if kernel is not None and kernel not in set(known["kernel"]):
        raise ValueError(f"no curve of kernel {kernel!r}; there are {', '.join(sorted(set(known['kernel'])))}")
    by_op: dict[str, list[dict[str, object]]] = {
        str(op): part.to_dict("records")  # type: ignore[misc]
        for op, part in known.groupby("op", sort=False)
    }
    kinds = {_kind(call) for one in candidates for call in one.calls}
    queries: list[dict[str, object]] = []
    asked: dict[tuple[PlacedCall, Lie], range] = {}
    for call in kinds:
        for lie in call.lies:
            own = _queries(call, lie, by_op, shape, phase, kernel)
            asked[call, lie] = range(len(queries), len(queries) + len(own))
            queries += own
    rows = _predicted(queries, predict)
    prices = {
        call: _slowest([_best([rows[i] for i in asked[call, lie]], call, lie) for lie in call.lies]) for call in kinds
    }
    return [_cost(one, prices, phase) for one in candidates]


def _kind(call: PlacedCall) -> PlacedCall:
    """Return the call without where and how often it is made: what its price depends on."""
    return replace(call, lane=0, stage=0, times=1)


def _queries(
    call: PlacedCall,
    lie: Lie,
    by_op: Mapping[str, list[dict[str, object]]],
    shape: ModelShape,
    phase: str,
    kernel: str | None,
) -> list[dict[str, object]]:
    """Return the cells that a call may be: one for each kernel and setting in which its op was measured."""
    op = call.op
    if call.num_messages is not None and EXPERT_OPS.get(call.stream) in by_op:
        op = EXPERT_OPS[call.stream]
    found = [curve for curve in by_op.get(op, []) if _agrees(str(curve["parameters"]), shape)]
    if kernel is not None and any(curve["kernel"] == kernel for curve in found):
        found = [curve for curve in found if curve["kernel"] == kernel]
    if op not in EXPERT_OPS.values():
        found = _of_dtype(found, call)
    cells: dict[tuple[object, ...], dict[str, object]] = {}
    for name in dict.fromkeys(curve["kernel"] for curve in found):
        own = [curve for curve in found if curve["kernel"] == name]
        own = _preferred(own, "issue", ("graph", "eager") if phase == "decode" else ("eager", "graph"))
        own = _preferred(own, "cadence", ("streaming", "isolated"))
        counted = {curve["num_groups"] for curve in own}
        for curve in own:
            size = call.payload_bytes
            if op in EXPERT_OPS.values() and call.num_messages is not None:
                size = round(call.num_messages * shape.hidden * _element_bytes(str(curve["dtype"])))
            cell = curve | {
                "num_ranks": lie.num_ranks,
                "num_nodes": lie.num_nodes,
                "ranks_per_node": lie.ranks_per_node,
                "placement": lie.placement,
                # groups that share no node do not meet: they count only where they were counted when measured
                "num_groups": lie.num_groups if lie.num_groups in counted else lie.groups_per_node,
                "payload_bytes": size,
            }
            cells[tuple(cell[column] for column in CELL)] = cell
    return list(cells.values())


def _agrees(parameters: str, shape: ModelShape) -> bool:
    """Tell whether a curve's experts are those of the model; what the model does not say may be anything."""
    own = {"hidden": shape.hidden, "top_k": shape.top_k, "experts": shape.num_experts}
    given = dict(part.split("=", 1) for part in parameters.split(",") if "=" in part)
    return all(given[name] == str(value) for name, value in own.items() if name in given)


def _of_dtype(curves: list[dict[str, object]], call: PlacedCall) -> list[dict[str, object]]:
    """Keep curves of the type of a call, else of its width; sums of another width are another kernel's work."""
    same = [curve for curve in curves if curve["dtype"] in (call.dtype, "")]
    width = _element_bytes(call.dtype)
    alike = same or [curve for curve in curves if _element_bytes(str(curve["dtype"])) == width]
    return alike or ([] if call.op in REDUCING else curves)


def _element_bytes(dtype: str) -> float:
    """Return the width of a type by any of its names.

    >>> _element_bytes("bfloat16"), _element_bytes("half"), _element_bytes("float8_e4m3"), _element_bytes("int8")
    (2, 2, 1, 1)
    """
    if dtype in BYTES_OF_DTYPE:
        return BYTES_OF_DTYPE[dtype]
    return 1 if "8" in dtype else 2


def _preferred(curves: list[dict[str, object]], column: str, order: Sequence[str]) -> list[dict[str, object]]:
    """Keep the curves that are as wanted in a column, those of the first wish that any fulfils."""
    for wish in order:
        if own := [curve for curve in curves if curve[column] == wish]:
            return own
    return curves


def _predicted(queries: list[dict[str, object]], predict: Predict) -> list[Price]:
    if not queries:
        return []
    frame = pd.DataFrame(queries)[list(CELL)]
    answer = predict(frame)
    prices = []
    columns = ["time_s", "low_s", "high_s", "source", "kind", "valid", "why"]
    for kernel, row in zip(frame["kernel"], answer[columns].itertuples(index=False), strict=True):
        time_s, low_s, high_s, source, kind, valid, why = row
        sound = bool(valid) and isfinite(time_s) and time_s > 0
        prices.append(
            Price(
                time_s=float(time_s),
                low_s=float(low_s),
                high_s=float(high_s),
                kernel=str(kernel),
                source=str(source),
                kind=str(kind),
                why=None if sound else str(why or "no time is known"),
            )
        )
    return prices


def _best(prices: list[Price], call: PlacedCall, lie: Lie) -> Price:
    """Return the fastest valid price of a call, or why there is none."""
    valid = [price for price in prices if price.why is None]
    if valid:
        return min(valid, key=lambda price: price.time_s)
    nan = float("nan")
    why = prices[0].why if prices else f"no curve of op {call.op} for {call.dtype}"
    where = f"{lie.num_ranks} ranks on {lie.num_nodes} node{'s' if lie.num_nodes > 1 else ''}"
    return Price(
        time_s=nan, low_s=nan, high_s=nan, kernel="", source="", kind="", why=f"{call.stream} ({where}): {why}"
    )


def _slowest(prices: list[Price]) -> Price:
    """Return the price of the group that takes longest; of one without a price if there is any."""
    refused = [price for price in prices if price.why is not None]
    return refused[0] if refused else max(prices, key=lambda price: price.time_s)


def _cost(candidate: Candidate, prices: Mapping[PlacedCall, Price], phase: str) -> LayoutCost:
    priced = [(call, prices[_kind(call)]) for call in candidate.calls]
    refused = list(dict.fromkeys(price.why for _, price in priced if price.why is not None))
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        return LayoutCost(time_s=None, low_s=None, high_s=None, sum_s=None, valid=False, why=f"{refused[0]}{more}")
    num_passes = candidate.num_passes
    sum_s = num_passes * sum(call.times * price.time_s for call, price in priced)
    time_s = critical_path_s(_by_stage(priced), num_passes, phase)
    scale = time_s / sum_s if sum_s > 0 else 0.0
    down: dict[str, float] = {}
    up: dict[str, float] = {}
    for call, price in priced:  # errors of one kernel go together, those of different ones do not
        count = call.times * num_passes * scale
        down[price.kernel] = down.get(price.kernel, 0.0) + count * (price.time_s - price.low_s)
        up[price.kernel] = up.get(price.kernel, 0.0) + count * (price.high_s - price.time_s)
    low_s, high_s = time_s - hypot(*down.values()), time_s + hypot(*up.values())
    has_interval = isfinite(low_s) and isfinite(high_s)
    return LayoutCost(
        time_s=time_s,
        low_s=max(low_s, 0.0) if has_interval else None,
        high_s=high_s if has_interval else None,
        sum_s=sum_s,
        valid=True,
        why=None,
        streams=_shares(priced, num_passes, sum_s),
    )


def _by_stage(priced: Sequence[tuple[PlacedCall, Price]]) -> list[list[float]]:
    """Return the time of one pass, s, by lane and stage."""
    lanes: dict[int, dict[int, float]] = {}
    for call, price in priced:
        stages = lanes.setdefault(call.lane, {})
        stages[call.stage] = stages.get(call.stage, 0.0) + call.times * price.time_s
    return [list(stages.values()) for stages in lanes.values()]


def critical_path_s(lanes: Sequence[Sequence[float]], num_passes: int, phase: str) -> float:
    """Return the communication on the critical path of a step, s; ``lanes[lane][stage]`` are times of one pass, s.

    >>> critical_path_s([[1.0, 2.0]], 3, "prefill"), critical_path_s([[1.0, 2.0]], 2, "decode")
    (7.0, 4.0)
    >>> critical_path_s([[1.0], [3.0]], 1, "decode"), critical_path_s([], 1, "decode")
    (3.0, 0.0)
    """
    longest = 0.0
    for stages in lanes:
        once, busiest = sum(stages), max(stages)
        whole = max(once, num_passes * busiest) if phase == "decode" else once + (num_passes - 1) * busiest
        longest = max(longest, whole)
    return longest


def _shares(priced: Sequence[tuple[PlacedCall, Price]], num_passes: int, sum_s: float) -> tuple[StreamCost, ...]:
    by_name: dict[str, list[tuple[PlacedCall, Price]]] = {}
    for call, price in priced:
        by_name.setdefault(call.stream, []).append((call, price))
    found = []
    for name, own in by_name.items():
        time_s = num_passes * sum(call.times * price.time_s for call, price in own)
        first = own[0][0]
        found.append(
            StreamCost(
                name=name,
                pattern=first.pattern,
                op=first.op,
                payload_bytes=first.payload_bytes,
                calls=num_passes * sum(call.times for call, _ in own),
                time_s=time_s,
                share=time_s / sum_s if sum_s > 0 else 0.0,
                kernels=tuple(sorted({price.kernel for _, price in own})),
                sources=tuple(sorted({price.source for _, price in own})),
                kinds=tuple(sorted({price.kind for _, price in own})),
            )
        )
    return tuple(sorted(found, key=lambda stream: -stream.time_s))


def rank(candidates: Sequence[Candidate], costs: Sequence[LayoutCost]) -> list[tuple[Candidate, LayoutCost]]:
    """Order layouts: what has a price before what has none, what holds the batch before what does not, then by time."""
    return sorted(
        zip(candidates, costs, strict=True),
        key=lambda pair: (
            not pair[1].valid,
            pair[0].rounds,
            pair[0].memory.missing_bytes,
            0.0 if pair[1].time_s is None else pair[1].time_s,
        ),
    )
