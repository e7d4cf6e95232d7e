"""The tables of ``crosstraffic traffic``, for a terminal of 80 columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from crosstraffic.units import format_bytes, format_seconds

MAX_MATRIX_COLUMNS = 6


def print_traffic(data: Mapping[str, Any], layout: str) -> None:
    """Write what ``traffic_data`` and its companions returned."""
    console = Console(highlight=False, markup=False)
    console.print(f"{data['model']}, {layout}, {data['phase']}, as {data['framework']} does it", style="bold")
    roles = {role: [stream for stream in data["streams"] if stream["role"] == role] for role in ("data", "control")}
    console.print(_streams(roles["data"]) if roles["data"] else "nothing crosses the wire")
    if roles["control"]:
        console.print("\ncontrol messages", style="bold")
        console.print(_streams(roles["control"]))
    for message in data.get("occasional", ()):
        console.print("\nnot in every step", style="bold")
        console.print(
            f"{message['name']}: {message['op']} of {format_bytes(message['num_bytes'])} a rank on the "
            f"{message['group']} groups, once in {message['every_steps']} steps"
        )
    if data.get("background"):
        console.print("\nbeside the steps, which do not wait for it", style="bold")
        for entry in data["background"]:
            console.print(f"{entry['what']}: {entry['when']} ({entry['carrier']})")
    console.print()
    for entry in (*data["streams"], *data.get("occasional", ())):
        console.print(f"{entry['name']}: {entry['formula']}", soft_wrap=False)
        console.print(f"    {entry['source']}", style="dim")
    if data.get("routing"):
        load, routing = data["routing"]["rank_load"], data["routing"]
        console.print(
            f"\nrouting {routing['distribution']}: rank load max/mean {load['max_over_mean']:.3g}, "
            f"CV {load['cv']:.3g}, Gini {load['gini']:.3g}, zero {load['zero_share']:.0%}"
        )
    for name, choice in data.get("algorithms", {}).items():
        kernel = f" ({choice['kernel']})" if choice["kernel"] else ""
        console.print(f"\n{name} runs {choice['algorithm']}{kernel}: {choice['why']}")
    for name, note in data.get("notes", {}).items():
        console.print(f"\n{name}: {note}")
    if data.get("left_out"):
        console.print("\nnot on the wire:")
        for name, reason in data["left_out"].items():
            console.print(f"  {name}: {reason}")
    if "matrix_bytes" in data:
        _print_matrix(console, data)
    if "encoder" in data:
        found = data["encoder"]
        console.print(
            f"\nencoders: {len(found['ranks'])}, ranks {found['ranks'][0]} to {found['ranks'][-1]}; "
            f"{found['tokens_per_request']} embeddings a request"
            + (f", and as many for each of {found['num_deepstack']} inner layers" if found["num_deepstack"] else "")
        )


def _streams(streams: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("stream", "op"):
        table.add_column(name, no_wrap=True)
    for name in ("groups", "calls", "payload\nper call", "sent/rank\nper call", "sent/rank\nper step"):
        table.add_column(name, justify="right", no_wrap=True)
    for stream in streams:
        wire, calls = stream["wire_bytes_per_rank"], stream["calls_per_step"]
        table.add_row(
            stream["name"],
            stream["op"],
            f"{len(stream['groups'])}x{stream['group_size']}",
            str(calls),
            *(format_bytes(size) for size in (stream["payload_bytes"], wire, wire * calls)),
        )
    return table


def _print_matrix(console: Console, data: Mapping[str, Any]) -> None:
    """Write who sends what to whom, if it fits the screen, and the descriptors."""
    matrix, descriptors = data["matrix_bytes"], data["descriptors"]
    num_columns = len(matrix[0])
    if num_columns <= MAX_MATRIX_COLUMNS:
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, title="\nprefill rank to decode rank")
        for name in ("", *(f"to {rank}" for rank in range(num_columns))):
            table.add_column(name, justify="right", no_wrap=True)
        for rank, row in enumerate(matrix):
            table.add_row(str(rank), *(format_bytes(size) if size else "-" for size in row))
        console.print(table)
    else:
        console.print(f"\n{len(matrix)} x {num_columns} ranks; --json has the matrix")
    console.print(
        f"descriptors: up to {descriptors['max_count_per_rank']} for one decode rank, "
        f"of {format_bytes(max(map(max, descriptors['bytes'])))} "
        f"({descriptors['block_tokens']} tokens a page)"
    )
    console.print(
        f"by {data['connector']}: {'decode ranks pull' if data['direction'] == 'pull' else 'prefill ranks push'}, "
        f"{'each' if data['schedule'] != 'request' else 'a whole'} {data['schedule']} at once; posting the descriptors "
        f"takes the busiest rank about {format_seconds(descriptors['posting_s'])} (2.4 µs each, published)"
    )
