"""Find out which ranks came, before any transport is opened: it would wait for those that do not.

Ranks meet in a folder that all of them see (ranks of one machine), or at a port of the first node, over plain TCP. The
port is that of the transport's own meeting point, and free again when the call ends. What comes in is JSON, of bounded
size and read in bounded time; anything else is a stranger and left aside.
"""

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from crosstraffic.errors import EnvironmentRefused

_HEAD = struct.Struct("!8sI")  # a word that strangers do not know, length of what follows
_MAGIC = b"ctroll01"
_MAX_BYTES = 2**24
_READ_S = 5.0  # one message of one rank
_PAUSE_S = 0.05
ANSWER_WITHIN_S = 15.0  # how much longer than the leader a rank waits

Decide = Callable[[Sequence[bytes]], bytes]


def lead(place: str, world_size: int, mine: bytes, limit_s: float, decide: Decide) -> bytes:
    """Collect what every rank says within ``limit_s``, as rank 0; return the answer that every rank gets.

    ``decide`` makes it of all that was said, this rank's own words first.

    Raises:
        EnvironmentRefused: the port is taken by another program.
    """
    url = urlsplit(place)
    end_s = time.monotonic() + limit_s
    if url.scheme == "file":
        return _lead_in_folder(Path(url.path), world_size, mine, end_s, decide)
    return _lead_over_tcp(_port(place), world_size, mine, end_s, decide)


def attend(place: str, rank: int, mine: bytes, limit_s: float) -> bytes:
    """Say what this rank has to say, as any other rank; return rank 0's answer.

    Raises:
        EnvironmentRefused: rank 0 cannot be reached, or does not answer, within ``limit_s`` and a little more.
    """
    url = urlsplit(place)
    end_s = time.monotonic() + limit_s + ANSWER_WITHIN_S
    answer = (
        _attend_in_folder(Path(url.path), rank, mine, end_s)
        if url.scheme == "file"
        else _attend_over_tcp(url.hostname or "", _port(place), mine, end_s)
    )
    if answer is None:
        raise EnvironmentRefused(f"rank {rank} got no answer from rank 0 at {place} within {limit_s:g} s")
    return answer


def _port(place: str) -> int:
    port = urlsplit(place).port
    if port is None:
        raise ValueError(f"a place to meet must be file://FOLDER or tcp://HOST:PORT: {place!r}")
    return port


def _lead_in_folder(folder: Path, world_size: int, mine: bytes, end_s: float, decide: Decide) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    others = [folder / f"rank-{rank}.said" for rank in range(1, world_size)]
    while not all(path.exists() for path in others) and time.monotonic() < end_s:
        time.sleep(_PAUSE_S)
    said = [mine, *(path.read_bytes() for path in others if path.exists())]
    answer = decide(said)
    _write(folder / "answer", answer)
    return answer


def _attend_in_folder(folder: Path, rank: int, mine: bytes, end_s: float) -> bytes | None:
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"rank-{rank}.said", mine)
    path = folder / "answer"
    while not path.exists():
        if time.monotonic() > end_s:
            return None
        time.sleep(_PAUSE_S)
    return path.read_bytes()


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(content)
    draft.replace(path)


def _lead_over_tcp(port: int, world_size: int, mine: bytes, end_s: float, decide: Decide) -> bytes:
    said = [mine]
    with contextlib.ExitStack() as stack:
        waiting: list[socket.socket] = []
        with _listen(port) as server:
            while len(said) < world_size and (left_s := end_s - time.monotonic()) > 0:
                server.settimeout(left_s)
                try:
                    connection = stack.enter_context(server.accept()[0])
                except TimeoutError:
                    break
                text = _receive(connection, min(_READ_S, max(left_s, 0.1)))
                if text is not None:
                    said.append(text)
                    waiting.append(connection)
        answer = decide(said)  # the port is free again: whoever has an answer may open the transport there
        for connection in waiting:
            with contextlib.suppress(OSError):  # that rank has gone; the transport will miss it
                connection.settimeout(_READ_S)
                connection.sendall(_HEAD.pack(_MAGIC, len(answer)) + answer)
        for connection in waiting:
            with contextlib.suppress(OSError):  # the other side closes first, so that no port stays in TIME_WAIT here
                connection.recv(1)
    return answer


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
    except OSError as error:
        raise EnvironmentRefused(
            f"rank 0 cannot listen on port {port}, where the ranks meet ({error.strerror}): another program has it; "
            f"set MASTER_ADDR (this host) and MASTER_PORT (a free port) for all ranks"
        ) from error


def _attend_over_tcp(host: str, port: int, mine: bytes, end_s: float) -> bytes | None:
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(_READ_S, left_s)) as connection:
                connection.sendall(_HEAD.pack(_MAGIC, len(mine)) + mine)
                answer = _receive(connection, max(end_s - time.monotonic(), 0.1), is_json=False)
                if answer is not None:
                    return answer
        except OSError:  # rank 0 is not there yet, or its network is not
            pass
        time.sleep(_PAUSE_S)
    return None


def _receive(connection: socket.socket, within_s: float, *, is_json: bool = True) -> bytes | None:
    """Read one message; None where a stranger speaks, or too slowly."""
    end_s = time.monotonic() + within_s
    try:
        head = _read(connection, _HEAD.size, end_s)
        magic, length = _HEAD.unpack(head)
        if magic != _MAGIC or length > _MAX_BYTES:
            return None
        text = _read(connection, length, end_s)
        if is_json:
            json.loads(text)
    except (OSError, ValueError, struct.error):
        return None
    return text


def _read(connection: socket.socket, length: int, end_s: float) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(min(length - len(parts), 2**16))
        if not part:
            raise ConnectionError("closed")
        parts += part
    return bytes(parts)
