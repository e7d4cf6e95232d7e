"""Which engine's rank order and rules a command goes by: the one asked for, else vLLM, else Megatron-Core."""

import sys
from collections.abc import Callable
from typing import TypeVar

from crosstraffic.commands.errors import one_line

Planned = TypeVar("Planned")
DEFAULTS = ("vllm", "megatron")


def plan_with(framework: str | None, plan: Callable[[str], Planned]) -> tuple[str, Planned]:
    """Plan by one engine; without a name, by vLLM, or by Megatron-Core where vLLM refuses (context parallelism of GQA).

    Both count ranks alike, so degrees that do not fit a world are refused by both. Where vLLM refuses and Megatron-Core
    does not, stderr tells which rule of vLLM's it was.

    Raises:
        ValueError: the engine refuses; if both do, what vLLM says.
    """
    if framework is not None:
        return framework, plan(framework)
    first, second = DEFAULTS
    try:
        return first, plan(first)
    except ValueError as error:
        refusal = error
    try:
        planned = plan(second)
    except ValueError:
        raise refusal from None
    print(one_line(f"shown as {second}, choose with --framework; {first} refuses: {refusal}"), file=sys.stderr)
    return second, planned
