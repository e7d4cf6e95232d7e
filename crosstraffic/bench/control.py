"""How the guards of a run talk: one TCP connection from each to the guard of rank 0, one JSON object a line.

It works before any transport does, and goes on when one hangs. Nothing that comes in is more than data: a message can
at most end the run.
"""

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from crosstraffic.bench.ranks import RankIdentity, first_host

MAX_LINE = 65536
NUM_PORTS = 8  # tried in turn: one may be taken
FIRST_PORT, PORT_RANGE = 10000, 9984
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
        if not nodes or not job.isdigit() or not step.isdigit():
            return None
        return Meeting(host=first_host(nodes), ports=_ports(int(job) * 5 + int(step)), key=f"slurm {job}.{step}")
    if identity.launcher == "torchrun" and environment.get("MASTER_PORT", "").isdigit():
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        run = environment.get("TORCHELASTIC_RUN_ID", "")
        return Meeting(host=host, ports=_ports(port), key=f"torchrun {host}:{port} {run}")
    return None


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
        self._socket.settimeout(within_s)
        return next(self.hear(), {})

    def close(self) -> None:
        self.is_open = False
        self._socket.close()


def listen(place: Meeting) -> socket.socket | None:
    """Listen on the first port that is free; None where none is."""
    for port in place.ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), backlog=4096)
    return None


def connect(place: Meeting, index: int) -> Line | None:
    """Try the ``index``-th port (they are tried in turn); None where nobody answers there."""
    port = place.ports[index % len(place.ports)]
    try:
        return Line(socket.create_connection((place.host, port), timeout=CONNECT_WITHIN_S))
    except OSError:
        return None


def is_here(host: str) -> bool:
    """Tell whether a name resolves to an address of this machine; False where it does not resolve."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False
