"""Turn errors into one line on stderr and the exit code that the design gives them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from crosstraffic.errors import CrosstrafficError, UsageError


@contextmanager
def planning(what: str) -> Iterator[None]:
    """Wrap the reading and checking of what a user asked: a bad value becomes a UsageError that says for what."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{what}: {error}") from error


def report(error: CrosstrafficError) -> int:
    """Print an error for a person; return the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code
