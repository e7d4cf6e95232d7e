"""``crosstraffic lab``: a Slurm cluster with links of known rate, on this machine, to try things on."""

from typing import Annotated

import typer

lab = typer.Typer(
    no_args_is_help=True, help="A Slurm cluster of network namespaces on this machine, with links of known rate."
)


@lab.command()
def up(
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes n0, n1, ...")] = 4,
    rate: Annotated[str, typer.Option("--rate", help="Of each node's port, both directions: 200mbit.")] = "200mbit",
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Processors that Slurm sees on a node.")] = 2,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            "--slow",
            help="An unequal link: n2=50mbit (a node), 'n2>=50mbit' (what it sends), 'n2<=50mbit' (what it gets), "
            "n0-n3=50mbit (a pair), 'n0>n3=50mbit' (one direction of a pair). May be repeated.",
        ),
    ] = None,
    queue: Annotated[float, typer.Option("--queue", help="Depth of the queue before a link, in seconds.")] = 0.1,
) -> None:
    """Bring the lab up; one that is up as asked already is left as it is. Needs root."""
    from crosstraffic.commands.errors import planning
    from crosstraffic.slurm.lab import cluster
    from crosstraffic.slurm.lab.spec import LabSpec, parse_limit, parse_rate

    with planning("lab"):
        spec = LabSpec(
            num_nodes=nodes,
            rate_bits_per_s=parse_rate(rate),
            ranks_per_node=ranks_per_node,
            limits=tuple(limit for text in slow or () for limit in parse_limit(text)),
            queue_s=queue,
        )
    found = cluster.up(spec)
    print(f"export SLURM_CONF={found.slurm_conf}")
    typer.echo(f"{nodes} nodes are idle; sbatch and srun find them with the line above", err=True)


@lab.command()
def down() -> None:
    """Take the lab down: daemons, everything that runs on its nodes, network and files. Needs root."""
    from crosstraffic.slurm.lab import cluster

    typer.echo("the lab is down" if cluster.down() else "no lab was up", err=True)


@lab.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the nodes of the lab, what Slurm says of them, and the rates of their links."""
    import json

    from crosstraffic.slurm.lab import cluster, network
    from crosstraffic.slurm.lab.processes import is_alive
    from crosstraffic.slurm.lab.spec import spec_to_dict

    found = cluster.require()
    states = cluster.node_states()
    alive = {process.name: is_alive(process) for process in found.processes}
    if as_json:
        data = {"spec": spec_to_dict(found.spec), "states": dict(states), "daemons": alive}
        print(json.dumps(data | {"slurm_conf": str(found.slurm_conf)}))
        return
    print(f"{'node':<6}{'address':<14}{'state':<8}{'sends':>12}{'receives':>12}")
    for node in found.spec.nodes:
        rates = (found.spec.rate(node, None), found.spec.rate(None, node))
        told = "".join(f"{rate / 1e6:>7.4g} Mbit" for rate in rates)
        print(f"{node:<6}{network.address(node):<14}{states.get(node, '?'):<8}{told}")
    for limit in found.spec.limits:
        if limit.source and limit.destination:
            print(f"{limit.source} to {limit.destination}: {limit.rate_bits_per_s / 1e6:.4g} Mbit/s")
    dead = [name for name, lives in alive.items() if not lives]
    print(f"export SLURM_CONF={found.slurm_conf}")
    if dead:
        typer.echo(f"ended: {', '.join(dead)}; crosstraffic lab down", err=True)
        raise typer.Exit(1)


@lab.command(context_settings={"ignore_unknown_options": True})
def exec(
    node: Annotated[str, typer.Argument(help="Node, as n0.")],
    command: Annotated[list[str], typer.Argument(help="-- COMMAND and its words.")],
) -> None:
    """Run a command on a node, in its network and under its host name."""
    from crosstraffic.slurm.lab import cluster

    code = cluster.execute(node, command)
    raise typer.Exit(code if code >= 0 else 128 - code)  # ended by a signal: as a shell says it
