"""LabSpec: what a lab is to be: nodes, and the rate of each direction between them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MAX_NODES = 64
MIN_RATE, MAX_RATE = 10**5, 10**11
PACKET_BYTES, PACKET_DATA_BYTES = 1514, 1448  # Ethernet frame of 1500 bytes MTU; TCP with timestamps
_UNITS: Mapping[str, int] = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", re.ASCII)
_LIMIT = re.compile(r"(n\d+)(?:([-<>])(n\d+)?)?=(.+)", re.ASCII)


def parse_rate(text: str) -> int:
    """Read a rate as tc writes it, in bits per second.

    >>> parse_rate("200mbit"), parse_rate("1.5gbit")
    (200000000, 1500000000)

    Raises:
        ValueError: not a rate, or out of range.
    """
    match = _RATE.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"not a rate: {text!r}; write 200mbit, 1gbit or 500kbit")
    rate = round(float(match.group(1)) * _UNITS[match.group(2)])
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ValueError(f"a rate must be from 100kbit to 100gbit: {text!r}")
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A rate that differs from the lab's: what ``source`` sends to ``destination`` in total; None is everybody."""

    source: str | None
    destination: str | None
    rate_bits_per_s: int


def parse_limit(text: str) -> tuple[Limit, ...]:
    """Read an unequal link: ``n2=50mbit`` both directions of a node, ``n2>=50mbit`` what it sends, ``n2<=50mbit`` what
    it gets, ``n0-n3=50mbit`` a pair, ``n0>n3=50mbit`` one direction of a pair.

    >>> [(one.source, one.destination) for one in parse_limit("n0-n3=50mbit")]
    [('n0', 'n3'), ('n3', 'n0')]

    Raises:
        ValueError: not such a text, or not a rate.
    """
    match = _LIMIT.fullmatch(text.strip())
    if match is None or (match.group(2) == "-" and match.group(3) is None):
        raise ValueError(f"not a link: {text!r}; write n2=50mbit, n2>=50mbit, n2<=50mbit, n0-n3=50mbit or n0>n3=50mbit")
    node, sign, other, rate = match.groups()
    if node == other:
        raise ValueError(f"a link joins two nodes: {text!r}")
    bits = parse_rate(rate)
    pairs: Mapping[str | None, Sequence[tuple[str | None, str | None]]] = {
        None: ((node, None), (None, node)),
        ">": ((node, other),),
        "<": ((other, node),),
        "-": ((node, other), (other, node)),
    }
    return tuple(Limit(source=one, destination=two, rate_bits_per_s=bits) for one, two in pairs[sign])


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """Nodes n0, n1, ... on one switch; every node sends and receives at ``rate_bits_per_s`` unless ``limits`` say less.

    ``queue_s`` is the depth of the queue before each link: a deep one never drops, a shallow one makes TCP time out.
    """

    num_nodes: int
    rate_bits_per_s: int
    ranks_per_node: int = 2
    limits: tuple[Limit, ...] = ()
    queue_s: float = 0.1

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_NODES:
            raise ValueError(f"nodes must be from 1 to {MAX_NODES}: {self.num_nodes}")
        if not 1 <= self.ranks_per_node <= 64:
            raise ValueError(f"ranks per node must be from 1 to 64: {self.ranks_per_node}")
        if not 0.001 <= self.queue_s <= 1:
            raise ValueError(f"the queue must be from 0.001 s to 1 s deep: {self.queue_s}")
        for index, limit in enumerate(self.limits):
            ends = (limit.source, limit.destination)
            if ends in [(other.source, other.destination) for other in self.limits[:index]]:
                told = " to ".join(end or "all" for end in ends)
                raise ValueError(f"a link has one rate, this is a second one: {told} at {limit.rate_bits_per_s} bit/s")
            for node in (limit.source, limit.destination):
                if node is not None and node not in self.nodes:
                    raise ValueError(f"no such node: {node}; there are {self.nodes[0]} to {self.nodes[-1]}")
            if limit.rate_bits_per_s > self.rate_bits_per_s:
                raise ValueError(
                    f"a link may be slower than the lab's, not faster: {limit.rate_bits_per_s} bit/s "
                    f"over {self.rate_bits_per_s} bit/s"
                )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes."""
        return tuple(f"n{index}" for index in range(self.num_nodes))

    def rate(self, source: str | None, destination: str | None) -> int:
        """Return the rate of one direction, bits per second; None stands for everybody: the port of a node."""
        return min(
            (
                limit.rate_bits_per_s
                for limit in self.limits
                if limit.source in (None, source) and limit.destination in (None, destination)
            ),
            default=self.rate_bits_per_s,
        )

    def goodput_bytes_per_s(self, source: str, destination: str) -> float:
        """Return what one TCP connection can carry: the rate less headers.

        >>> round(LabSpec(num_nodes=2, rate_bits_per_s=200_000_000).goodput_bytes_per_s("n0", "n1") / 1e6, 2)
        23.91
        """
        return self.rate(source, destination) / 8 * PACKET_DATA_BYTES / PACKET_BYTES


def spec_to_dict(spec: LabSpec) -> dict[str, Any]:
    """Turn a spec into JSON types."""
    return asdict(spec)


def spec_from_dict(data: Mapping[str, Any]) -> LabSpec:
    """Read back what ``spec_to_dict`` wrote.

    Raises:
        ValueError: a field is missing or wrong.
    """
    try:
        return LabSpec(**{**data, "limits": tuple(Limit(**limit) for limit in data["limits"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a lab: {error}") from error
