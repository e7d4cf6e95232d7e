"""Combinations: which pairs of parallelisms each engine takes, how they couple there, and by which rule it refuses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product

from crosstraffic.patterns.coupling import Pair, Verdict, coupling, judge, silent_uses
from crosstraffic.patterns.crossing import Lie, crossing
from crosstraffic.patterns.degree_rules import degree_rule
from crosstraffic.patterns.in_use import takes_ranks
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.model import ModelShape, load_model
from crosstraffic.patterns.setting import make_setting
from crosstraffic.patterns.workload import Workload

PAIRS: tuple[tuple[str, str], ...] = (
    ("tp", "dp"),
    ("tp", "pp"),
    ("tp", "cp"),
    ("tp", "sp"),
    ("tp", "dcp"),
    ("tp", "ep"),
    ("tp", "pd"),
    ("dp", "pp"),
    ("dp", "cp"),
    ("dp", "ep"),
    ("pp", "cp"),
    ("pp", "ep"),
    ("cp", "ep"),
    ("ep", "etp"),
    ("ep", "pd"),
    ("sp", "cp"),
)
TITLES: Mapping[str, str] = {
    "vllm": "vLLM",
    "megatron": "Megatron-Core",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
}
# A GQA model, one with experts, and one with MLA and experts: an engine may take a combination for some only. Pools of
# one model may differ by a factor that is no power of two where its heads can be cut so.
DENSE, EXPERTS, LATENT, MANY_WAYS = "Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "Kimi-K3"
MAX_WORLD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A layout in which the groups of a pair lie otherwise, or the verdict is another one, than in the smallest."""

    layout: Layout
    lie: Lie
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Two parallelisms on one engine: how they couple in the smallest layout that has both, or why it refuses.

    ``but_for`` is what it says of the first kind of model, where it takes only another one. ``others`` are further
    ways in which the pair lies. ``replicas`` is the pair with replicas, each an engine of its own, in the place of dp,
    where the engine's own dp takes no ranks.
    """

    first: str
    second: str
    framework: str
    layout: Layout
    model: str
    phase: str
    pair: Pair | None
    refusal: str | None
    but_for: str | None = None
    others: tuple[Other, ...] = ()
    replicas: Pair | None = None

    @property
    def verdict(self) -> str:
        """The pair's verdict, or refused."""
        return "refused" if self.pair is None else self.pair.verdict

    @property
    def verdicts(self) -> tuple[str, ...]:
        """All verdicts that were seen, that of the smallest layout first."""
        return tuple(dict.fromkeys([self.verdict, *(other.verdict for other in self.others)]))


def smallest_layout(first: str, second: str, framework: str) -> Layout:
    """Return degrees of 2 for both, and of what the engine needs besides.

    In SGLang dp, cp and ep lie inside tp, in TensorRT-LLM dp and ep do; in vLLM ep is dp x cp x tp; in Megatron-Core it
    reuses the ranks of tp, cp and dp. Experts are given data-parallel attention, so that tokens travel to them.

    >>> str(smallest_layout("dp", "ep", "vllm")), str(smallest_layout("tp", "dp", "sglang"))
    ('dp=2,ep=2', 'tp=4,dp=2')
    """
    asked = {first, second} - {"sp", "pd"}
    if {"sp", "dcp"} & {first, second}:
        asked.add("tp")
    degrees = dict.fromkeys(sorted(asked), 2)
    if framework in ("vllm", "megatron"):
        if "etp" in asked:
            degrees |= {"tp": 2, "dp": 2}
        elif "ep" in asked and not asked & {"tp", "dp", "cp"}:
            degrees["dp"] = 2
        if framework == "vllm" and "ep" in asked:
            degrees["ep"] = degrees.get("dp", 1) * degrees.get("cp", 1) * degrees.get("tp", 1)
        return Layout(**degrees)
    inside = {"dp", "cp"} if framework == "sglang" else set()
    degrees["tp"] = 2 ** max(1, len(asked & (inside | {"tp"})))
    if "etp" in asked:
        degrees["tp"] = 4
    elif "ep" in asked and not asked & {"tp", "cp"}:
        degrees["dp"] = degrees["tp"] = 2
    if framework == "tensorrt_llm":
        if "dp" in asked:
            degrees["tp"] = degrees["dp"] = 2
        if "ep" in asked and "etp" not in asked:
            degrees["ep"] = degrees["tp"]
    return Layout(**degrees)


