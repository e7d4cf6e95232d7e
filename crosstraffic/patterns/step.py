"""One whole prefill, decode or handoff step: which streams, in which order, and what may run at the same time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call of a stream within a step.

    ``groups`` are the indices of the stream's groups that make the call (None: all); ``edge`` keeps only the bytes from
    one member of the group to another (one pipeline boundary of a chain). ``called`` is the name of the call where
    ``stream`` is another one that is the same communication.
    """

    stream: str
    payload_bytes: int
    groups: tuple[int, ...] | None = None
    edge: tuple[int, int] | None = None
    called: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Tasks in order, the whole of them ``repeat`` times (a layer, say)."""

    repeat: int
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Lanes run at the same time; within a lane a rank makes its calls one after the other, in order."""

    name: str
    phase: str
    lanes: tuple[tuple[Block, ...], ...]

    def tasks(self, lane: int) -> tuple[Task, ...]:
        """Return a lane written out."""
        return tuple(task for block in self.lanes[lane] for _ in range(block.repeat) for task in block.tasks)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams in use, in order of first appearance."""
        return tuple(dict.fromkeys(task.stream for lane in self.lanes for block in lane for task in block.tasks))


def step_to_dict(step: Step) -> dict[str, Any]:
    """Turn a step into JSON types."""
    return {
        "name": step.name,
        "phase": step.phase,
        "lanes": [
            [
                {
                    "repeat": block.repeat,
                    "tasks": [
                        {
                            "stream": task.stream,
                            "payload_bytes": task.payload_bytes,
                            "groups": None if task.groups is None else list(task.groups),
                            "edge": None if task.edge is None else list(task.edge),
                            "called": task.called,
                        }
                        for task in block.tasks
                    ],
                }
                for block in lane
            ]
            for lane in step.lanes
        ],
    }


def step_from_dict(data: Mapping[str, Any]) -> Step:
    """Read back what ``step_to_dict`` wrote.

    Raises:
        ValueError: a field is missing or wrong.
    """
    try:
        return Step(
            name=data["name"],
            phase=data["phase"],
            lanes=tuple(
                tuple(
                    Block(
                        repeat=block["repeat"],
                        tasks=tuple(
                            Task(
                                stream=task["stream"],
                                payload_bytes=task["payload_bytes"],
                                groups=None if task.get("groups") is None else tuple(task["groups"]),
                                edge=None if task.get("edge") is None else (task["edge"][0], task["edge"][1]),
                                called=task.get("called"),
                            )
                            for task in block["tasks"]
                        ),
                    )
                    for block in lane
                )
                for lane in data["lanes"]
            ),
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not a step: {error!r}") from error
