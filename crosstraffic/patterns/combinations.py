"""Combinations: which pairs of parallelisms each engine takes, how they couple there, and by which rule it refuses."""

from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.patterns.coupling import Pair, coupling
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.model import ModelShape, load_model
from crosstraffic.patterns.workload import Workload

PAIRS: tuple[tuple[str, str], ...] = (
    ("tp", "dp"),
    ("tp", "pp"),
    ("tp", "cp"),
    ("tp", "sp"),
    ("tp", "ep"),
    ("tp", "pd"),
    ("dp", "pp"),
    ("dp", "cp"),
    ("dp", "ep"),
    ("pp", "cp"),
    ("pp", "ep"),
    ("cp", "ep"),
    ("ep", "pd"),
    ("sp", "cp"),
)
TITLES: Mapping[str, str] = {
    "vllm": "vLLM",
    "megatron": "Megatron-Core",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
}
# A GQA model, one with experts, and one with MLA and experts: an engine may take a combination for some only.
DENSE, EXPERTS, LATENT = "Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Two parallelisms on one engine: how they couple in the smallest layout that has both, or why it refuses."""

    first: str
    second: str
    framework: str
    layout: Layout
    model: str
    phase: str
    pair: Pair | None
    refusal: str | None

    @property
    def verdict(self) -> str:
        """The pair's verdict, or refused."""
        return "refused" if self.pair is None else self.pair.verdict


def smallest_layout(first: str, second: str, framework: str) -> Layout:
    """Return degrees of 2 for both, and of what the engine needs besides.

    In SGLang dp, cp and ep lie inside tp, in TensorRT-LLM dp and ep do; in vLLM ep is dp x cp x tp; in Megatron-Core it
    reuses the ranks of tp, cp and dp.

    >>> str(smallest_layout("dp", "ep", "vllm")), str(smallest_layout("tp", "dp", "sglang"))
    ('dp=2,ep=2', 'tp=4,dp=2')
    """
    asked = {first, second} - {"sp", "pd"}
    if "sp" in (first, second):
        asked.add("tp")
    degrees = dict.fromkeys(sorted(asked), 2)
    inside = {"sglang": {"dp", "cp"}, "tensorrt_llm": {"dp"}}.get(framework, set())
    if framework in ("sglang", "tensorrt_llm"):
        degrees["tp"] = 2 ** max(1, len(asked & (inside | {"tp"})))
        if framework == "tensorrt_llm" and "dp" in asked:
            degrees["tp"] = degrees["dp"] = 2
        if "ep" in asked and framework == "tensorrt_llm":
            degrees["ep"] = degrees["tp"]
    elif asked <= {"pp", "ep"}:
        degrees["dp"] = 2
    if framework == "vllm" and "ep" in asked:
        degrees["ep"] = degrees.get("dp", 1) * degrees.get("cp", 1) * degrees.get("tp", 1)
    return Layout(**degrees)


def combination(first: str, second: str, framework: str) -> Combination:
    """Probe one combination on one engine, with the first kind of model that it takes.

    Raises:
        ValueError: unknown framework or parallelism.
    """
    layout = smallest_layout(first, second, framework)
    phase = "prefill" if {"cp", "sp"} & {first, second} else "decode"
    names = (EXPERTS, LATENT) if "ep" in (first, second) else (DENSE, LATENT)
    refusals: list[str] = []
    for name in names:
        try:
            pair = _pair(load_model(name), layout, framework, phase, first, second)
        except ValueError as error:
            refusals.append(str(error))
            continue
        return Combination(
            first=first, second=second, framework=framework, layout=layout, model=name, phase=phase, pair=pair,
            refusal=None,
        )  # fmt: skip
    return Combination(
        first=first, second=second, framework=framework, layout=layout, model=names[0], phase=phase, pair=None,
        refusal=refusals[-1],
    )  # fmt: skip


def _pair(shape: ModelShape, layout: Layout, framework: str, phase: str, first: str, second: str) -> Pair:
    """Return how two parallelisms of a layout couple, its ranks on two nodes."""
    workload = Workload(
        phase=phase,  # type: ignore[arg-type]
        batch=8,
        context=4096,
        sequence_parallel="sp" in (first, second),
        ranks_per_node=max(1, world_size(layout, framework) // 2),
    )
    other = layout if "pd" in (first, second) else None
    found = coupling(shape, layout, workload, framework, decode_layout=other)
    for pair in found.pairs:
        if {pair.first.name, pair.second.name} == {first, second}:
            return pair
    raise ValueError(f"{TITLES[framework]} has no groups for {first} and {second} in {layout}")


def combinations() -> tuple[Combination, ...]:
    """Return every pair of ``PAIRS`` on every engine."""
    return tuple(combination(first, second, framework) for first, second in PAIRS for framework in TITLES)
