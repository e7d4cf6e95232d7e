"""The preflight alone, on all ranks, in bounded time: ``crosstraffic doctor``.

The command starts one process for each rank (``python -m crosstraffic.bench.doctor FOLDER``), by itself or below what a
launcher started: only from outside can a library be ended that hangs while it starts. Rank 0 writes what was found into
its folder, first what the ranks said before any transport was opened, then all of it.
"""

import faulthandler
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crosstraffic.bench.clocks import synchronise
from crosstraffic.bench.diagnosis import Diagnosis, diagnosis_to_dict, read_diagnosis, write_diagnosis
from crosstraffic.bench.heartbeat import Heart, State
from crosstraffic.bench.launch import DEFAULT_RANKS, launch_local
from crosstraffic.bench.libraries import availability
from crosstraffic.bench.open import SIMULATED, open_transport, resolve_transport
from crosstraffic.bench.preflight import check, check_ranks, gather
from crosstraffic.bench.processes import die_with_parent
from crosstraffic.bench.rank_report import RankReport, look_at_rank, ranges, report_from_json, report_to_json
from crosstraffic.bench.ranks import RankIdentity, identify
from crosstraffic.bench.roll_call import ANSWER_WITHIN_S, attend, lead
from crosstraffic.bench.watchdog import watch
from crosstraffic.errors import CrosstrafficError, EnvironmentRefused, UsageError

MODULE = "crosstraffic.bench.doctor"
START_LIMIT_S = 60.0
MARGIN_S = 5.0  # for what a rank does between its bounded steps
NUM_ROUNDS = 30  # ping-pongs with each rank
LOCAL = "crosstraffic"
_GO, _STOP = b"go", b"stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """What a rank is to do. ``is_local``: all ranks are below one command and see its folder."""

    transport: str
    start_limit_s: float
    is_local: bool


def examine(*, ranks: int | None, transport: str, start_limit_s: float = START_LIMIT_S) -> dict[str, Any] | None:
    """Examine the ranks of this launcher, or ``ranks`` that are started here; None on ranks that are not rank 0.

    Raises:
        UsageError: a transport without ranks, or another number of ranks than the launcher's.
        EnvironmentRefused: on a rank that is not rank 0: it could not take part, and why.
    """
    name = resolve_transport(transport)
    if name == SIMULATED:
        raise UsageError("transport simulated has no ranks to examine; allowed: auto, mpi, gloo")
    if not 0 < start_limit_s < math.inf:
        raise UsageError(f"--start-limit must be more than 0 seconds, and finite: {start_limit_s:g}")
    try:
        identity = identify(os.environ)
    except ValueError as error:
        raise UsageError(str(error)) from error
    asked = Examination(transport=name, start_limit_s=start_limit_s, is_local=identity is None)
    with tempfile.TemporaryDirectory(prefix="crosstraffic-doctor-") as folder:
        path = Path(folder)
        (path / "asked.json").write_text(json.dumps(asdict(asked)), encoding="utf-8")
        if identity is None:
            return _start_here(asked, DEFAULT_RANKS if ranks is None else ranks, path)
        if ranks is not None and ranks != identity.world_size:
            raise UsageError(f"--ranks {ranks}: {identity.launcher} has started {identity.world_size} ranks")
        return _start_below(asked, identity, path)


def _start_here(asked: Examination, num_ranks: int, folder: Path) -> dict[str, Any]:
    limit_s = asked.start_limit_s + ANSWER_WITHIN_S  # the ranks themselves name who is missing
    with launch_local(asked.transport, num_ranks, folder, module=MODULE) as local:
        outcome = watch(local, start_limit_s=limit_s, stand_still_s=limit_s)
    found = read_diagnosis(folder)
    if found is None:
        here = look_at_rank(0, num_ranks, asked.transport)
        found = _first_words(asked, LOCAL, num_ranks, [here], []) | {"ranks": []}  # no rank said anything
    if outcome.failure is not None and not found["refusals"]:
        found["refusals"] = [outcome.failure]
    return found


def _start_below(asked: Examination, identity: RankIdentity, folder: Path) -> dict[str, Any] | None:
    """Examine as one rank of a launcher, in a child that is ended when it takes too long."""
    limit_s = asked.start_limit_s * (2 if _place(asked, identity, folder) else 1) + MARGIN_S
    if identity.rank != 0:
        limit_s += ANSWER_WITHIN_S  # so that rank 0 speaks first
    log = folder / "log"
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the folder goes too
    with log.open("wb") as output:
        child = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", MODULE, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            close_fds=False,  # a launcher of MPI talks to its ranks over one
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            child.kill()
            child.wait()
    why = f"transport {asked.transport} did not come up within {limit_s:g} s" if code is None else None
    if code:
        why = f"exit code {code}"
    if why is not None:
        why = "\n".join([f"rank {identity.rank} ({socket.gethostname()}): {why}", *_last_lines(log)])
    if identity.rank != 0:
        if why is not None:
            raise EnvironmentRefused(why)
        return None
    found = read_diagnosis(folder)
    if found is None:
        mine = look_at_rank(identity.rank, identity.world_size, asked.transport)
        found = _first_words(asked, identity.launcher, identity.world_size, [mine], [])
    if why is not None and not found["refusals"]:
        found["refusals"] = [why]
    return found


def _last_lines(log: Path) -> list[str]:
    return [f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-8:]]


def _place(asked: Examination, identity: RankIdentity, folder: Path) -> str | None:
    """Return where ranks meet before the transport is opened; None where only the transport's library knows."""
    if asked.is_local:
        return f"file://{folder / 'roll-call'}"
    point = identity.meeting_point
    return None if point is None or identity.is_served or identity.world_size == 1 else point


