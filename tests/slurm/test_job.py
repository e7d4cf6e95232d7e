"""The text of a job: reviewed files, and nothing that a value can add to it."""

import shlex
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest

from crosstraffic.slurm.job import FLAGS, FORMS, LEAST, TUPLES, Job, render

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
SEARCHED = Job(
    scenario="collectives",
    output="/scratch/me/runs/search-8",
    num_nodes=8,
    ranks_per_node=4,
    transport="gloo",
    program="/scratch/me/crosstraffic/.venv/bin/crosstraffic",
    exclusive=False,
    time="5",
    reservation="qualify",
    constraint="rack1|rack2",
    bisect=True,
)
JOBS = {"h100": H100, "cpu": CPU, "searched": SEARCHED}
QUOTED = frozenset({"scenario", "program", "container", "mounts", "sources", "arguments"})
HOSTILE = (
    "a\nb",
    "a;touch owned",
    "$(touch owned)",
    "`touch owned`",
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


def test_every_field_has_a_form():
    assert {field.name for field in fields(Job)} == {*FORMS, *LEAST, *FLAGS, "variables"}


def directives(text):
    return [line for line in text.splitlines() if line.startswith("#SBATCH")]


def is_quoted(field, text):
    """Tell whether a value of a field may hold anything that one line can: it is quoted where it stands."""
    return field in QUOTED and text.isprintable() and text and (field == "arguments" or not text.startswith("-"))


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("field", sorted({*FORMS, *LEAST, *FLAGS}))
def test_hostile_values_are_refused_or_quoted(field, text, tmp_path):
    def job_with(value):
        plain = replace(CPU, modules=(), sources=(), container="image" if field == "mounts" else None)
        return replace(plain, **{field: (value,) if field in TUPLES else value})

    if not is_quoted(field, text):
        with pytest.raises(ValueError, match=f"{field} must be") as caught:
            job_with(text)
        assert repr(text) in str(caught.value)
        return
    job, plain = job_with(text), job_with("x")
    assert directives(render(job)) == directives(render(plain))
    assert len(render(job).splitlines()) == len(render(plain).splitlines())
    if field == "sources":  # read by the shell, not given to srun
        assert f"source {shlex.quote(text)}" in render(job).splitlines()
        return
    words, plain_words = words_of(job, tmp_path), words_of(plain, tmp_path)
    assert words == [text if word == "x" else word.replace("=x", f"={text}") for word in plain_words]


@pytest.mark.parametrize("text", [*HOSTILE[:-1], "$HOME"])
def test_hostile_variables_are_refused_or_quoted(text, tmp_path):
    with pytest.raises(ValueError, match="NAME=VALUE"):
        replace(CPU, variables=((text, "x"),))
    if not text.isprintable():
        with pytest.raises(ValueError, match="NAME=VALUE"):
            replace(CPU, variables=(("A", text),))
        return
    assert f"export A={shlex.quote(text)}" in render(replace(CPU, variables=(("A", text),))).splitlines()


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
        ({"num_nodes": True}, "num_nodes must be a whole number from 1: True"),
        ({"num_nodes": None}, "num_nodes must be a whole number from 1: None"),
        ({"after": "1\n#SBATCH --uid=0"}, "after must be a whole number"),
        ({"exclusive": "yes"}, "exclusive must be true or false: 'yes'"),
        ({"arguments": "--budget"}, "arguments must be a list"),
        ({"modules": (7,)}, "modules must be text: 7"),
        ({"name": None}, "name must be text: None"),
        ({"variables": ("A=x",)}, "pairs of a name and a value"),
        ({"variables": "A=x"}, "variables must be a list"),
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


@pytest.mark.parametrize(("code", "is_searched"), [(0, False), (1, True), (2, False), (3, True), (143, True)])
def test_a_search_follows_a_run_that_failed_and_the_job_ends_as_the_run_did(code, is_searched, tmp_path):
    for name, text in {"srun": f"exit {code}", "search": 'printf "%s " "$@"; exit 9'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(render(replace(SEARCHED, program=str(tmp_path / "search"))))
    done = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == (f"slurm bisect {SEARCHED.output} " if is_searched else "")


@pytest.mark.parametrize(
    ("time", "warning"), [("1", 15), ("2", 24), ("5", 60), ("9:59", 119), ("10", 120), ("2-12", 120), (None, 120)]
)
def test_the_warning_comes_a_fifth_of_the_limit_before_its_end(time, warning):
    assert f"#SBATCH --signal=TERM@{warning}" in render(replace(CPU, time=time)).splitlines()
