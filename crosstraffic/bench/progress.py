"""A live line on stderr: what is being measured, how far, how long still. Plain lines where stderr is no terminal."""

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from crosstraffic.bench.plan import Point

PLAIN_EVERY_S = 15.0


class Progress:
    """A progress bar over the points of a plan."""

    def __init__(self, plan: Sequence[Point]) -> None:
        self._plan = plan
        self._console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("{task.description}", table_column=None),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting ranks", total=max(len(plan), 1), left="")
        self._begun = self._said = time.monotonic()
        self._done = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def show(self, done: int, total: int, seconds_left: float) -> None:
        """Say that ``done`` of ``total`` points are measured; ``seconds_left`` bounds what is still to come."""
        label = self._plan[done].label if done < len(self._plan) else "finishing"
        left = self._left(done, total, seconds_left)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, total=max(total, 1), description=label[:48], left=left)
            return
        now = time.monotonic()
        is_last = done == total and total > 0 and self._done < total
        self._done = done
        if now - self._said >= PLAIN_EVERY_S or is_last:
            self._said = now
            print(f"{done}/{total} points, {label}, {left}", file=sys.stderr, flush=True)

    def _left(self, done: int, total: int, bound_s: float) -> str:
        """Time left by the pace so far, never more than the budget allows."""
        if not done:
            return f"at most {bound_s:.0f} s left"
        pace_s = (time.monotonic() - self._begun) / done * (total - done)
        return f"about {min(pace_s, bound_s):.0f} s left"
