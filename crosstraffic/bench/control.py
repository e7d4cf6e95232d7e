"""How the guards of a run talk: one TCP connection from each to the guard of rank 0, one JSON object a line.

It works before any transport does, and goes on when one hangs. Nothing that comes in is more than data: a message can
at most end the run.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from crosstraffic.bench.ranks import RankIdentity, first_host

MAX_LINE = 65536
NUM_PORTS = 8  # tried in turn: one may be taken
FIRST_PORT, PORT_RANGE = 10000, 9984
BACKLOG = 4096
SEND_WITHIN_S = 1.0
CONNECT_WITHIN_S = 1.0

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the guard of rank 0 listens, and what tells this launch from others that use the machine."""

    host: str
    ports: tuple[int, ...]
    key: str


def meeting(environment: Mapping[str, str], identity: RankIdentity) -> Meeting | None:
    """Return where guards meet: at the first node of a Slurm step, or at torchrun's master; None where none is known.

    >>> srun = RankIdentity(rank=1, world_size=2, local_rank=0, launcher="srun", meeting_point=None)
    >>> meeting({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[03-05]"}, srun).host
    'n03'
    """
    if identity.launcher == "srun" and "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
        job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "0")
        if not nodes or not _is_number(job) or not _is_number(step):
            return None
        return Meeting(host=first_host(nodes), ports=_ports(int(job) * 5 + int(step)), key=f"slurm {job}.{step}")
    if identity.launcher == "torchrun" and _is_number(environment.get("MASTER_PORT", "")):
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        run = environment.get("TORCHELASTIC_RUN_ID", "")
        return Meeting(host=host, ports=_ports(port), key=f"torchrun {host}:{port} {run}")
    return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _ports(number: int) -> tuple[int, ...]:
    first = FIRST_PORT + number * NUM_PORTS % PORT_RANGE
    return tuple(range(first, first + NUM_PORTS))


class Line:
    """One end of a connection. Whatever goes wrong with it closes it: ``is_open`` tells."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_WITHIN_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._rest, self.is_open = connection, b"", True

    def fileno(self) -> int:
        return self._socket.fileno()

    def say(self, message: Message) -> None:
        """Send a message; small ones do not block."""
        if self.is_open:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self.is_open = False

    def hear(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have come; call it when the connection is readable."""
        try:
            data = self._socket.recv(MAX_LINE)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self.is_open = False
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            self.is_open = False
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):  # no guard of ours
                self.is_open = False
                return
            yield message

    def next_message(self, within_s: float) -> dict[str, Any]:
        """Wait for one message and return it; an empty one where none comes."""
        found: dict[str, Any] = {}
        until = time.monotonic() + within_s
        while not found and self.is_open and (left_s := until - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            found = next(self.hear(), {})
        self._socket.settimeout(SEND_WITHIN_S)
        return found

    def close(self) -> None:
        self.is_open = False
        self._socket.close()


def listen(place: Meeting) -> socket.socket | None:
    """Listen on the first port that is free, for IPv6 too where this machine has it; None where none is free."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for port in place.ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    return None


def accept(listener: socket.socket) -> Line | None:
    """Take up one connection; None where whoever it was is gone already, or this process may open no more.

    The listener must not block: between becoming readable and being asked, a connection can vanish.
    """
    try:
        return Line(listener.accept()[0])
    except OSError:
        return None


def connect(place: Meeting, index: int) -> Line | None:
    """Try the ``index``-th port (they are tried in turn); None where nobody answers there."""
    port = place.ports[index % len(place.ports)]
    for address in addresses(place.host):
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_WITHIN_S)
            if connection.getsockname() == connection.getpeername():  # a free port among those given to clients
                connection.close()
                continue
            return Line(connection)
        except OSError:
            continue
    return None


def addresses(host: str) -> tuple[str, ...]:
    """Return the addresses of a name; none where it does not resolve (yet)."""
    try:
        return _resolved(host)
    except (OSError, UnicodeError):  # no name can be "..": IDNA says so in its own way
        return ()


@cache
def _resolved(host: str) -> tuple[str, ...]:
    """Look a name up. What was found is kept: thousands of guards ask again and again until rank 0 is there."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_here(host: str) -> bool:
    """Tell whether a name resolves to an address of this machine; False where it does not resolve."""
    for address in addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return True
    return False
