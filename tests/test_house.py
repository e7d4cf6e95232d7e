"""The house keeps its rules: arrows between packages, what imports what, size of modules, links, what a wheel holds."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "crosstraffic"
MODULES = tuple(sorted(PACKAGE.rglob("*.py")))
LINKS = ("bench", "kernels", "patterns", "results", "slurm")
MAX_LINES = 400
DATA_SUFFIXES = frozenset({".json", ".toml", ".j2", ".cu"})

# Who may import whom. "" is crosstraffic/__init__.py, which knows the version.
FREE = frozenset({"", "errors", "units"})
EVERYTHING = frozenset({"bench", "cli", "commands", "costmodel", "kernels", "patterns", "results", "slurm"}) | FREE
ARROWS: Mapping[str, frozenset[str]] = {
    "": frozenset(),
    "errors": frozenset(),
    "units": frozenset({"errors"}),
    "patterns": frozenset(),
    "kernels": frozenset(),
    "results": FREE | {"patterns"},
    "costmodel": FREE | {"patterns", "results"},
    "bench": FREE | {"kernels", "patterns", "results"},
    "slurm": FREE | {"results"},
    "cli": EVERYTHING,
    "commands": EVERYTHING,
}

BLOCKED = ("torch", "mpi4py", "cupy")
PURE = ("patterns", "costmodel")
FORBIDDEN_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"})
FORBIDDEN_CALLS = frozenset({"eval", "exec"})


def layer_of(module: str) -> str:
    """Return the part of the house that ``crosstraffic.<layer>...`` is in.

    >>> layer_of("crosstraffic.bench.transport"), layer_of("crosstraffic.units"), layer_of("crosstraffic")
    ('bench', 'units', '')
    """
    return [*module.split("."), ""][1]


def imported_names(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import in a module, inside functions and by literal name too.

    >>> list(imported_names("def f():\\n    from ..bench import clock", "crosstraffic.patterns.tensor"))
    [(2, 'crosstraffic.bench.clock')]
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=origin, names=names, level=level):
                package = module.split(".")[:-level] if level else []
                base = ".".join([*package, *([origin] if origin else [])])
                yield from ((node.lineno, f"{base}.{name.name}") for name in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(name: str) -> str | None:
    """Return the layer that an imported name is in: "" for the names of crosstraffic/__init__.py, None if not ours."""
    if name.split(".")[0] != "crosstraffic":
        return None
    layer = layer_of(name)
    return layer if layer in ARROWS or (PACKAGE / layer).exists() or (PACKAGE / f"{layer}.py").exists() else ""


def broken_arrows(source: str, module: str) -> list[str]:
    """Return what a module imports and may not, one line each."""
    allowed = ARROWS[layer_of(module)] | {layer_of(module)}
    return [
        f"{module}:{line} imports {name}, but {layer_of(module) or 'crosstraffic'} may import {sorted(allowed)}"
        for line, name in imported_names(source, module)
        if (target := targets(name)) is not None and target not in allowed
    ]


def strangers(source: str, module: str, known: frozenset[str]) -> list[str]:
    """Return imports of a module that are neither Python's own, nor ours, nor known."""
    return [
        f"{module}:{line} imports {name}"
        for line, name in imported_names(source, module)
        if name.split(".")[0] not in known | sys.stdlib_module_names | {"crosstraffic"}
    ]


