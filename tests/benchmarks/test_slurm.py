"""Node lists of a large cluster, the text of a job, and submitting one to an sbatch that answers at once."""

import os
import subprocess
import sys
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from crosstraffic.slurm.bisect import bisect
from crosstraffic.slurm.job import Job, render
from crosstraffic.slurm.nodelist import compress, expand

NODES = "r[0-9]n[000-999]"
JOB = Job(
    scenario="collectives", output="/runs/x", num_nodes=10_000, ranks_per_node=8, nodelist=NODES, exclude="x[1-9]"
)


def test_expand_ten_thousand_nodes(benchmark: BenchmarkFixture) -> None:
    nodes = benchmark(expand, NODES)
    assert (len(nodes), nodes[0], nodes[-1]) == (10_000, "r0n000", "r9n999")


def test_compress_ten_thousand_nodes(benchmark: BenchmarkFixture) -> None:
    nodes = expand(NODES)
    assert expand(benchmark(compress, nodes)) == nodes


def test_render_a_job(benchmark: BenchmarkFixture) -> None:
    assert f"#SBATCH --nodelist={NODES}\n" in benchmark(render, JOB)


def test_bisect_a_thousand_nodes(benchmark: BenchmarkFixture) -> None:
    nodes = expand("n[0000-1023]")
    pair = {"n0007", "n0900"}
    finding = benchmark(bisect, nodes, lambda groups: [pair <= {*group} for group in groups], alone=True)
    assert {*finding.culprits[0].nodes} == pair


def test_submit(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\ncat > /dev/null\necho 41\n")
    sbatch.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    runs = iter(range(1000))

    def submit() -> str:
        words = ["submit", "collectives", "--nodes", "4", "--transport", "gloo", "--nodelist", "n[1-4]"]
        command = [
            sys.executable,
            "-m",
            "crosstraffic.cli",
            "slurm",
            *words,
            "--output",
            str(tmp_path / str(next(runs))),
        ]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert benchmark.pedantic(submit, rounds=5, warmup_rounds=1).startswith("41 ")
