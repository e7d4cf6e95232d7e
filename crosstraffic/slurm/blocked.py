"""Blocked: a job that waits for nodes which nobody has put back into service."""

from collections.abc import Mapping

from crosstraffic.errors import EnvironmentRefused
from crosstraffic.slurm.nodelist import expand
from crosstraffic.slurm.submit import ask

# States that end when somebody resumes the node, not by themselves. Source: sinfo(1), node state codes.
OUT_OF_SERVICE = frozenset({"down", "drained", "draining", "fail", "failing"})
_FLAGS = "*~#!%$@^-"  # after a state: does not answer, powers up, is to boot ...


def read_nodes(text: str) -> Mapping[str, tuple[str, str]]:
    """Return state and reason of each node from ``sinfo -h -N -o "%N|%T|%E"``; a node is told once a partition.

    >>> read_nodes("n1|drained*|bad cable")
    {'n1': ('drained', 'bad cable')}
    """
    lines = [line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2]
    return {node: (state.rstrip(_FLAGS), "" if reason == "none" else reason) for node, state, reason in lines}


def out_of_service(job: Mapping[str, str], nodes: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Return the nodes, with state and reason, that keep a job from ever starting; empty where it merely waits.

    ``job`` has the fields of ``scontrol show job``, ``nodes`` those of its partition. It cannot start if fewer nodes
    than it asks for are in service. Features that it asks for are not looked at: where they narrow the choice, it may
    be blocked without being called so.

    >>> nodes = {"n0": ("idle", ""), "n1": ("drained", "bad cable")}
    >>> out_of_service({"NumNodes": "2-2"}, nodes), out_of_service({"NumNodes": "1"}, nodes)
    ({'n1': 'drained: bad cable'}, {})
    """
    excluded = _listed(job, "ExcNodeList") or ()
    wanted = [node for node in _listed(job, "ReqNodeList") or nodes if node not in excluded]
    least = job.get("NumNodes", "1").partition("-")[0]
    out = {node: nodes[node] for node in wanted if node in nodes and nodes[node][0] in OUT_OF_SERVICE}
    if not least.isdigit() or len(wanted) - len(out) >= int(least):
        return {}
    return {node: f"{state}: {reason}" if reason else state for node, (state, reason) in out.items()}


def _listed(job: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = job.get(name, "")
    return expand(text) if text and text != "(null)" else None


def blocked(job: Mapping[str, str]) -> dict[str, str]:
    """Ask Slurm for the nodes that keep a pending job from ever starting.

    Raises:
        EnvironmentRefused: it does not answer.
    """
    partition = job.get("Partition", "(null)")
    where = ("-a",) if partition == "(null)" else ("-p", partition)
    said = ask(("sinfo", "-h", "-N", *where, "-o", "%N|%T|%E"))
    if said.returncode:
        raise EnvironmentRefused(f"sinfo does not tell the state of nodes: {said.stderr.strip()}")
    return out_of_service(job, read_nodes(said.stdout))