def unsafe(source: str, module: str) -> list[str]:
    """Return uses of a shell, of pickle and of eval, one line each."""
    found = [
        f"{module}:{line} imports {name}"
        for line, name in imported_names(source, module)
        if name.split(".")[0] in FORBIDDEN_MODULES
    ]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(f"{module}:{node.lineno} calls {name}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen")):
                found.append(f"{module}:{node.lineno} gives a line to a shell")
            case ast.keyword(arg="shell" | "allow_pickle", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    found.append(f"{module}:{value.lineno} passes {node.arg}=")
    return found


def names(path: Path) -> str:
    """Return the id of a module in the tests below."""
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_module_keeps_the_rules(path: Path) -> None:
    source, module = path.read_text(encoding="utf-8"), module_name(path)
    assert layer_of(module) in ARROWS, f"{module}: give its layer a row in ARROWS and in the design"
    assert broken_arrows(source, module) == []
    assert unsafe(source, module) == []
    assert ast.get_docstring(ast.parse(source)), f"{module} has no docstring"
    assert len(source.splitlines()) <= MAX_LINES, f"{module} is over {MAX_LINES} lines: split it"
    if layer_of(module) == "patterns":
        assert strangers(source, module, frozenset({"numpy"})) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("crosstraffic.patterns.tensor", "from crosstraffic.units import KIB"),
        ("crosstraffic.patterns.tensor", "from crosstraffic import bench"),
        ("crosstraffic.patterns.tensor", "from .. import errors"),
        ("crosstraffic.patterns.tensor", "from ..results import record"),
        ("crosstraffic.patterns.tensor", "from crosstraffic import __version__"),
        ("crosstraffic.kernels.fill", "import crosstraffic.patterns.stream"),
        ("crosstraffic.results.store", "def load():\n    from crosstraffic.costmodel import solo"),
        ("crosstraffic.results.store", "if TYPE_CHECKING:\n    from crosstraffic.bench.transport import Transport"),
        ("crosstraffic.costmodel.solo", "import importlib\nimportlib.import_module('crosstraffic.bench.clock')"),
        ("crosstraffic.bench.alone", "from crosstraffic.costmodel.solo import fit"),
        ("crosstraffic.slurm.submit", "import crosstraffic.bench.launch as launch"),
        ("crosstraffic.slurm.submit", "from crosstraffic.commands import run"),
        ("crosstraffic.errors", "from crosstraffic import units"),
        ("crosstraffic", "from crosstraffic.results.store import load"),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str) -> None:
    assert len(broken_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("crosstraffic.patterns.tensor", "import numpy\nfrom .stream import Stream"),
        ("crosstraffic.results.store", "from crosstraffic.patterns.stream import Stream"),
        ("crosstraffic.bench.alone", "from crosstraffic import __version__, errors, kernels"),
        ("crosstraffic.slurm.submit", "from crosstraffic.results.record import Record"),
        ("crosstraffic.commands.run", "from crosstraffic.bench import launch"),
    ],
)
def test_a_right_arrow_is_left_alone(module: str, source: str) -> None:
    assert broken_arrows(source, module) == []


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "import os\nos.system('ls')",
        "import pickle",
        "from pickle import loads",
        "import numpy\nnumpy.load('x.npy', allow_pickle=True)",
        "eval('1')",
        "exec('1')",
    ],
)
def test_unsafe_code_is_found(source: str) -> None:
    assert len(unsafe(source, "crosstraffic.bench.launch")) == 1


def test_patterns_know_numpy_at_most() -> None:
    assert strangers("import numpy\nimport math\nimport scipy.stats", "m", frozenset({"numpy"})) == [
        "m:3 imports scipy.stats"
    ]


IMPORT_BLOCKED = """
import importlib, sys
from importlib.abc import MetaPathFinder

class Block(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in {blocked!r}:
            raise ImportError(fullname + " is blocked")

sys.meta_path.insert(0, Block())
for name in {modules!r}:
    importlib.import_module(name)
"""


def import_blocked(modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a Python that cannot import torch, mpi4py and cupy."""
    program = IMPORT_BLOCKED.format(blocked=BLOCKED, modules=modules)
    return subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_planning_needs_no_torch_mpi_or_cupy() -> None:
    modules = [module_name(path) for path in MODULES if layer_of(module_name(path)) in PURE]
    done = import_blocked(modules)
    assert done.returncode == 0, done.stderr
    tried = [
        f"{module_name(path)}:{line} imports {name}"
        for path in MODULES
        if layer_of(module_name(path)) in PURE
        for line, name in imported_names(path.read_text(encoding="utf-8"), module_name(path))
        if name.split(".")[0] in BLOCKED
    ]
    assert tried == []


@pytest.mark.parametrize("name", BLOCKED)
def test_the_block_blocks(name: str) -> None:
    done = import_blocked([name])
    assert done.returncode != 0
    assert f"{name} is blocked" in done.stderr


def test_one_init_file() -> None:
    assert [str(path.relative_to(REPOSITORY)) for path in PACKAGE.rglob("__init__.py")] == ["crosstraffic/__init__.py"]


@pytest.mark.parametrize("name", LINKS)
def test_links_at_the_root(name: str) -> None:
    link = REPOSITORY / name
    assert link.is_symlink(), f"{name} at the root is no link"
    assert str(link.readlink()) == f"crosstraffic/{name}"
    assert link.is_dir(), f"{name} points nowhere"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist from a copy of the sources, then a wheel from that sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")
    shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=unwanted)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    ours = {
        str(path.relative_to(REPOSITORY))
        for path in PACKAGE.rglob("*")
        if path.suffix in DATA_SUFFIXES | {".py"} or path.name == "py.typed"
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {"crosstraffic/py.typed", "crosstraffic/cli.py"} <= ours
    assert sorted(ours - held) == []
    top = {name.split("/")[0] for name in held}
    assert {name for name in top if not name.endswith(".dist-info")} == {"crosstraffic"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


def test_wheel_imports_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import crosstraffic.cli; print(crosstraffic.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "crosstraffic" / "__init__.py")
