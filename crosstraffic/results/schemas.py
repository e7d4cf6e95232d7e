"""JSON Schemas of the files of a run folder. ``python -m crosstraffic.results.schemas docs/schemas`` writes them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from crosstraffic.results.definitions import definitions
from crosstraffic.results.record import Record
from crosstraffic.results.run_info import RunInfo

MODELS: Mapping[str, type[BaseModel]] = {"record": Record, "run": RunInfo}


def schema_text(name: str) -> str:
    """Return one JSON Schema (draft 2020-12) as text, each field with its definition.

    Raises:
        ValueError: no such file kind.
    """
    if name not in MODELS:
        raise ValueError(f"unknown schema: {name!r}; allowed: {', '.join(MODELS)}")
    schema = MODELS[name].model_json_schema(mode="serialization")
    for field, entry in schema["properties"].items():
        entry["description"] = definitions()[field].text
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"crosstraffic/{name}.schema.json"}
    return json.dumps(head | schema, indent=2, ensure_ascii=False) + "\n"


def write_schemas(folder: Path) -> list[Path]:
    """Write all schemas; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in MODELS:
        path = folder / f"{name}.schema.json"
        path.write_text(schema_text(name), encoding="utf-8")
        paths.append(path)
    return paths


if __name__ == "__main__":
    for written in write_schemas(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/schemas")):
        print(written)
