"""Sizes, times and rates: SI inside, readable outside. KiB and MiB are powers of two, GB/s is 10^9 B/s."""

import re

_BYTE_FACTORS = {
    "": 1,
    "B": 1,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


MAX_BYTES = 2**60  # 1 EiB: more is a slip of the pen, and overflows the byte matrices


def parse_bytes(text: str | int) -> int:
    """Read a size: ``4096``, ``64KiB``, ``1.5MiB``, ``80GB``; a bare K, M, G or T is binary.

    >>> parse_bytes("64KiB"), parse_bytes("80GB"), parse_bytes("4K")
    (65536, 80000000000, 4096)

    Raises:
        ValueError: not a size, or not a whole number of bytes.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ValueError(f"not a size: {text!r}; write bytes as 4096, 64KiB, 1.5MiB or 80GB")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size must not be negative: {text}")
        if text > MAX_BYTES:
            raise ValueError(f"a size must not be over {MAX_BYTES} bytes: {text}")
        return text
    match = _SIZE.match(text)
    factor = _BYTE_FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"not a size: {text!r}; write bytes as 4096, 64KiB, 1.5MiB or 80GB")
    size = float(match.group(1)) * factor
    if size > MAX_BYTES:
        raise ValueError(f"a size must not be over {MAX_BYTES} bytes: {text!r}")
    if size != int(size):
        raise ValueError(f"not a whole number of bytes: {text!r}")
    return int(size)


def format_bytes(num_bytes: float) -> str:
    """Write a size with a binary prefix.

    >>> format_bytes(1536), format_bytes(1023), format_bytes(2**20)
    ('1.5 KiB', '1023 B', '1 MiB')
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def format_seconds(time_s: float) -> str:
    """Write a time with three significant digits.

    >>> format_seconds(0.00012345), format_seconds(2.5)
    ('123 µs', '2.5 s')
    """
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(time_s) * factor >= 1 or (unit == "µs" and time_s != 0):
            return f"{time_s * factor:.3g} {unit}"
    return "0 s"


def format_rate(bytes_per_s: float) -> str:
    """Write a rate in decimal units.

    >>> format_rate(1.25e9), format_rate(3.2e6)
    ('1.25 GB/s', '3.2 MB/s')
    """
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if abs(bytes_per_s) >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"
