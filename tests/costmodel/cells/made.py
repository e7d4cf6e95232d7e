"""Tables made by a law with a knee, so that a test knows what is true."""

import numpy as np

from crosstraffic.results.table import Table, make_frame

SIZES = tuple(2**power for power in range(9, 28))


def law(op: str, ranks: int, size: float) -> float:
    """Return seconds: steps x 2 us + traffic / 200 GB/s, 6 us before either."""
    steps = (ranks - 1) * (2 if op == "all_reduce" else 1)
    return 6e-6 + steps * 2e-6 + steps / ranks * size / 200e9


def table(
    ops=("all_reduce", "all_gather"), ranks=(2, 4), sizes=SIZES, repeats=1, noise=0.0, system="made", seed=0, **more
) -> Table:
    rows = [(op, n, size) for op in ops for n in ranks for size in sizes for _ in range(repeats)]
    drawn = np.random.default_rng(seed).normal(0, noise, len(rows)) if noise else np.zeros(len(rows))
    times = [law(*row) * float(np.exp(jitter)) for row, jitter in zip(rows, drawn, strict=True)]
    return of_frame(
        make_frame(
            op=[row[0] for row in rows],
            kernel=["nccl"] * len(rows),
            dtype=["half"] * len(rows),
            num_ranks=[row[1] for row in rows],
            payload_bytes=[row[2] for row in rows],
            time_s=times,
            **{name: [value] * len(rows) for name, value in more.items()},
        ),
        system=system,
    )


def of_frame(frame, system="made") -> Table:
    return Table(system=system, library="law", source="made", kind="made", statistic="median", frame=frame)
