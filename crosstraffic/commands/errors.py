"""Turn errors into one line on stderr and the exit code that the design gives them."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from crosstraffic.errors import CrosstrafficError, UsageError

MAX_SHOWN = 60  # characters of a value that is refused
TOO_LONG = re.compile(r"(\S{60})\S{140,}")


@contextmanager
def planning(what: str) -> Iterator[None]:
    """Wrap the reading and checking of what a user asked: a bad value becomes a UsageError that says for what."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from error


def report(error: CrosstrafficError) -> int:
    """Print an error for a person; return the exit code."""
    text = one_line(str(error)) if isinstance(error, UsageError) else str(error)
    print(f"error: {text}", file=sys.stderr)
    return error.exit_code


def one_line(text: str) -> str:
    r"""Keep an error on one line of some length, whatever was asked: control characters escaped, endless words cut.

    >>> one_line("no such file: a\nb"), len(one_line("x" * 5000))
    ('no such file: a\\nb', 63)
    """
    shown = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return TOO_LONG.sub(r"\1...", shown)


def usage_line(error: Exception) -> str:
    """Say what the parser of the command line refuses: the option, the value where it knows it, and why."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    cause = error.__cause__
    if cause is not None and hasattr(cause, "errors"):
        message = f"{message}: {_shown(cause.errors()[0]['input'])}"
    return message


def _shown(value: object) -> str:
    """Write a value that a person gave; a long one is cut, whatever separates its words."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
