"""`tentalis schemas`: what it prints, and its exit codes."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schemas.wire.avro import HERE, current
from tentalis.cli.main import app
from tests.support.schema_registry import SchemaRegistry, schema_registry

runner = CliRunner()


@pytest.fixture(autouse=True)
def _no_registry_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCHEMA_REGISTRY_URL", raising=False)


@pytest.fixture
def registry() -> Iterator[SchemaRegistry]:
    with schema_registry() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HERE, tmp_path / "schemas", ignore=shutil.ignore_patterns("*.py", "__pycache__")))


def run(*arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    done = runner.invoke(app, ["schemas", *arguments], input=stdin)
    return done.exit_code, done.stdout, done.stderr


def change_tick(folder: Path, **field: object) -> str:
    """Tick.avsc with one more field; its new text."""
    path = folder / "Tick.avsc"
    schema = json.loads(path.read_text())
    schema["fields"].append(field)
    path.write_text(json.dumps(schema))
    return path.read_text()


def test_the_schemas_of_this_version_are_compatible() -> None:
    code, out, _ = run("check", "-o", "json")
    found = json.loads(out)
    assert (code, found["incompatible"], found["not_kept"]) == (0, [], [])
    assert found["compared"] >= found["records"] > 20


def test_an_added_field_with_a_default_is_compatible_and_to_be_kept(folder: Path) -> None:
    change_tick(folder, name="new", type="string", default="")
    code, out, err = run("check", "--dir", str(folder), "-o", "json")
    assert (code, json.loads(out)["not_kept"]) == (0, ["Tick"])
    assert "Tick.avsc has changed: before a release, copy it to versions/N/Tick.avsc" in err
    kept = folder / "versions" / str(1 + max(int(each.name) for each in (folder / "versions").iterdir()))
    kept.mkdir()
    shutil.copy(folder / "Tick.avsc", kept / "Tick.avsc")
    assert json.loads(run("check", "--dir", str(folder), "-o", "json")[1])["not_kept"] == []
    assert json.loads(run("list", "--dir", str(folder), "-o", "json")[1])[-1]["kept"] == int(kept.name)


def test_what_cannot_read_the_log_exits_with_3_and_says_why(folder: Path) -> None:
    change_tick(folder, name="new", type="string")
    (folder / "Skill.avsc").unlink()
    code, out, err = run("check", "--dir", str(folder))
    assert code == 3
    assert "new" in out and "Skill.avsc is gone" in out
    assert "2 of them unreadable" in err


def test_a_file_that_is_no_schema_is_named(folder: Path) -> None:
    (folder / "Tick.avsc").write_text("{}")
    code, _, err = run("check", "--dir", str(folder))
    assert code == 1
    assert "Tick.avsc: not an Avro record schema" in err


def test_a_schema_is_shown_and_fingerprinted(folder: Path) -> None:
    tick = current("Tick")
    assert run("show", "Tick")[1].strip() == tick.text
    assert run("show", "Tick", "--version", "1")[0] == 0
    assert run("show", "Tick", "--version", "99")[0] == 1
    assert "no record Nothing" in run("show", "Nothing")[2]
    for arguments, stdin in ((("Tick",), None), ((str(folder / "Tick.avsc"),), None), (("-",), tick.text)):
        assert run("fingerprint", *arguments, stdin=stdin) == (0, tick.fingerprint.hex() + "\n", "")
    assert run("fingerprint", "-", stdin="7")[0] == 1


def test_without_a_registry_there_is_nothing_to_register() -> None:
    code, _, err = run("register")
    assert code == 2
    assert "topics apply" in err


def test_a_registry_that_does_not_answer_exits_with_4() -> None:
    for command in ("check", "list", "register"):
        code, _, err = run(command, "--registry", "http://user:secret@127.0.0.1:1")
        assert code == 4
        assert "127.0.0.1 failed" in err and "secret" not in err


def test_registered_once_and_checked_against_the_registry(registry: SchemaRegistry, folder: Path) -> None:
    planned = json.loads(run("register", "--registry", registry.url, "--dry-run", "-o", "json")[1])
    assert {row["change"] for row in planned} == {"new subject"} and not registry.subjects
    made = json.loads(run("register", "--registry", registry.url, "-o", "json")[1])
    assert sorted(registry.subjects) == [row["subject"] for row in made]
    again = json.loads(run("register", "--registry", registry.url, "-o", "json")[1])
    assert {row["change"] for row in again} == {"there"}
    assert [row["id"] for row in again] == [row["id"] for row in made]
    assert all(row["registry"] == 1 for row in json.loads(run("list", "--registry", registry.url, "-o", "json")[1]))
    assert run("check", "--registry", registry.url)[0] == 0


def test_what_cannot_read_the_registry_exits_with_3(registry: SchemaRegistry, folder: Path) -> None:
    theirs = change_tick(folder, name="partition2", type=["null", "int"], default=None)
    registry.texts.append(theirs.replace('"long"', '"string"'))
    registry.subjects["tentalis.Tick"] = [1]
    code, out, _ = run("check", "--registry", registry.url)
    assert code == 3 and "registry version 1" in out
    code, _, err = run("register", "--registry", registry.url)
    assert code == 3 and "nothing was registered: Tick cannot read registry version 1" in err
    assert list(registry.subjects) == ["tentalis.Tick"]
