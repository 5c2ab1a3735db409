"""Every schema reads what every earlier version of it wrote (BACKWARD_TRANSITIVE): logs are read for years."""

import json
from pathlib import Path

import pytest

import schemas
from schemas.wire.compatibility import problem

ROOT = Path(schemas.__file__).parent
EARLIER = sorted((ROOT / "versions").glob("*/*.avsc"))


@pytest.mark.parametrize("path", EARLIER, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_current_schema_reads_every_earlier_one(path: Path) -> None:
    current = ROOT / path.name
    assert current.is_file(), f"{path.name} was removed; what it wrote is still on the log"
    assert problem(current.read_text(), path.read_text()) == ""


def test_every_record_has_a_first_version() -> None:
    assert {path.name for path in EARLIER} == {path.name for path in ROOT.glob("*.avsc")}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda fields: fields.append({"name": "new", "type": "string"}), "new"),  # no default
        (lambda fields: fields[0].update(type="long"), "string"),  # another type
    ],
)
def test_a_change_that_cannot_be_read_is_found(change: object, named: str) -> None:
    schema = json.loads((ROOT / "Task.avsc").read_text())
    assert callable(change)
    change(schema["fields"])
    assert named in problem(json.dumps(schema), (ROOT / "Task.avsc").read_text())
