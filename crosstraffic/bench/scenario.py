"""Scenario file: what to measure, as TOML."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from crosstraffic.errors import UsageError
from crosstraffic.patterns.stream import Op
from crosstraffic.units import parse_bytes

BUILT_IN = Path(__file__).parent / "scenarios"
Size = Annotated[int, BeforeValidator(parse_bytes), Field(ge=1)]
Group = Annotated[tuple[int, ...], Field(min_length=1)]


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PhaseSpec(_Spec):
    """A prefill or decode phase laid over all ranks of the run; what is not named here is as in ``Workload``.

    ``control`` adds the scheduler's small messages (counts, batch sizes, token ids) to the streams that are measured.
    """

    layout: str
    framework: str | None = None
    control: bool = False
    batch: int = Field(default=1, ge=1)
    context: int = Field(default=4096, ge=1)
    cached_tokens: int = Field(default=0, ge=0)
    tokens: int | None = Field(default=None, ge=1)
    replica_tokens: tuple[int, ...] = ()
    padded: bool = False
    num_speculative: int = Field(default=0, ge=0)
    num_micro_batches: int = Field(default=1, ge=1)
    dtype: str | None = None
    kv_dtype: str | None = None
    ranks_per_node: int = Field(default=8, ge=1)
    routing: str = "uniform"
    routing_parameter: float = 0.0
    sequence_parallel: bool = False
    quantized_all_reduce: str | None = None
    context_style: Literal["ring", "all_gather", "ulysses", "ulysses_ring", "pass_q"] | None = None
    ulysses_ranks: int | None = Field(default=None, ge=1)
    dcp_backend: str = "ag_rs"
    expert_backend: str | None = None
    redundant_experts: int = Field(default=0, ge=0)
    two_batch: bool = False
    virtual_stages: int = Field(default=1, ge=1)
    layer_partition: tuple[int, ...] = ()
    model_runner: str | None = None


class HandoffSpec(_Spec):
    """KV of finished prompts moving from some ranks (prefill pool) to others (decode pool)."""

    prefill_layout: str
    decode_layout: str
    prefill_ranks: tuple[int, ...]
    decode_ranks: tuple[int, ...]
    framework: str | None = None
    batch: int = Field(default=1, ge=1)
    context: int = Field(default=4096, ge=1)
    kv_dtype: str | None = None
    block_tokens: int = Field(default=16, ge=1)
    kv_connector: str | None = None
    kv_schedule: str | None = None
    kv_direction: str | None = None
    chunk_tokens: int = Field(default=8192, ge=1)
    prefill_instances: int = Field(default=1, ge=1)
    decode_instances: int = Field(default=1, ge=1)
    beside_decode: bool = True
    pools_may_share_nodes: bool = False


class RoutingSpec(_Spec):
    """Bytes of an all_to_all_v worked out by a routing distribution."""

    distribution: str
    parameter: float = 0.0
    num_experts: int = Field(default=64, ge=1)
    top_k: int = Field(default=4, ge=1)


Cadence = Literal["isolated", "streaming"]


class StreamSpec(_Spec):
    """A stream written out by hand; ``groups = "world"`` is one group of all ranks.

    ``points`` lists the (size, cadence) at which it is measured alone, each twice, in place of the sweep of all.
    """

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9_.:-]+$")
    op: Op
    payload: Size
    groups: Literal["world"] | Annotated[tuple[Group, ...], Field(min_length=1)] = "world"
    pattern: str = "custom"
    matrix: Literal["ring", "chain", "halves"] | RoutingSpec | tuple[tuple[int, ...], ...] | None = None
    points: Annotated[tuple[tuple[Size, Cadence], ...], Field(min_length=1)] | None = None


class MeasureSpec(_Spec):
    """How much to measure."""

    sizes: Annotated[tuple[Size, ...], Field(min_length=1)] | None = None
    num_sizes: int = Field(default=13, ge=1)
    min_size: Size = 64
    max_size: Size = 2**24
    cadences: tuple[Cadence, ...] = Field(default=("isolated", "streaming"), min_length=1)
    together: Literal["pairs", "none"] | tuple[tuple[str, ...], ...] = "pairs"
    triples: Annotated[int, Field(ge=0)] | tuple[tuple[str, str, str], ...] = 1
    modes: tuple[Literal["steady", "one_shot"], ...] = Field(default=("steady", "one_shot"), min_length=1)
    steps: bool = True
    target: float = Field(default=0.04, gt=0, lt=1)
    max_calls: int = Field(default=300, ge=8)
    budget_s: float = Field(default=110.0, gt=0, allow_inf_nan=False)
    seed: int = Field(default=1, ge=0)
    verify: bool = True

    @model_validator(mode="after")
    def _sizes_ascend(self) -> Self:
        if self.min_size > self.max_size:
            raise ValueError(f"min_size must not be over max_size: {self.min_size} bytes over {self.max_size} bytes")
        return self


class ScenarioFile(_Spec):
    """One scenario as written in TOML; ``name`` also names the run folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    ranks: int | None = Field(default=None, ge=1)
    model: str | None = None
    framework: str = "vllm"
    prefill: PhaseSpec | None = None
    decode: PhaseSpec | None = None
    handoff: HandoffSpec | None = None
    stream: tuple[StreamSpec, ...] = ()
    measure: MeasureSpec = MeasureSpec()
    simulated: Mapping[str, Any] | None = None


