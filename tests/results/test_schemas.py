import json
from pathlib import Path

import jsonschema
import pytest
from synthetic import a_record, run_dict

from crosstraffic.results.run_info import RunInfo
from crosstraffic.results.schemas import MODELS, schema_text

DOCS = Path(__file__).parents[2] / "docs" / "schemas"


@pytest.mark.parametrize("name", MODELS)
def test_schemas_in_docs_are_current(name: str) -> None:
    assert (DOCS / f"{name}.schema.json").read_text(encoding="utf-8") == schema_text(name), (
        "run: python -m crosstraffic.results.schemas docs/schemas"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("record", a_record().model_dump_json(), id="record"),
        pytest.param("run", RunInfo.model_validate(run_dict()).model_dump_json(), id="run"),
    ],
)
def test_what_is_written_fits_its_schema(name: str, text: str) -> None:
    schema = json.loads(schema_text(name))
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text) | {"surprise": 1})


def test_an_unknown_schema_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="record, run"):
        schema_text("nothing")