def candidates(first: str, second: str, framework: str) -> Iterator[Layout]:
    """Yield small layouts with both, the fewest ranks first; the engine may refuse any of them."""
    asked = {first, second} - {"sp", "pd"}
    names = ("tp", "cp", "dp", "pp", "ep", "dcp")
    choices = [(2, 4) if name in asked else (1, 2) if name in ("tp", "cp", "dp") else (1,) for name in names]
    cut = (None, 2) if {"ep", "etp"} & asked and framework == "megatron" else (2,) if "etp" in asked else (None,)
    layouts: list[Layout] = []
    for degrees, etp in product(product(*choices), cut):
        layout = replace(Layout(etp=etp), **dict(zip(names, degrees, strict=True)))
        if framework == "vllm" and "ep" in asked:
            layout = replace(layout, ep=layout.dp * layout.cp * layout.tp)
        if framework in ("sglang", "tensorrt_llm"):  # whose dp lies inside tp
            layout = replace(layout, tp=max(layout.tp, layout.dp * (layout.cp if framework == "sglang" else 1)))
        if layout not in layouts and world_size(layout, framework) <= MAX_WORLD:
            layouts.append(layout)
    yield from sorted(layouts, key=lambda layout: world_size(layout, framework))


def others(first: str, second: str, framework: str, model: str, workload: Workload, known: Pair) -> tuple[Other, ...]:
    """Return the smallest layout of each further way in which the groups of a pair lie, or it is judged."""
    found = {(known.crossing.lie, known.verdict)}
    kept: list[Other] = []
    shape = load_model(model)
    for layout in candidates(first, second, framework):
        try:
            setting = make_setting(shape, layout, workload, framework)
        except ValueError:
            continue
        uses = {use.name: use for use in silent_uses(setting)}
        if not {first, second} <= set(uses):
            continue
        one, two = uses[known.first.name], uses[known.second.name]
        lies = crossing(one.groups, two.groups)
        verdict, _ = judge(one, two, lies, partial(degree_rule, layout, framework))
        if (lies.lie, verdict) not in found:
            found.add((lies.lie, verdict))
            kept.append(Other(layout=layout, lie=lies.lie, verdict=verdict))
    return tuple(kept)


@lru_cache(maxsize=256)
def combination(first: str, second: str, framework: str) -> Combination:
    """Probe one combination on one engine, with the first kind of model that it takes.

    Raises:
        ValueError: unknown framework or parallelism.
    """
    layout = smallest_layout(first, second, framework)
    phase = "prefill" if {"cp", "sp"} & {first, second} else "decode"
    names = [EXPERTS, LATENT] if "ep" in (first, second) else [DENSE, LATENT]
    if {first, second} == {"tp", "pd"}:
        names = [MANY_WAYS]
    own = Combination(
        first=first, second=second, framework=framework, layout=layout, model=names[0], phase=phase, pair=None,
        refusal=None,
    )  # fmt: skip
    refusals: list[str] = []
    for name in names:
        shape, workload = load_model(name), _workload(layout, framework, phase, "sp" in (first, second))
        try:
            pair = _pair(shape, layout, framework, workload, first, second)
        except ValueError as error:
            refusals.append(str(error))
            continue
        return replace(
            own,
            model=name,
            pair=pair,
            but_for=refusals[0] if refusals else None,
            others=() if "pd" in (first, second) else others(first, second, framework, name, workload, pair),
            replicas=_with_replicas(shape, layout, framework, phase, first, second),
        )
    return replace(own, refusal=refusals[-1])


def _workload(layout: Layout, framework: str, phase: str, sequence_parallel: bool) -> Workload:
    """Return work on ranks that lie on two nodes."""
    return Workload(
        phase=phase,  # type: ignore[arg-type]
        batch=8,
        context=4096,
        sequence_parallel=sequence_parallel,
        ranks_per_node=max(1, world_size(layout, framework) // 2),
    )


def _pair(shape: ModelShape, layout: Layout, framework: str, workload: Workload, first: str, second: str) -> Pair:
    """Return how two parallelisms of a layout couple."""
    other = layout if "pd" in (first, second) else None
    found = coupling(shape, layout, workload, framework, decode_layout=other)
    for pair in found.pairs:
        if {pair.first.name, pair.second.name} == {first, second}:
            return pair
    raise ValueError(f"{TITLES[framework]} has no groups for {first} and {second} in {layout}")


def _with_replicas(
    shape: ModelShape, layout: Layout, framework: str, phase: str, first: str, second: str
) -> Pair | None:
    """Return the pair with replicas in the place of dp where the engine's dp lies inside tp; None elsewhere."""
    if "dp" not in (first, second) or takes_ranks(layout, framework, "dp"):
        return None
    apart = replace(layout, dp=1, replicas=layout.dp)
    asked = tuple("replicas" if name == "dp" else name for name in (first, second))
    return _pair(shape, apart, framework, _workload(apart, framework, phase, False), *asked)


def combinations() -> tuple[Combination, ...]:
    """Return every pair of ``PAIRS`` on every engine."""
    return tuple(combination(first, second, framework) for first, second in PAIRS for framework in TITLES)
