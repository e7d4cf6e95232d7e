"""``crosstraffic explain``: what a name in a record or a report means."""

from typing import Annotated

import typer


def explain(
    name: Annotated[str | None, typer.Argument(help="A field or word; without it, all names are listed.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a name's definition, unit, formula, source, and how other tools define it."""
    import dataclasses
    import json
    import textwrap

    from crosstraffic.results.definitions import definition, definitions

    entries = list(definitions().values()) if name is None else [definition(name)]
    if as_json:
        found = [dataclasses.asdict(entry) for entry in entries]
        print(json.dumps(found if name is None else found[0], indent=2, ensure_ascii=False))
        return
    if name is None:
        width = max(len(entry.name) for entry in entries)
        for entry in entries:
            print(f"{entry.name:<{width}}  {textwrap.shorten(entry.definition, 90, placeholder=' ...')}")
        return
    (entry,) = entries
    print(entry.name)
    for label in ("definition", "unit", "over", "formula", "source", "peers"):
        text = getattr(entry, label)
        if text:
            print(textwrap.fill(text, 100, initial_indent=f"  {label:<11}", subsequent_indent=" " * 13))
