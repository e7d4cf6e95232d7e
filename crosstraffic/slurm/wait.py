"""Wait until nothing about some jobs changes any more."""

import time
from collections.abc import Callable, Sequence

from crosstraffic.errors import EnvironmentRefused
from crosstraffic.slurm.follow import Followed

FIRST_PAUSE_S, LAST_PAUSE_S, GROWTH = 1.0, 15.0, 1.5


def wait(
    look: Callable[[], Sequence[Followed]],
    *,
    every_s: float | None = None,
    on_look: Callable[[Sequence[Followed]], None] = lambda found: None,
    on_refusal: Callable[[EnvironmentRefused], None] = lambda refusal: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[Followed]:
    """Look again and again until every job is over, or one is blocked; return what was seen last.

    Pauses grow from 1 to 15 s, or are ``every_s``. A Slurm that does not answer for a while (its controller starts
    anew) is asked again.

    Raises:
        EnvironmentRefused: it did not even answer the first time.
    """
    found = look()
    pause_s = every_s or FIRST_PAUSE_S
    while True:
        on_look(found)
        if all(one.is_settled for one in found) or any(one.exit_code == 3 for one in found):
            return found
        sleep(pause_s)
        pause_s = every_s or min(pause_s * GROWTH, LAST_PAUSE_S)
        try:
            found = look()
        except EnvironmentRefused as refusal:
            on_refusal(refusal)
