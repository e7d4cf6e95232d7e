"""Degree rules: what an engine says against a degree of one parallelism because of the degree of another one."""

from dataclasses import replace

from crosstraffic.patterns.handoff import check_pools
from crosstraffic.patterns.layout import Layout, check_layout
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.placement import check_model

FACTORS = (2, 3, 4, 8, 16)


def refusal(layout: Layout, framework: str, **degrees: int) -> str | None:
    """Return what is said against a layout with these degrees instead, None if the engine takes it."""
    try:
        check_layout(replace(layout, **degrees), framework)
    except ValueError as error:
        return str(error)
    return None


def degree_rule(layout: Layout, framework: str, first: str, second: str) -> str | None:
    """Return the engine's rule that ties two degrees to each other, None if each can grow without the other.

    One degree, some times as large, is refused; it is taken once the other grows as much, or is 1.

    >>> degree_rule(Layout(dp=2, ep=2), "vllm", "dp", "ep")
    'vLLM: expert parallel size is dp x cp x tp = 4, or 1 (off): ep=2 (dp=4,ep=2)'
    >>> degree_rule(Layout(tp=2, pp=2, ep=2), "vllm", "pp", "ep") is None
    True
    """
    for one, other in ((first, second), (second, first)):
        degree: int | None = getattr(layout, one, None)
        beside: int | None = getattr(layout, other, None)
        if degree is None or beside is None:
            continue
        for times in FACTORS:
            larger = {one: degree * times}
            said = refusal(layout, framework, **larger)
            if said and None in (refusal(layout, framework, **larger, **{other: new}) for new in (beside * times, 1)):
                return said
    return None


def handoff_rule(shape: ModelShape, layout: Layout, decode_layout: Layout, framework: str, name: str) -> str | None:
    """Return what the engine says against a decode pool of another degree than the prefill pool's, None if nothing.

    Tried is every degree up to four times that of the prefill pool with which the engine runs the model at all.

    >>> from crosstraffic.patterns.model import load_model
    >>> handoff_rule(load_model("Kimi-K3"), Layout(tp=2), Layout(tp=2), "vllm", "tp")[:67]
    'Local tensor parallel size 3 is not divisible by remote tensor para'
    """
    degree: int | None = getattr(layout, name, None)
    for other in range(1, 4 * degree + 1) if degree is not None else ():
        pool = replace(decode_layout, **{name: other}, etp=None)
        try:
            check_model(shape, pool, framework)
        except ValueError:
            continue
        try:
            check_pools(shape, layout, pool, framework)
        except ValueError as error:
            return str(error)
    return None
