"""The next version of the schemas, as a package of its own before ours on the path: in Feedback and Score an optional
field is gone and another has come. Its processes are real ones, so that old and new meet on a real log."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import schemas
from schemas import topics
from schemas.wire.avro import HERE
from tentalis.cli.shared.record_json import to_plain
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.support.loop_records import feedback_on, result, task

# Per record: the optional field that is gone with its line in the twin, and the one that has come.
CHANGES = {
    "Feedback": ("author", 'author: str = ""', "channel", 'channel: str = ""'),
    "Score": ("feedback_id", "feedback_id: str | None = None", "judge", 'judge: str = ""'),
}


class NextVersion:
    """Commands of the next version, run below `folder`; a registry where its URL is given."""

    def __init__(self, folder: Path, bootstrap: str, registry: str | None = None) -> None:
        root = folder / "next"
        shutil.copytree(HERE, root / "schemas", ignore=shutil.ignore_patterns("__pycache__"))
        for name, change in CHANGES.items():
            _rewrite(root / "schemas", name, *change)
        ours = Path(schemas.__file__).parents[1]
        self._cwd = root
        self._env = os.environ | {
            "PYTHONPATH": f"{root}{os.pathsep}{ours}",
            "TENTALIS_BOOTSTRAP": bootstrap,
            "TENTALIS_HOME": str(folder / "next-home"),
        }
        self._env.pop("SCHEMA_REGISTRY_URL", None)
        if registry is not None:
            self._env["SCHEMA_REGISTRY_URL"] = registry

    def run(self, *arguments: str, stdin: str = "") -> str:
        """The command's stdout."""
        done = subprocess.run(
            [sys.executable, "-m", "tentalis.cli", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            cwd=self._cwd,
            env=self._env,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def writes(self, topic: str, name: str, value: dict[str, Any]) -> None:
        """A record of the next version, from its JSON."""
        self.run("produce", topic, stdin=json.dumps({"type": name, "value": value}))

    def reads(self, topic: str, key: str) -> list[dict[str, Any]]:
        """Returns the records of a key as the next version reads them."""
        return [
            json.loads(line) for line in self.run("consume", topic, "--key", key, "--exit", "-o", "json").splitlines()
        ]


def _rewrite(folder: Path, name: str, gone: str, gone_line: str, come: str, come_line: str) -> None:
    path = folder / f"{name}.avsc"
    schema = json.loads(path.read_text(encoding="utf-8"))
    kept = [field for field in schema["fields"] if field["name"] != gone]
    assert len(kept) == len(schema["fields"]) - 1
    schema["fields"] = [*kept, {"name": come, "type": "string", "default": "", "doc": "New."}]
    path.write_text(json.dumps(schema), encoding="utf-8")
    start = f"class {name}(Record):"
    twins = next(file for file in (folder / "records").glob("*.py") if start in file.read_text(encoding="utf-8"))
    before, _, after = twins.read_text(encoding="utf-8").partition(start)
    assert gone_line in after
    twins.write_text(before + start + after.replace(gone_line, come_line, 1), encoding="utf-8")


def both_ways(settings: Settings, folder: Path, key: str, magic: bytes) -> None:
    """Each version writes a Feedback, and both read both."""
    ahead = NextVersion(folder, settings.require_bootstrap(), settings.schema_registry)
    ahead.run("topics", "apply", "--yes")
    ours = feedback_on(result(task(key)), f"{key}-ours").model_copy(update={"text": "Too long.", "author": "ann"})
    publisher = Publisher(settings, "test", make_codec(settings))
    publisher.send(topics.FEEDBACK, ours)
    publisher.flush()
    plain = to_plain(ours) | {"feedback_id": f"{key}-ahead", "channel": "mail"}
    ahead.writes(topics.FEEDBACK, "Feedback", {name: value for name, value in plain.items() if name != "author"})

    stored = [each for each in read_to_end(settings, topics.FEEDBACK) if each.key == key]
    assert [each.value[: len(magic)] for each in stored if each.value] == [magic, magic]
    found = [each.decode_own(make_codec(settings)) for each in stored]
    assert found == [ours, ours.model_copy(update={"feedback_id": f"{key}-ahead", "author": ""})]

    seen = [each["value"] for each in ahead.reads(topics.FEEDBACK, key)]
    assert [(each["feedback_id"], each["channel"]) for each in seen] == [
        (ours.feedback_id, ""),
        (f"{key}-ahead", "mail"),
    ]
    assert all("author" not in each and each["text"] == "Too long." for each in seen)
