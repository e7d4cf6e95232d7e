"""The handoff that ``crosstraffic traffic`` shows: both pools, the encoders before them, and where their ranks lie."""

from collections.abc import Mapping
from dataclasses import dataclass

from crosstraffic.patterns.encoder import encoder_streams
from crosstraffic.patterns.handoff import Handoff, handoff
from crosstraffic.patterns.layout import Layout, world_size
from crosstraffic.patterns.model import ModelShape
from crosstraffic.patterns.stream import Stream
from crosstraffic.patterns.workload import Workload

MAX_ENCODERS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """What is asked of encoders: how many, embeddings of each request (None: no image, no audio), and the way."""

    number: int = 1
    tokens: int | None = None
    through_first: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.number <= MAX_ENCODERS:
            raise ValueError(f"--encoders must be a whole number from 1 to {MAX_ENCODERS}: {self.number}")
        if self.tokens is None and (self.number > 1 or self.through_first):
            raise ValueError("--encoders and --encoder-through-first need --encoder-tokens, embeddings of a request")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A handoff, what encoders send before it, and their ranks: behind those of both pools."""

    handoff: Handoff
    embeddings: tuple[Stream, ...]
    encoder_ranks: tuple[int, ...]


def plan_handoff(
    shape: ModelShape,
    layouts: tuple[Layout, Layout],
    instances: tuple[int, int],
    workload: Workload,
    encoders: Encoders,
    framework: str,
) -> Planned:
    """Plan a handoff from prefill ranks 0.. to the decode ranks behind them, encoders behind both.

    Raises:
        ValueError: see ``handoff`` and ``encoder_streams``.
    """
    prefill, decode = (
        max(0, number) * world_size(layout, framework) for number, layout in zip(instances, layouts, strict=True)
    )
    moved = handoff(
        shape,
        *layouts,
        workload,
        prefill_ranks=range(prefill),
        decode_ranks=range(prefill, prefill + decode),
        framework=framework,
        prefill_instances=instances[0],
        decode_instances=instances[1],
    )
    if encoders.tokens is None:
        return Planned(handoff=moved, embeddings=(), encoder_ranks=())
    ranks = range(prefill + decode, prefill + decode + encoders.number)
    embeddings = encoder_streams(
        shape,
        layouts[0],
        workload,
        num_tokens=encoders.tokens,
        encoder_ranks=ranks,
        prefill_ranks=range(prefill),
        framework=framework,
        prefill_instances=instances[0],
        through_first=encoders.through_first,
    )
    return Planned(handoff=moved, embeddings=embeddings, encoder_ranks=tuple(ranks))


def check_phase(phase: str, options: Mapping[str, tuple[object, object]]) -> None:
    """Raise ValueError for an option of the handoff, (value, default), that is given in another phase."""
    for option, (value, default) in options.items():
        if phase != "handoff" and value != default:
            raise ValueError(f"{option} belongs to --phase handoff, the phase is {phase}: {value}")
