"""Open a transport by its name: one table, one look-up."""

from collections.abc import Callable, Mapping

from crosstraffic.bench.ranks import RankIdentity
from crosstraffic.bench.transport import Transport
from crosstraffic.errors import UsageError

Opener = Callable[[RankIdentity | None], Transport]


def _open_mpi(identity: RankIdentity | None) -> Transport:
    from crosstraffic.bench.mpi import MpiTransport

    return MpiTransport(expected_world_size=None if identity is None else identity.world_size)


def _open_gloo(identity: RankIdentity | None) -> Transport:
    from crosstraffic.bench.gloo import GlooTransport

    return GlooTransport(identity)


TRANSPORTS: Mapping[str, Opener] = {
    "mpi": _open_mpi,
    "gloo": _open_gloo,
}
AUTO = "auto"
SIMULATED = "simulated"  # has no ranks to join: ``conduct`` runs it in threads of one process


def resolve_transport(name: str) -> str:
    """Return the name of a transport; ``auto`` is MPI, the fastest of them between processors.

    Raises:
        UsageError: no such transport.
    """
    if name == AUTO:
        return "mpi"
    if name not in (*TRANSPORTS, SIMULATED):
        raise UsageError(f"unknown transport: {name!r}; allowed: {', '.join((AUTO, *TRANSPORTS, SIMULATED))}")
    return name


def open_transport(name: str, identity: RankIdentity | None) -> Transport:
    """Join the other ranks; every rank calls it. ``identity`` is what the launcher says (``ranks.identify``).

    Raises:
        UsageError: no such transport.
        EnvironmentRefused: a library is missing, or the ranks do not find each other.
    """
    name = resolve_transport(name)
    if name == SIMULATED:
        raise UsageError("the simulated transport has no ranks to join")
    return TRANSPORTS[name](identity)
