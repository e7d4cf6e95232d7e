"""Ranks as a box with named dimensions, and Megatron-Core's ways of cutting it: order strings and grids with views."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from crosstraffic.patterns.rank_order import Groups, Ranks, all_ranks, cut


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """A box of ranks; the first name is the fastest dimension.

    >>> RankGrid(shape=(2, 2, 2), names=("tp", "pp", "dp")).groups("dp")
    ((0, 4), (1, 5), (2, 6), (3, 7))

    Source: Megatron-LM @ d98e8a64ddf3 core/hyper_comm_grid.py HyperCommGrid.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    rank_offset: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.names):
            raise ValueError(f"as many sizes as names of dimensions are needed: {self.shape} and {self.names}")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"duplicate names of dimensions: {', '.join(self.names)}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"sizes of dimensions must be whole numbers from 1: {self.shape}")
        if self.rank_offset < 0:
            raise ValueError(f"rank_offset must not be negative: {self.rank_offset}")

    @property
    def size(self) -> int:
        """Ranks of the grid."""
        return prod(self.shape)

    def stride(self, name: str) -> int:
        """Return how far apart neighbours along a dimension are.

        >>> RankGrid(shape=(2, 3, 4), names=("tp", "cp", "dp")).stride("dp")
        6
        """
        return prod(self.shape[: self._index(name)])

    def groups(self, *wanted: str, ranks: Ranks | None = None) -> Groups:
        """Return the groups of one or several dimensions, in whatever order these are named.

        Within a group the first dimension of the grid is fastest; so it is among groups, over the other dimensions.
        ``ranks`` stands in for 0, 1, ...; a whole number of grids may follow each other in it.

        Raises:
            ValueError: not a dimension of the grid.
        """
        members = {self._index(name) for name in wanted}
        if ranks is None:
            ranks = all_ranks(self.rank_offset + self.size)[self.rank_offset :]
        count = len(self.shape)
        slow_first = ranks.reshape(-1, *reversed(self.shape))
        outside = [count - index for index in reversed(range(count)) if index not in members]
        inside = [count - index for index in sorted(members, reverse=True)]
        return cut(slow_first.transpose(0, *outside, *inside), prod(self.shape[index] for index in members))

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ValueError(f"not a dimension of the grid: {name!r}; allowed: {', '.join(self.names)}")
        return self.names.index(name)


def check_fits(grid: RankGrid, world: int) -> None:
    """Raise ValueError for a grid that takes more ranks than there are behind its offset.

    Source: Megatron-LM @ d98e8a64ddf3 core/hyper_comm_grid.py HyperCommGrid.__init__.
    """
    if grid.size > world - grid.rank_offset:
        raise ValueError(
            f"Grid shape {list(grid.shape)} is over sized with world size {world} and rank offset {grid.rank_offset}"
        )


def check_view(base: RankGrid, view: RankGrid, shared: Sequence[str]) -> None:
    """Raise ValueError for another factorization of the same ranks that does not fit the first one.

    Groups of ``shared`` dimensions, each and all of them together, must be the same in both, in the same order.

    Source: Megatron-LM @ d98e8a64ddf3 core/hyper_comm_grid.py HyperCommGrid.register_view.
    """
    if (view.size, view.rank_offset) != (base.size, base.rank_offset):
        raise ValueError(
            f"view shape {list(view.shape)} has size {view.size}, but the grid size is {base.size} "
            f"(offsets {view.rank_offset} and {base.rank_offset})"
        )
    if len(set(shared)) != len(shared):
        raise ValueError(f"duplicate shared dimensions: {', '.join(shared)}")
    for names in (*((name,) for name in shared), tuple(shared)):
        if base.groups(*names) != view.groups(*names):
            raise ValueError(
                f"shared dimension {'-'.join(names)} has different membership across views: "
                f"{_described(base)} and {_described(view)}"
            )


def _described(grid: RankGrid) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(grid.names, grid.shape, strict=True))


def ordered_names(sizes: Mapping[str, int], order: str) -> tuple[str, ...]:
    """Read an order string, leftmost fastest; names that it lacks and whose size is 1 come last.

    >>> ordered_names({"tp": 2, "ep": 1, "dp": 2}, "dp-tp")
    ('dp', 'tp', 'ep')

    Raises:
        ValueError: a name that is none of ``sizes`` or comes twice; a size above 1 that the order lacks.

    Source: Megatron-LM @ d98e8a64ddf3 core/parallel_state.py RankGenerator.
    """
    names = order.lower().split("-")
    if len(set(names)) != len(names) or not set(names) <= set(sizes):
        raise ValueError(f"order must name each of {', '.join(sizes)} at most once, joined by '-': {order!r}")
    for name, size in sizes.items():
        if name not in names and size != 1:
            raise ValueError(f"the size of ({name}) is ({size}), but you haven't specified the order ({order})")
    return (*names, *(name for name in sizes if name not in names))


def order_grid(sizes: Mapping[str, int], order: str) -> RankGrid:
    """Return the grid of an order string: ``order_grid({"tp": 2, "dp": 4}, "tp-dp")``.

    Raises:
        ValueError: a wrong order, or both ep and cp above 1, which are never in one grid: cp is of the dense layers.

    Source: Megatron-LM @ d98e8a64ddf3 core/parallel_state.py RankGenerator.
    """
    ep, cp = sizes.get("ep", 1), sizes.get("cp", 1)
    if ep > 1 and cp > 1:
        raise ValueError(
            f"Both EP and CP > 1 is not allowed in one rank generator: ep {ep}, cp {cp}; CP belongs to the grid of "
            "dense layers, EP to that of experts"
        )
    names = ordered_names(sizes, order)
    return RankGrid(shape=tuple(sizes[name] for name in names), names=names)
