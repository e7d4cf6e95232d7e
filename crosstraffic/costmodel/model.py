"""The fitted model as a value and as model.json. JSON Schema: docs/schemas/model.schema.json."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from crosstraffic.errors import UsageError
from crosstraffic.patterns.step import Step, step_from_dict
from crosstraffic.patterns.stream import Stream, stream_from_dict
from crosstraffic.results.record import Cadence

MODEL_SCHEMA_VERSION = 1


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Link(_Value):
    """One kind of link; ``measured`` is False where it never held a stream back, so that only a bound is known."""

    bandwidth_bytes_per_s: float = Field(gt=0)
    measured: bool
    num_points: int


class Family(_Value):
    """How a family of streams (op, groups, how they lie) differs from what the links say; 1 is not at all."""

    latency_scale: float = Field(gt=0)
    transfer_scale: float = Field(gt=0)
    num_points: int


class Curve(_Value):
    """Where one stream was measured alone, and what the formula leaves over there."""

    family: str
    payload_bytes: tuple[int, ...]  # distinct sizes
    residual_log: tuple[float, ...]  # median of ln(measured / formula) over the visits of a size
    deviation_log: tuple[float, ...]  # of one visit, from its samples; larger where the neighbours contradict it
    num_visits: tuple[int, ...]
    min_payload_bytes: int
    max_payload_bytes: int


class Solo(_Value):
    """Times alone of one cadence."""

    latency_s: dict[str, float]  # one dependent step, by tier (intra, inter)
    links: dict[str, Link]  # those of port, intra, inter, nic, host that the machine turned out to have
    families: dict[str, Family]
    curves: dict[str, Curve]  # by stream
    amplitude_log: float
    length_octaves: float
    noise_log: float
    deviations_90: float  # how many deviations hold 90 % of left-out points
    formula_error_log: float  # median |ln(measured / formula)|, residual left out
    refused: dict[str, str] = Field(default_factory=dict)  # streams that were not fitted, and why


class Contention(_Value):
    """Factors of sharing, fitted from 2-way runs only. The plain fluid answer has every one at its default."""

    host_intensity: dict[str, float] = Field(default_factory=dict)  # share of its hosts' capacity a stream uses alone
    weight: dict[str, float] = Field(default_factory=dict)  # pull on a shared resource, by stream
    message_exponent: float = 0.0  # weight also grows with (bytes per dependent step) ** this
    thread_intensity: float = 0.0  # share of a rank's thread that a call uses
    crowding: float = 0.0  # capacity lost on a host or thread by each further stream that is active
    num_points: int = 0
    pair_error_log: dict[str, float] = Field(default_factory=dict)  # by mode: 90 % of |ln(measured / predicted)|


class Noise(_Value):
    """|ln ratio| between repeated visits of one point."""

    median_ape: float | None
    p90_ape: float | None
    num_points: int


class Model(_Value):
    """A fitted model: predicts from nothing but itself."""

    schema_version: Literal[1] = 1
    crosstraffic: str
    run_ids: tuple[str, ...]
    transport: str
    nodes: tuple[int, ...]  # node of each rank
    streams: tuple[dict[str, Any], ...]
    steps: tuple[dict[str, Any], ...] = ()
    aliases: dict[str, str] = Field(default_factory=dict)
    solo: dict[Cadence, Solo]
    contention: Contention = Contention()
    noise: Noise
    notes: tuple[str, ...] = ()
    _streams: dict[str, Stream] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Make the streams ready."""
        self._streams.update({data["name"]: stream_from_dict(data) for data in self.streams})

    def stream(self, name: str) -> Stream:
        """Return a stream by name; one that was measured under another name is known too.

        Raises:
            ValueError: no such stream.
        """
        if name in self._streams:
            return self._streams[name]
        if self.aliases.get(name) in self._streams:
            return self._streams[self.aliases[name]]
        raise ValueError(f"unknown stream: {name!r}; known: {', '.join([*self._streams, *self.aliases])}")

    def measured_name(self, name: str) -> str:
        """Return the name under which a stream's communication was measured."""
        return self.aliases.get(name, name)

    def real_bytes(self, name: str) -> int:
        """Return the bytes of one call of a stream by name; of one measured under another name, as its step calls it.

        Raises:
            ValueError: no such stream, or no step calls it.
        """
        if name in self._streams or name not in self.aliases:
            return self.stream(name).payload_bytes
        phase, _, called = name.partition(".")
        for data in self.steps:
            step = step_from_dict(data)
            for task in (task for lane in step.lanes for block in lane for task in block.tasks):
                if step.phase == phase and task.called == called:
                    return task.payload_bytes
        raise ValueError(f"the size of {name} is not known, no step calls it: give it as {name}=64KiB")

    def step(self, name: str) -> Step:
        """Return a step by name.

        Raises:
            ValueError: no such step.
        """
        for data in self.steps:
            if data["name"] == name:
                return step_from_dict(data)
        known = ", ".join(str(data["name"]) for data in self.steps) or "none"
        raise ValueError(f"unknown step: {name!r}; known: {known}")


def save(model: Model, path: Path | str) -> Path:
    """Write model.json; return its path."""
    target = Path(path)
    target.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return target


def load(path: Path | str) -> Model:
    """Read a model.json.

    Raises:
        UsageError: not there, or not a model of this schema version.
    """
    try:
        return Model.model_validate_json(Path(path).read_bytes())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise UsageError(f"no model file: {path}; make one with `crosstraffic fit DIR`") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{path} is not a model of schema version {MODEL_SCHEMA_VERSION}: {where}: {first['msg']}"
        ) from error


@lru_cache(maxsize=1)
def schema_text() -> str:
    """Return the JSON Schema of model.json as text."""
    schema = Model.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"