def _first_words(
    asked: Examination, launcher: str, world_size: int, reports: Sequence[RankReport], refusals: Sequence[str]
) -> dict[str, Any]:
    return diagnosis_to_dict(
        Diagnosis(
            transport=asked.transport,
            launcher=launcher,
            world_size=world_size,
            reports=tuple(reports),
            transports=availability(),
            refusals=tuple(refusals),
        )
    )


def _join(asked: Examination, identity: RankIdentity, folder: Path) -> None:
    """Examine as one rank; rank 0 leaves what was found in the folder."""
    launcher = LOCAL if asked.is_local else identity.launcher
    if asked.is_local and asked.transport == "mpi":
        from crosstraffic.bench.worker import bind

        bind(identity.rank)  # as a run does
    mine = look_at_rank(identity.rank, identity.world_size, asked.transport)
    if not _may_open(asked, identity, folder, launcher, mine):
        return
    transport = open_transport(asked.transport, identity)
    reports = gather(transport)
    clocks = synchronise(transport, NUM_ROUNDS)
    if reports is not None:
        found = Diagnosis(
            transport=asked.transport,
            launcher=launcher,
            world_size=identity.world_size,
            reports=tuple(reports),
            transports=availability(),
            clocks=tuple(clocks or ()),
            refusals=tuple(check(reports, identity.world_size)),
        )
        write_diagnosis(folder, diagnosis_to_dict(found))
    transport.close()


def _may_open(asked: Examination, identity: RankIdentity, folder: Path, launcher: str, mine: RankReport) -> bool:
    """Tell whether all ranks are there, and nothing that they say speaks against opening the transport.

    Raises:
        EnvironmentRefused: where ranks cannot meet, on a rank that is not rank 0: something speaks against its part.
    """
    place = _place(asked, identity, folder)

    def decide(said: Sequence[bytes]) -> bytes:
        reports = [report_from_json(text) for text in said]
        missing = set(range(identity.world_size)) - {item.rank for item in reports}
        if place is None or len(reports) == identity.world_size:
            refusals = check_ranks(reports) if place is None else check(reports, identity.world_size)
        else:
            refusals = [_missing(missing, asked, place), *check_ranks(reports)]
        write_diagnosis(folder, _first_words(asked, launcher, identity.world_size, reports, refusals))
        return _STOP if refusals else _GO

    words = report_to_json(mine)
    if place is None:
        if identity.rank == 0:
            return decide([words]) == _GO
        refusals = check_ranks([mine])
        if refusals:
            raise EnvironmentRefused("; ".join(refusals))
        return True
    if identity.rank == 0:
        return lead(place, identity.world_size, words, asked.start_limit_s, decide) == _GO
    return attend(place, identity.rank, words, asked.start_limit_s) == _GO


def _missing(ranks: set[int], asked: Examination, place: str) -> str:
    word = "rank" if len(ranks) == 1 else "ranks"
    where = "" if asked.is_local else f" to {place}"
    return (
        f"{word} {ranges(ranks)} did not come{where} within {asked.start_limit_s:g} s: see what the launcher says of "
        f"their nodes, and whether those reach the node of rank 0"
    )


def main(arguments: list[str]) -> int:
    """Examine as one rank; return the exit code."""
    folder = Path(arguments[0])
    asked = Examination(**json.loads((folder / "asked.json").read_text(encoding="utf-8")))
    identity = identify(os.environ)
    if identity is None:
        raise EnvironmentRefused("no launcher told this process its rank; start ranks with crosstraffic doctor")
    if not asked.is_local:
        die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # the watchdog asks where a rank that stands still is
    with Heart.in_folder(folder, identity.rank) as heart:
        try:
            _join(asked, identity, folder)
            heart.state(State.FINISHED)
        except BaseException as error:  # the others wait in a call that will not end: go at once, and loudly
            heart.state(State.FAILED)
            if isinstance(error, CrosstrafficError):
                print(f"rank {identity.rank}: {error}", flush=True)
                if identity.rank == 0:
                    _refuse(asked, identity, folder, str(error))
            else:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
            os._exit(error.exit_code if isinstance(error, CrosstrafficError) else 1)
    return 0


def _refuse(asked: Examination, identity: RankIdentity, folder: Path, why: str) -> None:
    """Add to what was found, as rank 0, that the examination could not go on."""
    found = read_diagnosis(folder)
    if found is None:
        mine = look_at_rank(identity.rank, identity.world_size, asked.transport)
        found = _first_words(asked, identity.launcher, identity.world_size, [mine], [])
    write_diagnosis(folder, found | {"refusals": [*found["refusals"], why]})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