TABLES: Mapping[str, type[_Spec]] = {
    "prefill": PhaseSpec,
    "decode": PhaseSpec,
    "handoff": HandoffSpec,
    "stream": StreamSpec,
    "measure": MeasureSpec,
}


def read_scenario(name_or_path: str) -> ScenarioFile:
    """Read a built-in scenario by name, or a TOML file by path; files that it names may lie beside it.

    Raises:
        UsageError: no such scenario, or a field is unknown or wrong.
    """
    path = Path(name_or_path)
    if not path.suffix:
        path = BUILT_IN / f"{name_or_path}.toml"
    if not path.is_file():
        names = ", ".join(sorted(entry.stem for entry in BUILT_IN.glob("*.toml")))
        raise UsageError(f"no such scenario: {name_or_path!r}; give a path to a .toml file or one of: {names}")
    try:
        file = ScenarioFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"scenario {name_or_path} is not valid TOML: {error}") from error
    except ValidationError as error:
        raise UsageError(f"scenario {name_or_path}: {'; '.join(map(_told, error.errors()))}") from error
    return _beside(file, path.parent)


def _beside(file: ScenarioFile, folder: Path) -> ScenarioFile:
    """Turn the files that a scenario names, where they lie in its folder, into paths from here."""
    changed: dict[str, Any] = {}
    if file.model is not None and (folder / file.model).is_file():
        changed["model"] = str(folder / file.model)
    for name in ("prefill", "decode"):
        spec = getattr(file, name)
        kind, colon, place = spec.routing.partition(":") if spec is not None else ("", "", "")
        if colon and (folder / place.partition("#")[0]).is_file():
            changed[name] = spec.model_copy(update={"routing": f"{kind}:{folder / place}"})
    return file.model_copy(update=changed)


def _told(item: Any) -> str:
    """Say what is wrong with one field, and which keys there are where a key is not known."""
    place = [str(part) for part in item["loc"]]
    if item["type"] == "extra_forbidden":
        table = TABLES.get(place[0], ScenarioFile) if len(place) > 1 else ScenarioFile
        return f"unknown key: {'.'.join(place)}; allowed: {', '.join(table.model_fields)}"
    return f"{'.'.join(place)}: {item['msg']} (found {item['input']!r:.60})"


def default_scenario(num_ranks: int) -> ScenarioFile:
    """Return the shipped model scenario for this number of ranks, or plain collectives where no layout fits it."""
    name = f"default-{num_ranks}"
    return read_scenario(name if (BUILT_IN / f"{name}.toml").is_file() else "collectives")
