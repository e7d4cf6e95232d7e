"""The text of a job: reviewed files, and nothing that a value can add to it."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from crosstraffic.slurm.job import FORMS, Job, render

GOLDEN = Path(__file__).parent / "golden"
H100 = Job(
    scenario="/shared/scenarios/deepseek.toml",
    output="/shared/runs/h100-16",
    num_nodes=16,
    ranks_per_node=8,
    transport="nccl",
    name="qualify-h100",
    gpus_per_node=8,
    time="1:00:00",
    account="infra",
    partition="h100",
    exclude="h100-[007,113]",
    container="nvcr.io#nvidia/pytorch:26.05-py3",
    mounts="/shared:/shared",
    variables=(("NCCL_DEBUG", "WARN"), ("NCCL_IB_HCA", "mlx5_0,mlx5_1")),
    arguments=("--budget", "1800"),
    directives=("--mem=0",),
)
CPU = Job(
    scenario=None,
    output="/scratch/me/runs/cpu-4",
    num_nodes=4,
    ranks_per_node=2,
    transport="mpi",
    mpi="pmix",
    cpus_per_rank=16,
    time="30",
    nodelist="c[01-04]",
    modules=("gcc/13.2", "openmpi/5.0"),
    sources=("/scratch/me/crosstraffic/.venv/bin/activate",),
    after=4711,
)
JOBS = {"h100": H100, "cpu": CPU}
QUOTED = frozenset({"scenario", "program", "container", "mounts", "sources", "arguments"})
HOSTILE = (
    "a\nb",
    "a;reboot",
    "$(reboot)",
    "`reboot`",
    "--wrap=reboot",
    "a'b",
    'a"b',
    "a b",
    "a\\b",
    "a\x00b",
    "",
    "%x\r",
)


@pytest.mark.parametrize("name", JOBS)
def test_the_text_is_the_reviewed_one(name):
    assert render(JOBS[name]) == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", JOBS)
def test_a_shell_reads_it(name, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(render(JOBS[name]))
    subprocess.run(["bash", "-n", str(script)], check=True)


def words_of(job, tmp_path):
    """Run the script with an srun that tells its words; return them and what else was printed."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    srun.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(render(job))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, env=environment, check=True, cwd=tmp_path
    )
    assert not (tmp_path / "owned").exists()
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    "text", ["a;touch owned", "$(touch owned)", "`touch owned`", "a b'c\"d", "a\\", "|touch owned", "*", "~"]
)
def test_what_reaches_the_shell_stays_one_word(text, tmp_path):
    job = Job(
        scenario=text, output="/runs/x", num_nodes=2, ranks_per_node=1, program=text, container=text, mounts=text,
        arguments=(text,), variables=(("A", text),),
    )  # fmt: skip
    words = words_of(job, tmp_path)
    at = words.index(text)
    assert words[at : at + 3] == [text, "run", text]
    assert f"--container-image={text}" in words
    assert f"--container-mounts={text}" in words
    assert words[-1] == text


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", sorted(FORMS))
def test_hostile_values_are_refused_or_quoted(field, text, tmp_path):
    value = (text,) if field in ("arguments", "modules", "sources", "directives") else text
    change = {"mounts": text, "container": "x"} if field == "mounts" else {field: value}
    if field not in QUOTED or not text.isprintable() or not text or text.startswith("--"):
        if field == "arguments" and text.startswith("--"):
            return
        with pytest.raises(ValueError, match=f"{field} must be") as caught:
            replace(CPU, **change)
        assert repr(text) in str(caught.value)
        return
    job = replace(CPU, **change)
    lines = render(job).splitlines()
    plain = render(
        replace(
            CPU,
            **{field: ("x",) if isinstance(value, tuple) else "x", **({"container": "x"} if field == "mounts" else {})},
        )
    )
    assert len(lines) == len(plain.splitlines()) + ("\n" in text)
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        line for line in plain.splitlines() if line.startswith("#SBATCH")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 0}, "num_nodes must be a whole number from 1: 0"),
        ({"ranks_per_node": 0}, "ranks_per_node must be"),
        ({"gpus_per_node": -1}, "gpus_per_node must be"),
        ({"cpus_per_rank": 0}, "cpus_per_rank must be"),
        ({"transport": "carrier pigeon"}, "one of auto, mpi, gloo, nccl"),
        ({"time": "soon"}, "a time as Slurm writes it"),
        ({"nodelist": "c[1-3]"}, "names 3 nodes, the job needs 4"),
        ({"nodelist": "c[1-"}, "not a node list"),
        ({"mounts": "/a:/a"}, "mounts belong to a container"),
        ({"directives": ("--time=1",)}, "--time has its own"),
        ({"directives": ("--wrap=x",)}, "--wrap has its own"),
        ({"directives": ("mem=0",)}, "one option of sbatch"),
        ({"variables": (("A B", "x"),)}, "NAME=VALUE"),
        ({"variables": (("A", "x\ny"),)}, "NAME=VALUE"),
        ({"output": "runs/x"}, "an absolute path"),
        ({"output": "/runs/%j"}, "an absolute path"),
    ],
)
def test_a_wrong_job_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CPU, **change)


def test_a_site_s_own_template_takes_its_place(tmp_path):
    template = tmp_path / "site.j2"
    template.write_text(
        "#!/bin/sh\n#SBATCH -N {{ job.num_nodes }}\n"
        "mpirun -n {{ job.num_ranks }}{% for w in run %} {{ w | quote }}{% endfor %}\n"
    )
    assert render(CPU, template).splitlines()[1:] == [
        "#SBATCH -N 4",
        "mpirun -n 8 crosstraffic run --output /scratch/me/runs/cpu-4 --transport mpi",
    ]


@pytest.mark.parametrize("text", ["{{ job.colour }}", "{% for %}", "{{ job.__class__.__mro__ }}", "{{ ''.__class__ }}"])
def test_a_broken_template_is_refused(text, tmp_path):
    template = tmp_path / "site.j2"
    template.write_text(text)
    with pytest.raises(ValueError, match=r"template .*site\.j2: "):
        render(CPU, template)
    with pytest.raises(ValueError, match="No such file"):
        render(CPU, tmp_path / "missing")
