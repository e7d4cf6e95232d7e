"""The table of transports."""

import pytest

from crosstraffic.bench.open import TRANSPORTS, open_transport, resolve_transport
from crosstraffic.errors import UsageError


@pytest.mark.parametrize("name", ["MPI", "", "tcp", "nccl "])
def test_an_unknown_transport_names_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown transport: .*auto, mpi, gloo"):
        open_transport(name, None)


def test_auto_is_a_row_of_the_table() -> None:
    assert resolve_transport("auto") in TRANSPORTS
    assert all(resolve_transport(name) == name for name in TRANSPORTS)
