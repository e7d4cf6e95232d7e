"""One rank of a launcher: join the others, agree on the plan, measure. Its guard (``guarded``) watches from outside."""

import json
import os
import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import NoReturn

import numpy as np

from crosstraffic.bench.guarded import Launched
from crosstraffic.bench.open import open_transport
from crosstraffic.bench.preflight import check_ranks
from crosstraffic.bench.progress import Progress
from crosstraffic.bench.rank_report import look_at_rank
from crosstraffic.bench.ranks import identify
from crosstraffic.bench.request import Finished, Probe, Request, new_folder, plan_scenario
from crosstraffic.bench.session import Session, begin, run_rank, take_up
from crosstraffic.bench.suites import end_points
from crosstraffic.bench.transport import Exchange, Transport
from crosstraffic.errors import CrosstrafficError, EnvironmentRefused, UsageError
from crosstraffic.patterns.matrix import Explicit
from crosstraffic.patterns.stream import Stream
from crosstraffic.results.run_info import RunInfo

PROBE_BYTES, PROBE_CALLS = 2**18, 5
CALL_S = 0.02  # that one call of a suite should take
MIN_PAYLOAD, MAX_PAYLOAD = 2**16, 2**25


def conduct_launched(
    request: Request, launched: Launched, transport_name: str, before: RunInfo | None
) -> Finished | None:
    """Measure as one rank of a launcher; rank 0 returns what came of it, the others None.

    Raises:
        UsageError: what was asked cannot be, or the folder cannot be used.
        EnvironmentRefused: this launch cannot measure it.
    """
    identity = identify(os.environ)
    if identity is None:
        raise EnvironmentRefused("no launcher told this process its rank")
    needs_probe = request.suite is not None and before is None
    planned = None if needs_probe else plan_scenario(request, identity, before)
    unfit = check_ranks([look_at_rank(identity.rank, identity.world_size, transport_name)])
    if unfit:  # said here in words: a library would hang, or say it in its own
        raise EnvironmentRefused("; ".join(unfit))
    transport = open_transport(transport_name, identity)
    if planned is None:
        planned = plan_scenario(request, identity, before, _probe(transport))
    scenario, plan = planned
    session = Session(scenario=scenario, plan=plan, transport_name=transport_name, folder=new_folder(request, scenario))
    session = _begun(request, session, transport, launched)
    try:
        if transport.rank == 0:
            with Progress(session.plan) as progress:
                launched.heart.on_progress = progress.show
                run_rank(session, transport, launched.heart)
        else:
            run_rank(session, transport, launched.heart)
        transport.close()
    except EnvironmentRefused:  # all ranks have agreed on it
        raise
    except BaseException as error:
        _leave_at_once(transport.rank, launched, error)
    launched.finished()
    return Finished(folder=session.folder, error=None) if transport.rank == 0 else None


def _begun(request: Request, session: Session, transport: Transport, launched: Launched) -> Session:
    """Make or take up the run folder on rank 0; all ranks learn which points are left, or why it cannot be."""
    said: dict[str, object] = {}
    if transport.rank == 0:
        try:
            begin(
                session.scenario,
                session.plan,
                transport_name=session.transport_name,
                folder=session.folder,
                command=request.command,
                resume=request.resume,
            )
            said = {"todo": [point.key for point in take_up(session.folder).plan]}
            launched.tell_folder(session.folder)
        except CrosstrafficError as error:
            said = {"error": str(error), "code": error.exit_code}
    said = json.loads(transport.broadcast(json.dumps(said).encode() if transport.rank == 0 else None))
    if "error" in said:
        kind = EnvironmentRefused if said["code"] == EnvironmentRefused.exit_code else UsageError
        raise kind(said["error"])
    todo = set(said["todo"])  # type: ignore[call-overload]
    return replace(session, plan=tuple(point for point in session.plan if point.key in todo))


def _probe(transport: Transport) -> Probe:
    """Find out on which node each rank is, and how much one call should move."""
    hosts = transport.gather_bytes(socket.gethostname().encode())
    seen = [] if hosts is None else [host.decode() for host in hosts]
    order = list(dict.fromkeys(seen))
    said = json.dumps([order.index(host) for host in seen]).encode()
    nodes = tuple(json.loads(transport.broadcast(said if transport.rank == 0 else None)))
    points = end_points(nodes)
    if len(points) < 2:
        raise UsageError("suite links needs at least 2 ranks")
    ends = (points[0], points[-1])
    stream = Stream(
        name="probe",
        pattern="link",
        op="send_recv",
        phase="prefill",
        groups=(ends,),
        payload_bytes=PROBE_BYTES,
        calls_per_step=1,
        dtype="uint8",
        formula="a first look at one link",
        source="the measurement itself",
        rule=Explicit(bytes=(((0, PROBE_BYTES), (0, 0)),)),
    )
    channel = transport.open_channel(stream)
    least_s = np.inf
    if channel is not None:
        index = ends.index(transport.rank)
        sends = (0, PROBE_BYTES) if index == 0 else (0, 0)
        receives = (0, 0) if index == 0 else (PROBE_BYTES, 0)
        operation = channel.prepare(
            Exchange(
                op="send_recv", group=ends, index=index, payload_bytes=PROBE_BYTES, send_bytes=sends,
                receive_bytes=receives,
            )
        )  # fmt: skip
        for _ in range(PROBE_CALLS):
            begin_s = time.perf_counter()
            operation.start()
            operation.wait()
            if index == 1:
                least_s = min(least_s, time.perf_counter() - begin_s)
    times = transport.gather(np.array([least_s]))
    payload = b""
    if times is not None:
        wanted = PROBE_BYTES * CALL_S / max(float(times.min()), 1e-9)
        payload = str(2 ** round(np.log2(np.clip(wanted, MIN_PAYLOAD, MAX_PAYLOAD)))).encode()
    return Probe(nodes=nodes, payload_bytes=int(transport.broadcast(payload if transport.rank == 0 else None)))


def _leave_at_once(rank: int, launched: Launched, error: BaseException) -> NoReturn:
    """End this rank: the others wait in a call that will not end, and so would this one on its way out."""
    is_known = isinstance(error, CrosstrafficError | KeyboardInterrupt)
    launched.failed(f"rank {rank}: {error!r}\n" if is_known else "".join(traceback.format_exception(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, CrosstrafficError) else 1)
