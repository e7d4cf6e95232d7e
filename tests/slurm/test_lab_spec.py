"""What a lab is asked to be, the commands that follow, and what is refused."""

import pytest

from crosstraffic.slurm.lab.files import hosts, slurm_conf
from crosstraffic.slurm.lab.network import commands_down, commands_up, inside
from crosstraffic.slurm.lab.spec import LabSpec, parse_limit, parse_rate, spec_from_dict, spec_to_dict

MBIT = 10**6


def spec_of(*limits: str, num_nodes: int = 4) -> LabSpec:
    asked = tuple(limit for text in limits for limit in parse_limit(text))
    return LabSpec(num_nodes=num_nodes, rate_bits_per_s=200 * MBIT, limits=asked)


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ("n2=50mbit", {("n2", None), (None, "n2"), ("n2", "n0"), ("n0", "n2")}),
        ("n2>=50mbit", {("n2", None), ("n2", "n0")}),
        ("n2<=50mbit", {(None, "n2"), ("n0", "n2")}),
        ("n0-n2=50mbit", {("n0", "n2"), ("n2", "n0")}),
        ("n0>n2=50mbit", {("n0", "n2")}),
        ("n0<n2=50mbit", {("n2", "n0")}),
    ],
)
def test_a_limit_slows_what_it_names_and_nothing_else(text: str, slow: set[tuple[str | None, str | None]]) -> None:
    spec = spec_of(text)
    asked = {("n2", None), (None, "n2"), ("n2", "n0"), ("n0", "n2"), ("n0", "n1"), ("n1", "n0"), ("n0", None)}
    assert {way for way in asked if spec.rate(*way) == 50 * MBIT} == slow
    assert {spec.rate(*way) for way in asked - slow} == {200 * MBIT}


def test_a_spec_survives_its_file() -> None:
    spec = spec_of("n2=50mbit", "n0>n1=1mbit")
    assert spec_from_dict(spec_to_dict(spec)) == spec


def test_the_network_shapes_both_directions_of_every_port_and_slow_pairs() -> None:
    made = [" ".join(command) for command in commands_up(spec_of("n3<=20mbit", "n0>n1=50mbit"))]
    roots = [line for line in made if "qdisc add" in line and " root " in line]
    assert len(roots) == 8
    assert [line for line in made if "classid 1:1 " in line and "20000000bit" in line] == [
        line for line in made if line.startswith("tc class add dev ctlab-n3 parent 1: ")
    ]
    pairs = [line for line in made if "u32" in line]
    assert len(pairs) == 1
    assert pairs[0].startswith("ip netns exec ctlab-n0 tc filter")
    assert "dst 10.77.0.11/32" in pairs[0]


def test_what_was_made_is_unmade() -> None:
    spec = spec_of()
    made = {
        command[3] for command in commands_up(spec) if command[:3] in (("ip", "netns", "add"), ("ip", "link", "add"))
    }
    assert made == {command[3] for command in commands_down(spec)}


def test_words_of_a_command_stay_words() -> None:
    words = inside("n1", ("echo", "$(reboot)", "; reboot", "--help"))
    assert words[-4:] == ("echo", "$(reboot)", "; reboot", "--help")
    assert words[7:9] == ("-c", 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"')


def test_files_name_every_node(tmp_path) -> None:
    spec = spec_of(num_nodes=3)
    conf = slurm_conf(spec, tmp_path, 1000)
    assert [line.split()[:3] for line in conf.splitlines() if line.startswith("NodeName")] == [
        [f"NodeName=n{index}", f"NodeAddr=10.77.0.1{index}", "CPUs=2"] for index in range(3)
    ]
    assert hosts(spec).splitlines()[-1] == "10.77.0.12 n2"


@pytest.mark.parametrize("text", ["", "fast", "200", "200mbps", "-1mbit", "1e9mbit", "10kbit", "200gbit", "nanmbit"])
def test_a_wrong_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "n1", "n1=", "n1=fast", "n1-=1mbit", "n1-n1=1mbit", "x=1mbit", "n1~n2=1mbit"])
def test_a_wrong_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a link|not a rate|joins two nodes"):
        parse_limit(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 0}, "nodes must be from 1 to 64: 0"),
        ({"num_nodes": 65}, "nodes must be from 1 to 64: 65"),
        ({"ranks_per_node": 0}, "ranks per node must be from 1"),
        ({"queue_s": 0.0}, "queue must be"),
        ({"limits": parse_limit("n7=1mbit")}, "no such node: n7; there are n0 to n3"),
        (
            {"limits": (*parse_limit("n1=50mbit"), *parse_limit("n1>=60mbit"))},
            "second one: n1 to all at 60000000 bit/s",
        ),
        ({"limits": parse_limit("n1=300mbit")}, "slower than the lab's, not faster"),
    ],
)
def test_a_wrong_lab_is_refused(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LabSpec(**{"num_nodes": 4, "rate_bits_per_s": 200 * MBIT, **change})
