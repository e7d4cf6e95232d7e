"""Which engine's rank order and rules a command goes by: the one asked for, else vLLM, else Megatron-Core."""

from collections.abc import Callable
from typing import TypeVar

Planned = TypeVar("Planned")
DEFAULTS = ("vllm", "megatron")


def plan_with(framework: str | None, plan: Callable[[str], Planned]) -> tuple[str, Planned]:
    """Plan by one engine; without a name, by vLLM, or by Megatron-Core where vLLM refuses (context parallelism of GQA).

    Both count ranks alike, so degrees that do not fit a world are refused by both.

    Raises:
        ValueError: the engine refuses; if both do, what vLLM says.
    """
    if framework is not None:
        return framework, plan(framework)
    refusals: list[ValueError] = []
    for name in DEFAULTS:
        try:
            return name, plan(name)
        except ValueError as error:
            refusals.append(error)
    raise refusals[0]


def say_chosen(asked: str | None, framework: str) -> None:
    """Tell on stderr that an engine other than vLLM was taken because vLLM refuses."""
    import sys

    if asked is None and framework != "vllm":
        print(f"vllm does not run this layout: shown as {framework}; choose with --framework", file=sys.stderr)
