"""Routing: who sends how many messages to whom in dispatch and combine, and the byte matrices that follow.

What one message is for depends on the dispatcher: each (token, expert), nothing de-duplicated, as low-latency kernels
and plain all-to-all dispatchers do it; or each (token, rank) or (token, node) that holds one of the token's experts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from crosstraffic.patterns.distinct import check_groups, hit_chances
from crosstraffic.patterns.loads import LOADS, Floats, expert_shares
from crosstraffic.patterns.matrix import Matrix, round_rows
from crosstraffic.patterns.matrix_file import read_counts, read_matrix
from crosstraffic.patterns.replicas import placement

Direction = Literal["dispatch", "combine"]
Copies = Literal["expert", "rank", "node", "fanout"]
DISTRIBUTIONS: tuple[str, ...] = (*LOADS, "one_hot", "explicit")
FORMS = "uniform, power_law:A, lognormal:S, k_hot:N, one_hot:RANK"
FILE_FORMS = "counts:FILE, counts:FILE#LAYER, matrix:FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Dispatch or combine of a mixture of experts over one group; the same expert load in every group.

    ``num_tokens`` is the number of tokens that each rank of the group routes; ``source_tokens``, where they differ,
    those of each rank, for each expert-parallel group or one for all. ``parameter``: alpha of power_law, sigma of
    lognormal, how many experts of k_hot, which rank of one_hot; ``weights`` the load per expert of explicit. one_hot
    sends every message to one rank, whatever experts it holds: the worst case.

    ``copies`` says where a token is sent once: to each ``expert``; to each ``rank`` that holds one; to each ``node``,
    to the rank there that has the sender's index (the groups are these ranks, one on each of ``num_nodes`` nodes); or,
    ``fanout``, from there to each rank of the node (the groups are the ranks of a node). In the latter two,
    ``ep_ranks`` is the size of the whole expert-parallel group.

    A token's experts are in ``topk_groups`` of ``num_groups`` groups, which matters where copies are saved.
    ``redundant_experts`` replicas are placed by the load, perfectly known, as a load balancer does (see ``replicas``).
    """

    num_tokens: int
    top_k: int
    num_experts: int
    bytes_per_message: int
    distribution: str = "uniform"
    parameter: float = 0.0
    seed: int = 0
    direction: Direction = "dispatch"
    weights: tuple[float, ...] = ()
    source_tokens: tuple[tuple[int, ...], ...] = ()
    copies: Copies = "expert"
    ep_ranks: int | None = None
    num_nodes: int = 1
    num_groups: int = 1
    topk_groups: int = 1
    redundant_experts: int = 0
    kind: str = "routed"

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"unknown routing: {self.distribution!r}; allowed: {', '.join(DISTRIBUTIONS)}")
        if self.direction not in ("dispatch", "combine"):
            raise ValueError(f"unknown direction: {self.direction!r}; allowed: dispatch, combine")
        if self.copies not in get_args(Copies):
            raise ValueError(f"unknown copies: {self.copies!r}; allowed: {', '.join(get_args(Copies))}")
        if min(self.num_tokens, self.bytes_per_message, self.redundant_experts) < 0:
            raise ValueError("num_tokens, bytes_per_message and redundant_experts must not be negative")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be between 1 and the number of experts: {self.top_k} of {self.num_experts}")
        if any(min(tokens, default=0) < 0 for tokens in self.source_tokens):
            raise ValueError(f"source_tokens must not be negative: {self.source_tokens}")
        if (self.copies in ("node", "fanout")) != (self.ep_ranks is not None):
            raise ValueError(f"ep_ranks goes with copies node and fanout, and only with these: {self.copies}")
        check_groups(self.num_experts, self.top_k, self.num_groups, self.topk_groups)
        self._check_distribution()

    def _check_distribution(self) -> None:
        if not isfinite(self.parameter):
            raise ValueError(f"{self.distribution}: the parameter must be a finite number: {self.parameter}")
        if self.distribution in ("power_law", "lognormal") and self.parameter < 0:
            raise ValueError(f"{self.distribution}: the parameter must not be negative: {self.parameter}")
        if self.distribution == "k_hot" and not self.top_k <= self.parameter <= self.num_experts:
            raise ValueError(
                f"k_hot: the number of hot experts must be between top_k={self.top_k} and {self.num_experts}: "
                f"{self.parameter:g}"
            )
        if self.distribution == "one_hot" and (self.parameter < 0 or self.parameter != int(self.parameter)):
            raise ValueError(f"one_hot: the rank must be a whole number from 0: {self.parameter:g}")
        if (self.distribution == "explicit") != bool(self.weights):
            raise ValueError("weights go with distribution explicit, and only with it")
        if self.weights and (len(self.weights) != self.num_experts or min(self.weights) < 0):
            raise ValueError(
                f"explicit: {self.num_experts} weights are needed, none negative: {len(self.weights)} given"
            )

    @property
    def by_group(self) -> bool:
        """Whether groups of the same size may have different matrices."""
        return (
            len(self.source_tokens) > 1
            or self.copies == "fanout"
            or (self.copies == "node" and bool(self.source_tokens))
        )

    def counts(self, num_ranks: int, group_index: int = 0) -> Matrix:
        """Return messages per call ``[source][destination]`` of dispatch, in a group of ``num_ranks``.

        Without de-duplication each row sums to its tokens * top_k.
        """
        total = self.ep_ranks or num_ranks
        members = total // self.num_nodes  # ranks of the expert-parallel group on a node
        part = {"node": members, "fanout": self.num_nodes}.get(self.copies, 1)
        place = group_index % part
        if total % self.num_nodes or {"node": self.num_nodes, "fanout": members}.get(self.copies, total) != num_ranks:
            raise ValueError(
                f"a group of {num_ranks} ranks is no part of {total} ranks on {self.num_nodes} nodes: {self.copies}"
            )
        tokens = self._tokens(total, group_index // part)
        shares, chances = _rank_loads(
            replace(self, bytes_per_message=0, direction="dispatch", source_tokens=(), num_tokens=sum(tokens)), total
        )
        sent = np.array(tokens, dtype=np.float64)
        if self.copies == "expert":
            return _rounded(tuple(tokens), self.top_k, shares.tobytes())
        if self.copies == "rank":
            return round_rows(np.outer(sent, chances))
        if self.copies == "node":
            return round_rows(np.outer(sent.reshape(-1, members)[:, place], chances))
        return round_rows(np.outer(sent.reshape(-1, members).sum(axis=0), chances.reshape(-1, members)[place]))

    def expert_loads(self, num_ranks: int) -> Floats:
        """Return the share of all messages of each expert, ``[num_experts]``, in an expert-parallel group.

        Raises:
            ValueError: one_hot, which knows ranks only.
        """
        return expert_shares(
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_tokens=sum(self._tokens(num_ranks, 0)),
            distribution=self.distribution,
            parameter=self.parameter,
            seed=self.seed,
            weights=self.weights,
        )

    def rank_loads(self, num_ranks: int) -> Matrix:
        """Return (token, expert) pairs that each rank of an expert-parallel group works on, ``[num_ranks]``."""
        return np.asarray(replace(self, copies="expert", ep_ranks=None).counts(num_ranks).sum(axis=0))

    def _tokens(self, num_ranks: int, index: int) -> tuple[int, ...]:
        if not self.source_tokens:
            return (self.num_tokens,) * num_ranks
        tokens = self.source_tokens[index if len(self.source_tokens) > 1 else 0]
        if len(tokens) != num_ranks:
            raise ValueError(f"source_tokens of {len(tokens)} ranks do not fit a group of {num_ranks}")
        return tokens

    def matrix(self, num_ranks: int, group_index: int) -> Matrix:
        """Return bytes per call, ``[num_ranks, num_ranks]``; combine is dispatch's way back."""
        counts = self.counts(num_ranks, group_index)
        return np.ascontiguousarray((counts.T if self.direction == "combine" else counts) * self.bytes_per_message)


@lru_cache(maxsize=8)
def _rounded(tokens: tuple[int, ...], top_k: int, shares: bytes) -> Matrix:
    matrix = round_rows(np.outer(np.array(tokens, dtype=np.float64) * top_k, np.frombuffer(shares)))
    matrix.flags.writeable = False
    return matrix


@lru_cache(maxsize=16)
def _rank_loads(rule: Routed, num_ranks: int) -> tuple[Floats, Floats]:
    """Return the share of messages of each rank, and the chance that a token goes to each rank (node, for copies node).

    ``rule.num_tokens`` is the tokens of all ranks together.
    """
    per_node = num_ranks // rule.num_nodes
    if rule.distribution == "one_hot":
        if rule.parameter >= num_ranks:
            raise ValueError(f"one_hot: rank {rule.parameter:g} is not in a group of {num_ranks} ranks")
        hot = np.zeros(num_ranks)
        hot[int(rule.parameter)] = 1.0
        return hot, hot.reshape(-1, per_node).sum(axis=1) if rule.copies == "node" else hot
    placed = rule.num_experts + rule.redundant_experts
    if num_ranks > placed:
        raise ValueError(f"more ranks than experts: {num_ranks} ranks, {placed} experts")
    shares = expert_shares(
        num_experts=rule.num_experts,
        top_k=rule.top_k,
        num_tokens=rule.num_tokens,
        distribution=rule.distribution,
        parameter=rule.parameter,
        seed=rule.seed,
        weights=rule.weights,
    )
    parts = placement(
        rule.num_experts,
        num_ranks,
        num_redundant=rule.redundant_experts,
        weights=shares,
        num_groups=rule.num_groups,
        num_nodes=rule.num_nodes,
    )
    if rule.copies == "expert":
        return shares @ parts, np.zeros(0)
    if rule.copies == "node":
        parts = parts.reshape(rule.num_experts, -1, per_node).sum(axis=2)
    return np.zeros(0), hit_chances(shares, parts, rule.top_k, num_groups=rule.num_groups, topk_groups=rule.topk_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """How uneven a set of loads is; all figures are 0 (max_over_mean 1) for equal loads."""

    max_over_mean: float
    cv: float
    gini: float
    zero_share: float


def imbalance(loads: npt.ArrayLike) -> Imbalance:
    """Return max / mean, coefficient of variation, Gini coefficient and share of zeros of loads (per rank or expert).

    >>> imbalance([0, 0, 0, 4])
    Imbalance(max_over_mean=4.0, cv=1.7320508075688772, gini=0.75, zero_share=0.75)
    """
    values = np.sort(np.asarray(loads, dtype=np.float64).ravel())
    mean = float(values.mean()) if values.size else 0.0
    if mean == 0:
        return Imbalance(max_over_mean=1.0, cv=0.0, gini=0.0, zero_share=1.0 if values.size else 0.0)
    place = 2 * np.arange(1, values.size + 1) - values.size - 1
    return Imbalance(
        max_over_mean=float(values[-1]) / mean,
        cv=float(values.std()) / mean,
        gini=float((place * values).sum() / (values.size * values.sum())),
        zero_share=float((values == 0).mean()),
    )


def parse_routing(text: str) -> tuple[str, float]:
    """Read ``uniform``, ``power_law:1.2``, ``lognormal:1``, ``k_hot:8`` or ``one_hot:0`` into name and parameter.

    >>> parse_routing("power_law:1.2"), parse_routing("uniform")
    (('power_law', 1.2), ('uniform', 0.0))

    Raises:
        ValueError: unknown name, or a parameter that is missing, not a number, or not wanted.
    """
    name, _, value = text.partition(":")
    if name not in DISTRIBUTIONS or name == "explicit":
        raise ValueError(f"unknown routing: {text!r}; allowed: {FORMS}")
    if (name == "uniform") == bool(value):
        raise ValueError(f"routing {name} takes {'no' if name == 'uniform' else 'a'} parameter: {text!r}")
    try:
        return name, float(value) if value else 0.0
    except ValueError as error:
        raise ValueError(f"routing {name}: not a number: {value!r}") from error


def routing_fields(text: str) -> Mapping[str, Any]:
    """Return the fields of a workload that a routing sets: what ``parse_routing`` reads, or the contents of a file.

    ``counts:FILE`` is tokens per expert, layers added up, or those of one layer, ``counts:FILE#LAYER``; ``matrix:FILE``
    bytes per call between the ranks of an expert-parallel group.

    >>> routing_fields("lognormal:1")
    {'routing': 'lognormal', 'routing_parameter': 1.0}

    Raises:
        ValueError: as ``parse_routing``, or a file that cannot be read (named, with the line).
    """
    name, _, value = text.partition(":")
    if name not in ("counts", "matrix"):
        if name not in DISTRIBUTIONS or name == "explicit":
            raise ValueError(f"unknown routing: {text!r}; allowed: {FORMS}, {FILE_FORMS}")
        distribution, parameter = parse_routing(text)
        return {"routing": distribution, "routing_parameter": parameter}
    if not value:
        raise ValueError(f"routing {name} takes a file: {text!r}")
    if name == "matrix":
        return {"routing": "matrix", "routing_matrix": read_matrix(value)}
    path, mark, layer = value.rpartition("#")
    if not mark:
        return {"routing": "explicit", "routing_weights": read_counts(value)}
    if not (layer.isascii() and layer.isdigit()):
        raise ValueError(f"routing counts: the layer must be a whole number from 0: {layer!r}")
    return {"routing": "explicit", "routing_weights": read_counts(path, int(layer))}
