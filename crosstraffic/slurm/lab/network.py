"""The commands of ip and tc that make and unmake a lab's network. Pure: lists of words, no shell.

One bridge; per node a network namespace and a pair of virtual Ethernet ports. Both directions of a port are shaped
by HTB, with a class of its own for each slow pair and a byte queue of known depth in front.
"""

from collections.abc import Iterator

from crosstraffic.slurm.lab.spec import LabSpec

Command = tuple[str, ...]
BRIDGE = "ctlab"
NETWORK = "10.77.0"
CONTROLLER = f"{NETWORK}.1"
PORT = "eth0"


def namespace(node: str) -> str:
    """Return the network namespace of a node; its port on the bridge has the same name."""
    return f"{BRIDGE}-{node}"


def address(node: str) -> str:
    """Return the address of a node.

    >>> address("n3")
    '10.77.0.13'
    """
    return f"{NETWORK}.{10 + int(node[1:])}"


def inside(node: str, command: Command) -> Command:
    """Return a command to be run in the network and under the host name of a node, with shared memory of its own."""
    return (
        "ip",
        "netns",
        "exec",
        namespace(node),
        "unshare",
        "-um",
        "sh",
        "-c",
        'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"',
        node,
        *command,
    )


def _queue_bytes(spec: LabSpec, rate: int) -> int:
    return max(64 * 1024, int(rate / 8 * spec.queue_s))


def _shape(port: str, match: str, rate: int, pairs: list[tuple[str, int]], spec: LabSpec) -> Iterator[Command]:
    """Shape what leaves a port: the whole at ``rate``, packets whose ``match`` (src or dst) is a node at their own."""

    def class_of(minor: str, parent: str, bits: int) -> Command:
        burst = ("burst", "32kb", "cburst", "32kb", "quantum", "1514")
        return (
            "tc",
            "class",
            "add",
            "dev",
            port,
            "parent",
            parent,
            "classid",
            minor,
            "htb",
            "rate",
            f"{bits}bit",
            "ceil",
            f"{bits}bit",
            *burst,
        )

    def queue(minor: str, bits: int) -> Command:
        return ("tc", "qdisc", "add", "dev", port, "parent", minor, "bfifo", "limit", str(_queue_bytes(spec, bits)))

    yield ("tc", "qdisc", "add", "dev", port, "root", "handle", "1:", "htb", "default", "10")
    yield class_of("1:1", "1:", rate)
    yield class_of("1:10", "1:1", rate)
    yield queue("1:10", rate)
    for index, (node, bits) in enumerate(pairs):
        minor = f"1:{100 + index}"
        yield class_of(minor, "1:1", bits)
        yield queue(minor, bits)
        yield (
            "tc", "filter", "add", "dev", port, "parent", "1:", "protocol", "ip", "prio", "1", "u32",
            "match", "ip", match, f"{address(node)}/32", "flowid", minor,
        )  # fmt: skip


def commands_up(spec: LabSpec) -> Iterator[Command]:
    """Yield what makes the network, in order."""
    yield ("ip", "link", "add", BRIDGE, "type", "bridge")
    yield ("ip", "address", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
    yield ("ip", "link", "set", BRIDGE, "up")
    for node in spec.nodes:
        name = namespace(node)
        within = ("ip", "netns", "exec", name)
        yield ("ip", "netns", "add", name)
        yield ("ip", "link", "add", name, "type", "veth", "peer", "name", PORT, "netns", name)
        yield ("ip", "link", "set", name, "master", BRIDGE, "up")
        yield (*within, "ip", "link", "set", "lo", "up")
        yield (*within, "ip", "address", "add", f"{address(node)}/24", "dev", PORT)
        yield (*within, "ip", "link", "set", PORT, "up")
        whole = spec.rate(node, None), spec.rate(None, node)
        others = [other for other in spec.nodes if other != node]
        sent = [
            (other, rate)
            for other in others
            if (rate := spec.rate(node, other)) < min(whole[0], spec.rate(None, other))
        ]
        yield from ((*within, *command) for command in _shape(PORT, "dst", whole[0], sent, spec))
        yield from _shape(name, "src", whole[1], [], spec)


def commands_down(spec: LabSpec) -> Iterator[Command]:
    """Yield what unmakes the network; each may fail if its part is gone already."""
    for node in spec.nodes:
        yield ("ip", "netns", "delete", namespace(node))
        yield ("ip", "link", "delete", namespace(node))
    yield ("ip", "link", "delete", BRIDGE)
