"""Which requests of a handoff go from which replica to which, and between which ranks that is."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crosstraffic.patterns.matrix import Matrix
from crosstraffic.patterns.reshard import Pool
from crosstraffic.patterns.workload import Workload


def request_counts(workload: Workload, prefill_replicas: int, decode_replicas: int) -> Mapping[int, Matrix]:
    """Return by tokens of a request how many go between replicas, ``[prefill_replicas, decode_replicas]``.

    Request i is prefilled by replica i mod P and decoded by replica i mod D; ``batch`` requests per prefill replica
    share its tokens.

    >>> {tokens: counts.tolist() for tokens, counts in
    ...  request_counts(Workload(phase="handoff", batch=2, context=10), 1, 3).items()}
    {10: [[1, 1, 0]]}
    """
    each, rest = divmod(workload.num_tokens, workload.batch)
    ends = 0, rest * prefill_replicas, workload.batch * prefill_replicas
    found: dict[int, Matrix] = {}
    for tokens, first, end in ((each + 1, *ends[:2]), (each, *ends[1:])):
        if tokens and first < end:
            requests = np.arange(first, end)
            found[tokens] = np.zeros((prefill_replicas, decode_replicas), dtype=np.int64)
            np.add.at(found[tokens], (requests % prefill_replicas, requests % decode_replicas), 1)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """Where requests of one length go: ranks of pairs of replicas, and how many requests each pair has.

    ``rows``: ``[num_pairs, prefill corners, 1]``, ``columns``: ``[num_pairs, 1, decode corners]``, ``times``:
    ``[num_pairs, 1, 1]``. A pair of ranks is in it once.
    """

    rows: Matrix
    columns: Matrix
    times: Matrix

    def add(self, matrix: Matrix, amounts: Matrix) -> None:
        """Add the amounts of each request, ``[prefill corners, decode corners]``, to a matrix between ranks."""
        matrix[self.rows, self.columns] += self.times * amounts

    def raise_to(self, matrix: Matrix, amounts: Matrix) -> None:
        """Raise the cells of a matrix between ranks to amounts, ``[prefill corners, decode corners]``."""
        matrix[self.rows, self.columns] = np.maximum(matrix[self.rows, self.columns], amounts)


def replica_flows(counts: Matrix, prefill: Pool, decode: Pool) -> Flows:
    """Return the flows of ``counts[prefill replica, decode replica]`` requests; pairs without any are left out."""
    source, destination = np.nonzero(counts)
    return Flows(
        rows=prefill.ranks[source][:, :, None],
        columns=decode.ranks[destination][:, None, :],
        times=counts[source, destination][:, None, None],
    )
