"""Stream: one named repeating communication, the value that everything else passes around."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.matrix import ByteRule, rule_from_dict, rule_to_dict, scale_matrix

Op = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_v",
    "send_recv",
    "broadcast",
    "kv_transfer",
]
Phase = Literal["prefill", "decode", "handoff"]
Role = Literal["data", "control"]
OPS: tuple[str, ...] = get_args(Op)
MATRIX_OPS = frozenset({"all_to_all_v", "send_recv", "kv_transfer"})
POINT_TO_POINT_OPS = frozenset({"send_recv", "kv_transfer"})  # a rank with nothing to move has no part in a call
MAX_PAYLOAD_BYTES = 2**55  # sums over a group stay within 64 bits
ELEMENT_BYTES = 4  # payloads of reducing collectives are whole elements of this size on every transport


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One repeating communication of one parallelism.

    ``payload_bytes`` follows nccl-tests' size S for the op: all_reduce the buffer; all_gather and reduce_scatter the
    total; all_to_all, and every op with a byte matrix, the most that one rank sends in one call, itself included;
    broadcast the buffer. It is per call and per group.

    ``rule`` gives the byte matrix B[source][destination] of a group for ops in ``MATRIX_OPS`` (indices within the
    group), at ``payload_bytes``; other ops have none.

    ``role`` control marks the small messages of a scheduler (counts, batch sizes, token ids), often on the host.
    """

    name: str
    pattern: str
    op: Op
    phase: Phase
    groups: tuple[tuple[int, ...], ...]
    payload_bytes: int
    calls_per_step: int
    dtype: str
    formula: str
    source: str
    rule: ByteRule | None = None
    after: tuple[str, ...] = ()
    role: Role = "data"

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"unknown op: {self.op!r}; allowed: {', '.join(OPS)}")
        if (self.op in MATRIX_OPS) != (self.rule is not None):
            raise ValueError(f"{self.name}: op {self.op} {'needs' if self.op in MATRIX_OPS else 'takes no'} byte rule")
        if not 0 <= self.payload_bytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"{self.name}: payload_bytes must be from 0 to {MAX_PAYLOAD_BYTES}: {self.payload_bytes}")
        if self.calls_per_step < 0:
            raise ValueError(f"{self.name}: calls_per_step must not be negative: {self.calls_per_step}")
        if not self.groups or not all(self.groups):
            raise ValueError(f"{self.name}: a stream needs at least one group, each with at least one rank")
        if len(set(chain.from_iterable(self.groups))) != sum(map(len, self.groups)):
            (rank, _), *_ = Counter(chain.from_iterable(self.groups)).most_common(1)
            raise ValueError(f"{self.name}: a rank is in two groups of one stream, or twice in one: rank {rank}")

    @property
    def group_size(self) -> int:
        """Ranks of the largest group."""
        return max(map(len, self.groups))

    def matrix(self, group_index: int = 0, payload_bytes: int | None = None) -> npt.NDArray[np.int64]:
        """Return B[source][destination] in bytes of one group, ``[n, n]``, scaled to ``payload_bytes`` if given."""
        if self.rule is None:
            raise ValueError(f"{self.name}: {self.op} has no byte matrix")
        matrix = self.rule.matrix(len(self.groups[group_index]), group_index)
        if payload_bytes is None or payload_bytes == self.payload_bytes:
            return matrix
        return scale_matrix(matrix, self.payload_bytes, payload_bytes)

    def same_communication(self, other: "Stream") -> bool:
        """Tell whether both put the same bytes between the same ranks, up to scale: one measurement serves both."""
        if (self.op, self.groups) != (other.op, other.groups):
            return False
        if self.rule is None or other.rule is None or self.rule == other.rule:
            return True
        for index in range(len(self.groups)):
            ours, theirs = self.matrix(index).astype(float), other.matrix(index).astype(float)
            if not np.allclose(ours / max(self.payload_bytes, 1), theirs / max(other.payload_bytes, 1), atol=1e-6):
                return False
        return True


def round_payload(op: str, payload_bytes: int, group_size: int) -> int:
    """Round a size up to what the op can carry: whole elements, equal shares for each rank.

    >>> round_payload("all_reduce", 5, 3), round_payload("all_gather", 100, 3), round_payload("all_to_all_v", 5, 3)
    (8, 108, 5)
    """
    if op in MATRIX_OPS:
        return payload_bytes
    unit = ELEMENT_BYTES if op in ("all_reduce", "broadcast") else ELEMENT_BYTES * group_size
    return -(-payload_bytes // unit) * unit


def stream_to_dict(stream: Stream) -> dict[str, Any]:
    """Turn a stream into JSON types; the usual role, data, is left out."""
    fields: dict[str, Any] = {
        "name": stream.name,
        "pattern": stream.pattern,
        "op": stream.op,
        "phase": stream.phase,
        "groups": [list(group) for group in stream.groups],
        "payload_bytes": stream.payload_bytes,
        "calls_per_step": stream.calls_per_step,
        "dtype": stream.dtype,
        "formula": stream.formula,
        "source": stream.source,
        "rule": None if stream.rule is None else rule_to_dict(stream.rule),
        "after": list(stream.after),
    }
    return fields if stream.role == "data" else {**fields, "role": stream.role}


def stream_from_dict(data: Mapping[str, Any]) -> Stream:
    """Read back what ``stream_to_dict`` wrote.

    Raises:
        ValueError: a field is missing or wrong.
    """
    try:
        fields = dict(data)
        fields["groups"] = tuple(tuple(int(rank) for rank in group) for group in fields["groups"])
        fields["after"] = tuple(fields.get("after", ()))
        fields["rule"] = None if fields.get("rule") is None else rule_from_dict(fields["rule"])
        return Stream(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a stream: {error}") from error
