"""What each name means: one table, ``definitions.toml``, for ``explain``, for run.json and for the report."""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from crosstraffic.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One name. Empty where there is nothing to say: a text has no unit, a hash no statistic."""

    name: str
    definition: str
    unit: str | None = None
    over: str | None = None
    formula: str | None = None
    source: str | None = None
    peers: str | None = None

    @property
    def text(self) -> str:
        """The definition in one line, as it goes into run.json.

        >>> definition("measured_share").text
        'Share of the wall time spent inside measured calls. [fraction] = measured_s / wall_s'
        """
        parts = [self.definition]
        if self.unit:
            parts.append(f"[{self.unit}{f', over {self.over}' if self.over else ''}]")
        if self.formula:
            parts.append(f"= {self.formula}")
        return " ".join(parts)


@cache
def definitions() -> Mapping[str, Definition]:
    """Return all definitions by name, fields first, then words."""
    table = tomllib.loads((Path(__file__).parent / "definitions.toml").read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            name: Definition(name=name, **entry)
            for section in ("fields", "words")
            for name, entry in table[section].items()
        }
    )


def definition(name: str) -> Definition:
    """Look up one name; ``one-shot`` and ``one_shot`` are the same.

    Raises:
        UsageError: no such name; the message lists close ones.
    """
    table = definitions()
    wanted = name.strip().lower().replace("-", "_").replace(" ", "_")
    if wanted in table:
        return table[wanted]
    close = difflib.get_close_matches(wanted, table, n=5, cutoff=0.5)
    close += [known for known in table if wanted and wanted in known and known not in close][:5]
    hint = f"close names: {', '.join(close)}" if close else "`crosstraffic explain` without a name lists them all"
    raise UsageError(f"no definition of {name!r}; {hint}")


def definitions_block() -> dict[str, str]:
    """Return the definitions as run.json carries them, one text a name."""
    return {name: entry.text for name, entry in definitions().items()}
