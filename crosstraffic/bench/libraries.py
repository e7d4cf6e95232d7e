"""Which transports can be used here, with versions of their libraries, or why not; imports none of them."""

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crosstraffic.bench import gloo, mpi
from crosstraffic.bench.open import TRANSPORTS

GPU_TRANSPORTS = frozenset({"nccl"})  # each rank of theirs works on a GPU
LIBRARIES: Mapping[str, tuple[str, ...]] = {"mpi": ("mpi4py",), "gloo": ("torch",), "nccl": ("torch",)}
_MISSING = {"mpi": mpi.MISSING, "gloo": gloo.MISSING}
_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {  # names under which each library is packaged, the first that is there
    "mpi": ("mpich", "openmpi", "impi-rt"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nixl": ("nixl", "nixl-cu13", "nixl-cu12"),
    "mooncake": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
}
NAMES = ("mpi", "gloo", "nccl", "nixl", "mooncake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """One transport: the libraries that were found for it, and why it cannot be used (None where it can)."""

    name: str
    libraries: tuple[str, ...]
    why_not: str | None


def availability() -> tuple[Availability, ...]:
    """Return what can be said of every transport without importing its library."""
    return tuple(Availability(name=name, libraries=_found(name), why_not=why_not(name)) for name in NAMES)


def why_not(transport_name: str) -> str | None:
    """Say why a transport cannot be used here; None where nothing speaks against it."""
    if transport_name not in TRANSPORTS:
        return f"crosstraffic has no transport {transport_name} yet"
    if all(importlib.util.find_spec(name) is not None for name in LIBRARIES[transport_name]):
        return None
    return _MISSING[transport_name]


def installed_versions() -> dict[str, str]:
    """Return the versions of the Python libraries that transports need, of those that are installed."""
    names = sorted({name for needed in LIBRARIES.values() for name in needed})
    return {name: version for name in names if (version := _version(name)) is not None}


def _found(transport_name: str) -> tuple[str, ...]:
    packaged = _first(_DISTRIBUTIONS.get(transport_name, ()))
    own = [f"{name} {version}" for name in LIBRARIES.get(transport_name, ()) if (version := _version(name)) is not None]
    return (*own, *([packaged] if packaged else []))


def _first(distributions: Sequence[str]) -> str | None:
    found = ((name, _version(name)) for name in distributions)
    return next((f"{name} {version}" for name, version in found if version is not None), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
