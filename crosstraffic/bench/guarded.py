"""One rank of a launcher (srun, torchrun, mpiexec) and its guard: the process that the launcher started forks.

The child measures. The parent, its guard, loads nothing heavy, sees how the child ends and what it says in shared
memory, and tells the guard of rank 0, which judges (``supervisor``). So a rank that is killed, stopped or cut off is
named with its node and the call it was in, and the others end in bounded time, whatever the transport does. Where
guards cannot meet (mpiexec gives no address), each judges its own rank alone.
"""

import contextlib
import faulthandler
import json
import os
import platform
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from crosstraffic import __version__
from crosstraffic.bench.child import Child
from crosstraffic.bench.control import meeting
from crosstraffic.bench.follower import Follower
from crosstraffic.bench.heartbeat import Heart, State, shared_memory
from crosstraffic.bench.leader import Leader
from crosstraffic.bench.messages import Hello
from crosstraffic.bench.processes import die_with_parent
from crosstraffic.bench.ranks import RankIdentity
from crosstraffic.bench.supervisor import beat_every_s

TICK_S = 0.25
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # wait until both processes know what they mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a rank holds of its guard: the heart that it reads, where rank 0 says its folder, and the log of last words.

    Only the guard of rank 0 prints: what follows from another rank's end is not shown in its place.
    """

    heart: Heart
    folder_fd: int
    log: IO[bytes]

    def tell_folder(self, folder: Path) -> None:
        """Say where run.json is, so that the guard can write there how the run ended."""
        os.write(self.folder_fd, json.dumps(str(folder.resolve())).encode())

    def finished(self) -> None:
        """Say that all is measured and kept: what comes after is no business of the other ranks."""
        self.heart.state(State.FINISHED)

    def failed(self, last_words: str) -> None:
        """Leave behind why this rank ends: shown if that is why the run ends."""
        self.heart.state(State.FAILED)  # at once: who said so first is to blame
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            os.write(self.log.fileno(), last_words.encode(errors="replace"))


def fork_rank(environment: Mapping[str, str], identity: RankIdentity) -> Launched | int:
    """Fork. In the child return what ties it to its guard; in the guard watch to the end and return the exit code.

    Raises:
        EnvironmentRefused: in the guard: another process of this launch is rank 0 already; no port is free.
    """
    memory = shared_memory()
    folder_out, folder_in = os.pipe()
    log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (it lives as long as the guard)
    sys.stdout.flush()
    sys.stderr.flush()
    guard_pid = os.getpid()
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # whoever started this may have ignored it
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        if os.getppid() != guard_pid:  # it ended before it could be asked
            os._exit(1)
        os.close(folder_out)
        if identity.rank:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # the guard decides what they mean
        faulthandler.register(signal.SIGUSR1, file=log)
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
        return Launched(heart=Heart(memory), folder_fd=folder_in, log=log)
    os.close(folder_in)
    child = Child(identity.rank, pid, memory, log)
    asked: list[str] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # MPICH's launcher sends it to ranks that are still leaving
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
    try:
        return _guard(environment, identity, child, folder_out, asked)
    finally:
        child.kill()
        for number in (signal.SIGINT, signal.SIGTERM):  # srun ends what is left of a step: the exit code is to stay
            signal.signal(number, signal.SIG_IGN)


def _guard(
    environment: Mapping[str, str], identity: RankIdentity, child: Child, folder_fd: int, asked: list[str]
) -> int:
    place = meeting(environment, identity)
    hello = Hello(
        key="" if place is None else place.key,
        rank=identity.rank,
        world_size=identity.world_size,
        host=socket.gethostname(),
        pid=os.getpid(),
        facts={"crosstraffic": __version__, "Python": platform.python_version()},
    )
    selector = selectors.DefaultSelector()
    _wake_on_signals(selector)
    role: Leader | Follower
    if place is None or identity.rank == 0:
        role = Leader(hello, place, child, selector, folder_fd)
    else:
        role = Follower(hello, place, child, selector)
    every_s, said_s = beat_every_s(identity.world_size), 0.0
    while role.code is None:
        for key, _ in selector.select(TICK_S):
            key.data()
        if child.reap():
            said_s = 0.0
        now = time.monotonic()
        if asked:
            role.asked_to_stop(asked[0])
            asked.clear()
        if role.is_ready and now - said_s >= every_s:
            said_s = now
            for message in child.news():
                role.say(message)
        role.tick(now)
    role.close()
    return role.code


def _wake_on_signals(selector: selectors.BaseSelector) -> None:
    """End a wait of the selector when a signal comes: SIGCHLD tells that the rank has ended."""
    wake_out, wake_in = os.pipe()
    for descriptor in (wake_out, wake_in):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    selector.register(wake_out, selectors.EVENT_READ, lambda: os.read(wake_out, 4096))
