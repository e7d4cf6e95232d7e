"""The command line. Commands live in ``commands/``, one file each; heavy imports happen inside them."""

import errno
import io
import os
import sys

import typer

from crosstraffic.commands import errors
from crosstraffic.commands.coupling import coupling
from crosstraffic.commands.doctor import doctor
from crosstraffic.commands.explain import explain
from crosstraffic.commands.export import export
from crosstraffic.commands.fit import fit
from crosstraffic.commands.groups import groups
from crosstraffic.commands.lab import lab
from crosstraffic.commands.layouts import layouts
from crosstraffic.commands.predict import predict
from crosstraffic.commands.report import report
from crosstraffic.commands.run import run
from crosstraffic.commands.slurm import slurm
from crosstraffic.commands.traffic import traffic
from crosstraffic.commands.validate import validate
from crosstraffic.errors import CrosstrafficError, UsageError

# What the parser of the command line raises for a wrong option; typer exports only this kind of it.
Parsing: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="crosstraffic",
    help="Measure the traffic that LLM-inference parallelism puts on an interconnect, alone and together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from crosstraffic import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Measure the traffic that LLM-inference parallelism puts on an interconnect, alone and together."""


app.command()(run)
app.command()(doctor)
app.command()(fit)
app.command()(predict)
app.command()(validate)
app.command()(traffic)
app.command()(groups)
app.command()(coupling)
app.command()(layouts)
app.command()(report)
app.command()(explain)
app.command()(export)
app.add_typer(slurm, name="slurm")
app.add_typer(lab, name="lab")


def main() -> None:
    """Run the command line and exit; whatever was wrong with what was asked is one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a letter that a terminal does not have is no reason to end
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Abort:
        sys.exit("aborted")
    except Parsing as error:
        line = errors.usage_line(error)
        sys.exit(errors.report(UsageError(line)) if line else 2)  # without a line, help was printed
    except OSError as error:
        sys.exit(_report_system(error))
    except CrosstrafficError as error:
        sys.exit(errors.report(error))
    sys.exit(code)


def _report_system(error: OSError) -> int:
    """Tell what the system refused to any command: a name too long, or standard output (closed by its reader, full)."""
    if error.errno == errno.ENAMETOOLONG:
        return errors.report(UsageError(f"no such file, its name is too long: {error.filename!r}"))
    if error.errno not in (errno.EPIPE, errno.ENOSPC) or error.filename is not None:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left unwritten is not tried again at the end
    return 1 if error.errno == errno.EPIPE else errors.report(CrosstrafficError(f"cannot print: {error.strerror}"))


if __name__ == "__main__":
    main()
