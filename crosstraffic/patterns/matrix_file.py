"""Files of explicit traffic: byte matrices as nccl-tests and kvbench write them, and recorded counts of experts.

A table has one row a line, cells apart by blanks or commas; ``#`` starts a comment. JSON lists are read as well.
"""

import json
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30}
MAX_CELL = 2**55  # as a stream's payload
PLAIN_DIGITS = 16  # of a number that is below MAX_CELL for sure
Cells = tuple[tuple[str, ...], ...]


def read_matrix(path: str | Path) -> tuple[tuple[int, ...], ...]:
    """Read bytes ``[source][destination]`` of one call: whole numbers, or with a suffix B, K, M, G (powers of 1024).

    Cells are cut to whole bytes, as both tools do (nccl-tests cuts further, to multiples of 16 bytes).

    Raises:
        ValueError: the file cannot be read or is empty, the matrix is not square or all zero, or a cell is no size.

    Source: nccl-tests src/alltoallv.cu NCCL_TESTS_ALLTOALLV_MATRIX_FILE; nixl @ 8770b655 benchmark/kvbench/main.py
    load_matrix, parse_size.
    """
    rows, lines = _read_table(path)
    matrix = tuple(
        tuple(_bytes(cell, f"{path}, line {line}, cell {index}") for index, cell in enumerate(row, start=1))
        for line, row in zip(lines, rows, strict=True)
    )
    for line, row in zip(lines, matrix, strict=True):
        if len(row) != len(matrix):
            raise ValueError(
                f"{path}, line {line}: a byte matrix must be square: {len(row)} cells in a matrix of {len(matrix)} rows"
            )
    if not any(map(any, matrix)):
        raise ValueError(f"{path}: a byte matrix must have some cell above 0: all are 0")
    return matrix


def read_counts(path: str | Path, layer: int | None = None) -> tuple[float, ...]:
    """Read recorded tokens per expert, ``[num_experts]``: one row or column, or a row for each layer.

    Rows of layers are added up, or row ``layer`` (from 0) is taken; adding up hides that hot experts differ by layer.

    Raises:
        ValueError: the file cannot be read or is empty, rows differ in length, the layer is not there, or a cell is no
            count.
    """
    rows, lines = _read_table(path)
    table = [
        [_count(cell, f"{path}, line {line}, cell {index}") for index, cell in enumerate(row, start=1)]
        for line, row in zip(lines, rows, strict=True)
    ]
    for line, row in zip(lines, table, strict=True):
        if len(row) != len(table[0]):
            raise ValueError(f"{path}, line {line}: {len(row)} counts, the first row has {len(table[0])}")
    if len(table[0]) == 1:
        table = [[row[0] for row in table]]
    if layer is not None and not 0 <= layer < len(table):
        raise ValueError(f"{path}: there is no layer {layer}; allowed: 0 to {len(table) - 1}")
    chosen = table if layer is None else [table[layer]]
    counts = tuple(map(sum, zip(*chosen, strict=True)))
    if not any(counts):
        raise ValueError(f"{path}: some expert must have a count above 0: all are 0")
    return counts


def _read_table(path: str | Path) -> tuple[Cells, tuple[int, ...]]:
    """Return the rows of a file and the line of each (of JSON: its place in the list, from 1)."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if text.lstrip().startswith(("[", "{")):
        return _json_table(path, text)
    rows = [
        (tuple(line.split("#", maxsplit=1)[0].replace(",", " ").split()), number)
        for number, line in enumerate(text.splitlines(), start=1)
    ]
    filled = [(row, number) for row, number in rows if row]
    if not filled:
        raise ValueError(f"{path}: empty: no numbers in it")
    return tuple(row for row, _ in filled), tuple(number for _, number in filled)


def _json_table(path: str | Path, text: str) -> tuple[Cells, tuple[int, ...]]:
    try:
        data: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: not readable JSON: {error}") from error
    if not isinstance(data, list) or not data:
        raise ValueError(f"{path}: must hold a list of numbers, or of lists of numbers, not empty")
    rows = data if isinstance(data[0], list) else [data]
    if not all(isinstance(row, list) and row for row in rows):
        raise ValueError(f"{path}: must hold a list of numbers, or of lists of numbers, none empty")
    cells = tuple(tuple(cell if isinstance(cell, str) else json.dumps(cell) for cell in row) for row in rows)
    return cells, tuple(range(1, len(rows) + 1))


def _number(text: str, place: str, what: str) -> Decimal | int:
    if len(text) <= PLAIN_DIGITS and text.isascii() and text.isdigit():
        return int(text)
    try:
        value = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{place}: not a number: {text!r}; allowed: {what}") from error
    if not value.is_finite() or value < 0:
        raise ValueError(f"{place}: must be a finite number, not negative: {text!r}; allowed: {what}")
    if value > MAX_CELL:
        raise ValueError(f"{place}: too large: {text!r}; allowed: up to {MAX_CELL}")
    return value


def _bytes(text: str, place: str) -> int:
    suffix = text[-1:].lower()
    unit = UNITS.get(suffix, 1) if suffix.isalpha() else 1
    what = "bytes from 0, with or without a suffix B, K, M or G"
    if suffix.isalpha() and suffix not in UNITS:
        raise ValueError(f"{place}: unknown suffix or not a number: {text!r}; allowed: {what}")
    size = unit * _number(text[:-1] if suffix in UNITS else text, place, what)
    if 0 < size < 1:
        raise ValueError(f"{place}: a fraction of a byte: {text!r}; allowed: {what}")
    if size > MAX_CELL:
        raise ValueError(f"{place}: too large: {text!r}; allowed: up to {MAX_CELL} bytes")
    return int(size)


def _count(text: str, place: str) -> float:
    return float(_number(text, place, "counts from 0"))
