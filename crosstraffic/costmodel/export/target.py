"""Target: what an exporter must be told that was not measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from crosstraffic.costmodel.export.files import check_name

Framework = Literal["vllm", "sglang", "trtllm"]
Topology = Literal["Switch", "Ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Names, sizes and choices of an export.

    Raises:
        ValueError: a name that cannot be part of a path, a count that is not positive, an unknown framework.
    """

    system: str
    gpus_per_node: int
    num_nodes: int = 1
    framework: Framework = "vllm"
    framework_version: str = "1.0.0"
    nccl_version: str = "0.0.0"
    kernel: str | None = None
    custom_kernel: str | None = None
    ranks: tuple[int, ...] = ()  # further group sizes to predict
    base: Mapping[str, Any] | None = None  # a system of the planner that gives what is not measured
    inter_node_bytes_per_s: float | None = None
    topology: Topology = "Switch"
    strided_as_consecutive: bool = False
    overlap_coefficient: float | None = None

    def __post_init__(self) -> None:
        for what in ("system", "framework_version", "nccl_version"):
            check_name(what.replace("_", "-"), getattr(self, what))
        if self.framework not in get_args(Framework):
            raise ValueError(f"unknown framework: {self.framework!r}; allowed: {', '.join(get_args(Framework))}")
        if self.topology not in get_args(Topology):
            raise ValueError(f"unknown topology: {self.topology!r}; allowed: {', '.join(get_args(Topology))}")
        for what, count in (("gpus-per-node", self.gpus_per_node), ("nodes", self.num_nodes)):
            if count < 1:
                raise ValueError(f"{what} must be at least 1: {count}")
        if any(count < 2 for count in self.ranks):
            raise ValueError(f"a group has at least 2 ranks: {min(self.ranks)}")
        if self.inter_node_bytes_per_s is not None and not self.inter_node_bytes_per_s > 0:
            raise ValueError(f"the bandwidth between nodes must be positive: {self.inter_node_bytes_per_s}")
        if self.overlap_coefficient is not None and not self.overlap_coefficient >= 1:
            raise ValueError(f"an overlap coefficient is a slowdown, 1 or more: {self.overlap_coefficient}")
