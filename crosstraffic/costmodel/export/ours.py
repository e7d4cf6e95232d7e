"""crosstraffic.json: everything that a planner's own files have no room for. JSON Schema: docs/schemas.

It lies beside the files of every export, and is the whole export of planner ``ours``.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from crosstraffic.costmodel.export.files import PROVENANCE, Export
from crosstraffic.costmodel.export.known import Known, price
from crosstraffic.results.table import CURVE

EXPORT_SCHEMA_VERSION = 1
SKEW = "skew="


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Size(_Value):
    """One cell: the time of one call at one size."""

    payload_bytes: int = Field(ge=0, description="nccl-tests' convention of the op; ep_*: what a rank sends in total")
    time_s: float = Field(gt=0, description="median of the repeats where measured")
    low_s: float | None = Field(description="lower end of the 90 % interval of a new measurement")
    high_s: float | None = Field(description="upper end of the 90 % interval of a new measurement")
    source: Literal["measured", "model"]
    kind: str = Field(description="what had to be extrapolated: measured, size, range, group, layout")


class CellCurve(_Value):
    """Cells that differ in their size only."""

    op: str
    kernel: str
    dtype: str
    num_ranks: int = Field(ge=1)
    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=0)
    placement: str
    num_groups: int = Field(ge=1)
    issue: str
    cadence: str
    parameters: str
    skew: float | None = Field(description="largest load of a rank / mean load, of uneven all-to-alls")
    min_payload_bytes: int = Field(description="smallest measured size: below it times are extrapolated")
    max_payload_bytes: int = Field(description="largest measured size: above it times are extrapolated")
    cells: tuple[Size, ...]


class Written(_Value):
    """A number in a planner's file that has no column to say where it comes from."""

    file: str
    key: str
    value: float
    low: float | None
    high: float | None
    source: Literal["measured", "model"]
    kind: str


class Exported(_Value):
    """The whole file."""

    schema_version: Literal[1] = 1
    crosstraffic: str = Field(description="version that wrote this")
    planner: str
    system: str
    library: str
    curves: tuple[CellCurve, ...]
    left_out: dict[str, int] = Field(description="measured cells that the model does not trust, by reason")
    contention: dict[str, Any] | None = Field(description="factors of sharing (model.json), where runs told them")
    values: tuple[Written, ...]
    remarks: tuple[str, ...] = Field(description="what the planner's files cannot hold")
    notes: tuple[str, ...] = Field(description="of the fit and of the sources, copies of other tables included")


def to_ours(
    known: Known,
    planner: str,
    export: Export | None = None,
    *,
    crosstraffic: str,
    contention: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> Export:
    """Return crosstraffic.json: the measured cells with intervals, and what another export could not say."""
    priced = price(known, known.cells)
    curves = []
    for _, rows in priced.rows.groupby(list(CURVE), sort=False):
        ordered = rows.sort_values("payload_bytes")
        curve = {name: ordered[name].iloc[0] for name in CURVE}
        sizes = tuple(
            Size(
                payload_bytes=row["payload_bytes"],
                time_s=row["time_s"],
                low_s=_or_none(row["low_s"]),
                high_s=_or_none(row["high_s"]),
                source=row["source"],
                kind=row["kind"],
            )
            for row in ordered.to_dict("records")
        )
        curves.append(
            CellCurve(
                **curve,
                skew=_skew(str(curve["parameters"])),
                min_payload_bytes=sizes[0].payload_bytes,
                max_payload_bytes=sizes[-1].payload_bytes,
                cells=sizes,
            )
        )
    whole = Exported(
        crosstraffic=crosstraffic,
        planner=planner,
        system=known.system,
        library=known.library,
        curves=tuple(curves),
        left_out=dict(priced.left_out),
        contention=None if contention is None else dict(contention),
        values=tuple(
            Written.model_validate({name: None if value != value else value for name, value in row.items()})
            for row in (export.values if export else ())
        ),
        remarks=export.remarks if export else (),
        notes=tuple(notes),
    )
    return Export(files={PROVENANCE: (whole.model_dump_json(indent=1) + "\n").encode()}, remarks=priced.remarks)


def schema_text() -> str:
    """Return the JSON Schema of crosstraffic.json as text."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "crosstraffic/export.schema.json"}
    return json.dumps(head | Exported.model_json_schema(mode="serialization"), indent=2, ensure_ascii=False) + "\n"


def _skew(parameters: str) -> float | None:
    """Read the skew among the parameters of a curve.

    >>> _skew("experts=8,skew=2.5"), _skew("")
    (2.5, None)
    """
    found = [part.removeprefix(SKEW) for part in parameters.split(",") if part.startswith(SKEW)]
    return float(found[0]) if found else None


def _or_none(value: float) -> float | None:
    return value if value == value else None
