"""Byte matrices: who sends how many bytes to whom in one call, as small rules that are worked out when asked."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.int64]
TINY = 1e-9  # what floats of whole numbers may be off by


class ByteRule(Protocol):
    """What gives B[source][destination] of a group; a frozen value with a ``kind``."""

    @property
    def kind(self) -> str: ...

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        """Return bytes per call, ``[num_ranks, num_ranks]``, indices within the group."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Each rank sends ``num_bytes`` to the next one of its group; a group of one sends nothing."""

    num_bytes: int
    kind: str = "ring"

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        for source in range(num_ranks if num_ranks > 1 else 0):
            matrix[source, (source + 1) % num_ranks] = self.num_bytes
        return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Each rank but the last sends ``num_bytes`` to the next one: the boundaries of a pipeline."""

    num_bytes: int
    kind: str = "chain"

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        for source in range(num_ranks - 1):
            matrix[source, source + 1] = self.num_bytes
        return matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Explicit:
    """The matrix of each group written out, ``bytes[group][source][destination]``; one matrix may serve all groups."""

    bytes: tuple[tuple[tuple[int, ...], ...], ...]
    kind: str = "explicit"

    def __post_init__(self) -> None:
        for matrix in self.bytes:
            if any(len(row) != len(matrix) for row in matrix):
                raise ValueError("a byte matrix must be square")
            if any(cell < 0 for row in matrix for cell in row):
                raise ValueError("a byte matrix must not hold negative bytes")

    @property
    def by_group(self) -> bool:
        """Whether each group has a matrix of its own."""
        return len(self.bytes) > 1

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        rows = self.bytes[group_index if len(self.bytes) > 1 else 0]
        if len(rows) != num_ranks:
            raise ValueError(f"a byte matrix of {len(rows)} ranks does not fit a group of {num_ranks}")
        return np.array(rows, dtype=np.int64).reshape(num_ranks, num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Only who sends anything, ``cells[group]`` of (source, destination, bytes); one list may serve all groups."""

    cells: tuple[tuple[tuple[int, int, int], ...], ...]
    kind: str = "sparse"

    def __post_init__(self) -> None:
        if any(min(cell) < 0 for cells in self.cells for cell in cells):
            raise ValueError("a cell of a byte matrix is (source, destination, bytes), none negative")

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        cells = self.cells[group_index if self.by_group else 0]
        if any(max(cell[:2]) >= num_ranks for cell in cells):
            raise ValueError(f"a byte matrix with ranks over {num_ranks - 1} does not fit a group of {num_ranks}")
        matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
        if cells:
            source, destination, num_bytes = np.array(cells, dtype=np.int64).T
            np.add.at(matrix, (source, destination), num_bytes)
        return matrix

    @property
    def by_group(self) -> bool:
        """Tell whether each group has cells of its own."""
        return len(self.cells) > 1


def groups_differ(rule: ByteRule) -> bool:
    """Tell whether groups of the same size may have different matrices: a rule says so by ``by_group``."""
    return bool(getattr(rule, "by_group", False))


def round_rows(exact: npt.NDArray[np.float64]) -> Matrix:
    """Return whole counts near ``exact``, ``[num_rows, n]``: each cell rounded up or down, rows and columns in balance.

    A row sums to its own sum, or that rounded up or down so that all rows together are right; columns sum to theirs
    within one. What a row cannot give in whole counts is carried to the next one; equal claims go to the column that
    comes first after the row's own index, so that equal cells give a circulant matrix.

    >>> round_rows(np.full((4, 4), 0.5)).tolist()
    [[1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]
    """
    matrix = np.floor(exact + TINY).astype(np.int64)
    fraction = np.maximum(exact - matrix, 0.0)
    fraction[fraction <= TINY] = 0.0
    left = exact.sum(axis=1) - matrix.sum(axis=1)
    if left.max(initial=0.0) <= TINY:
        return matrix
    num_columns = exact.shape[1]
    owed, carry, none = np.zeros(num_columns), 0.0, fraction == 0
    turn = np.tile(np.arange(num_columns, dtype=np.float64), 2)
    for row in range(len(matrix)):
        owed += fraction[row]
        carry += float(left[row])
        extra = math.floor(carry + 0.5 + TINY)
        if extra <= 0:
            continue
        first = num_columns - row % num_columns
        claim = np.rint(owed / -TINY) * num_columns + turn[first : first + num_columns]
        claim[none[row]] = np.inf
        chosen = np.argpartition(claim, extra - 1)[:extra]
        matrix[row, chosen] += 1
        owed[chosen] -= 1
        carry -= extra
    return matrix


def scale_matrix(matrix: Matrix, payload_bytes: int, new_payload_bytes: int) -> Matrix:
    """Scale a matrix from one size to another; zeros stay zero, cells round down, the largest row sums to the new size.

    Raises:
        ValueError: nothing to scale (payload 0) but bytes are asked for.
    """
    if payload_bytes <= 0:
        if new_payload_bytes:
            raise ValueError(f"a stream of 0 bytes cannot be scaled to {new_payload_bytes} bytes")
        return np.zeros_like(matrix)
    scaled = (matrix.astype(object) * new_payload_bytes // payload_bytes).astype(np.int64)
    largest = int(matrix.sum(axis=1).argmax())
    if int(matrix[largest].sum()) == payload_bytes:
        row = scaled[largest]
        order = np.argsort(-matrix[largest], kind="stable")[: int((matrix[largest] > 0).sum())]
        for cell in order[: new_payload_bytes - int(row.sum())]:
            row[cell] += 1
    return scaled


def _rules() -> Mapping[str, type]:
    from crosstraffic.patterns.routing import Routed  # routing builds on this module

    return {"ring": Ring, "chain": Chain, "explicit": Explicit, "sparse": Sparse, "routed": Routed}


def rule_to_dict(rule: ByteRule) -> dict[str, Any]:
    """Turn a rule into JSON types."""
    return asdict(rule)  # type: ignore[call-overload, no-any-return]


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def rule_from_dict(data: Mapping[str, Any]) -> ByteRule:
    """Read back what ``rule_to_dict`` wrote.

    Raises:
        ValueError: an unknown kind or a wrong field.
    """
    rules = _rules()
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in rules:
        raise ValueError(f"unknown byte rule: {kind!r}; allowed: {', '.join(rules)}")
    try:
        rule: ByteRule = rules[kind](**{key: _tuples(value) for key, value in data.items()})
    except TypeError as error:
        raise ValueError(f"not a byte rule of kind {kind!r}: {error}") from error
    return rule
