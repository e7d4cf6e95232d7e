"""Layout: the degrees of each parallelism, and the process groups that each engine makes of them, in its own order.

A degree means what the engine means by it. vLLM: world = dp x pp x cp x tp, ep = dp x cp x tp. Megatron-Core:
world = tp x cp x dp x pp = etp x ep x edp x pp. SGLang: world = tp x pp, and dp and cp (of attention), ep and moe_dp
lie inside tp. TensorRT-LLM: world = tp x cp x pp, and ep, etp and moe_cluster lie inside tp. ``replicas`` such worlds
lie behind each other and never talk: vLLM's external data parallelism, the replicas of a dense model, servers behind a
router.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache

from crosstraffic.patterns.rank_order import Engine, all_ranks
from crosstraffic.patterns.rank_order import Groups as Groups
from crosstraffic.patterns.ranks_megatron import MEGATRON
from crosstraffic.patterns.ranks_megatron import MEGATRON_ORDER as MEGATRON_ORDER
from crosstraffic.patterns.ranks_sglang import SGLANG
from crosstraffic.patterns.ranks_tensorrt_llm import TENSORRT_LLM
from crosstraffic.patterns.ranks_vllm import VLLM

MAX_RANKS = 2**20  # more than any machine has; groups of so many ranks still fit a laptop's memory
COMMON = frozenset({"tp", "pp", "dp", "cp", "ep", "etp", "replicas"})

FRAMEWORKS: Mapping[str, Engine] = {
    "vllm": VLLM,
    "megatron": MEGATRON,
    "sglang": SGLANG,
    "tensorrt_llm": TENSORRT_LLM,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees. ``etp`` None: what the engine derives (see ``expert_tp``)."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    dcp: int = 1
    moe_dp: int = 1
    moe_cluster: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "etp":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be a whole number from 1: {value!r}")
            if value > MAX_RANKS:
                raise ValueError(f"{field.name} must be at most {MAX_RANKS} (2**20 ranks): {value}")

    def __str__(self) -> str:
        degrees = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ",".join(f"{name}={value}" for name, value, default in degrees if value != default) or "tp=1"


def parse_layout(text: str, *, world: int | None = None, framework: str = "vllm") -> Layout:
    """Read ``tp=8,dp=2,ep=16``; degrees not named are 1, but dp is what fills ``world`` if that is given.

    >>> parse_layout("tp=2,cp=2,pp=2", world=16, framework="megatron").dp
    2

    Raises:
        ValueError: not a degree, named twice, or degrees that do not multiply to ``world``.
    """
    names = tuple(field.name for field in fields(Layout))
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in names or not equals:
            raise ValueError(f"not a degree: {part.strip()!r}; write tp=8,dp=2 with names from {', '.join(names)}")
        if name in degrees:
            raise ValueError(f"degree {name} is given twice: {text!r}")
        if not value.isascii() or not value.isdigit() or not value.strip("0"):
            raise ValueError(f"{name} must be a whole number from 1: {value!r}")
        if len(value.lstrip("0")) > len(str(MAX_RANKS)):
            raise ValueError(f"{name} must be at most {MAX_RANKS} (2**20 ranks): {value[:20]}")
        degrees[name] = int(value)
    layout = Layout(**degrees)
    return layout if world is None else _fill(layout, world, engine_of(framework), framework, "dp" in degrees)


def _fill(layout: Layout, world: int, engine: Engine, framework: str, has_dp: bool) -> Layout:
    """Let dp take what a world leaves where the engine has dp beside tp; check that all ranks are used."""
    if not 1 <= world <= MAX_RANKS:
        raise ValueError(f"world must be a whole number from 1 to {MAX_RANKS} (2**20 ranks): {world}")
    ranks = world_size(layout, framework)
    model = layout.tp * layout.pp * layout.cp
    refusal = engine.world_refusal.format(**asdict(layout), world=world, model=model)
    if not has_dp and engine.fills_dp:
        if world % ranks:
            raise ValueError(f"world_size ({world}) is not divisible by the degrees of {layout}: {refusal}")
        layout = replace(layout, dp=world // ranks)
        ranks = world_size(layout, framework)
    if ranks != world:
        raise ValueError(
            f"the degrees do not multiply to the world: {layout} is {ranks} ranks in {framework} "
            f"({engine.world_rule}), the world is {world}: {refusal}"
        )
    return layout


def engine_of(framework: str) -> Engine:
    """Return how an engine orders its ranks.

    Raises:
        ValueError: unknown framework.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"unknown framework: {framework!r}; allowed: {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[framework]


def check_framework(framework: str) -> None:
    """Raise ValueError for a framework whose rank order is not known."""
    engine_of(framework)


def world_size(layout: Layout, framework: str = "vllm") -> int:
    """Return how many ranks a layout takes.

    >>> world_size(Layout(tp=8, dp=4, pp=2)), world_size(Layout(tp=8, dp=4, pp=2), "sglang")
    (64, 16)

    Raises:
        ValueError: unknown framework, or more ranks than are described here.
    """
    num_ranks = layout.replicas * engine_of(framework).world(layout)
    if num_ranks > MAX_RANKS:
        raise ValueError(f"at most {MAX_RANKS} (2**20) ranks are described: {layout} is {num_ranks} in {framework}")
    return num_ranks


def expert_tp(layout: Layout, framework: str) -> int:
    """Return over how many ranks each expert is cut: ``etp``, or what the engine makes of the other degrees.

    Megatron-Core: 1 with ep, as its inference layers need it, else tp; say etp=tp for its default in training.
    """
    return engine_of(framework).expert_tp(layout) if layout.etp is None else layout.etp


def check_layout(layout: Layout, framework: str = "vllm", *, order: str | None = None) -> None:
    """Raise ValueError, in the engine's own words where it has some, for degrees that it refuses or does not have."""
    engine = engine_of(framework)
    if order is not None and framework != "megatron":
        raise ValueError(f"an order string belongs to megatron only: {order!r} with {framework}")
    world_size(layout, framework)
    for name, degree in asdict(layout).items():
        if degree not in (1, None) and name not in COMMON | engine.degrees:
            raise ValueError(f"{engine.title} has no {name}: {name}={degree}")
    for holds, rule in engine.rules(layout, order):
        if not holds:
            raise ValueError(f"{engine.title}: {rule} ({layout})")


def process_groups(layout: Layout, framework: str = "vllm", *, order: str | None = None) -> Mapping[str, Groups]:
    """Return the process groups of an engine by name, each in the order in which the engine lists its ranks.

    ``order`` is Megatron-Core's order string, leftmost fastest. ``ep`` of vLLM is the group that any model with
    experts gets, whether expert parallelism is on or not; its ``dp`` too is of such models, replicas of a dense one
    are worlds of their own.

    >>> process_groups(Layout(tp=2, pp=2))["pp"]
    ((0, 2), (1, 3))
    >>> process_groups(Layout(tp=2, replicas=2))["tp"]
    ((0, 1), (2, 3))

    Raises:
        ValueError: unknown framework, or a combination that the engine refuses.

    Source: ``FRAMEWORKS[framework].source``.
    """
    return dict(_groups(layout, framework, order))


@lru_cache(maxsize=4)
def _groups(layout: Layout, framework: str, order: str | None) -> Mapping[str, Groups]:
    check_layout(layout, framework, order=order)
    return FRAMEWORKS[framework].groups(layout, all_ranks(world_size(layout, framework)), order)
