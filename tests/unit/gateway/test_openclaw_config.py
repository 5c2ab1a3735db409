"""The files that an OpenClaw agent is given: complete, readable for OpenClaw, and of one mind with each other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tentalis.gateway.api.bodies import FeedbackBody, ResultBody, TaskBody
from tests.support import ROOT

FOLDER = ROOT / "config" / "openclaw"
SKILLS = sorted(FOLDER.glob("skills/*/SKILL.md"))


def parts(path: Path) -> tuple[dict[str, object], str]:
    """Front matter and body."""
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), body


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_skill_says_what_it_is_and_needs(path: Path) -> None:
    front, body = parts(path)
    assert front["name"] == path.parent.name
    assert isinstance(front["description"], str) and len(front["description"]) > 40
    needed = front["metadata"]["openclaw"]["requires"]["env"]  # type: ignore[index]
    assert set(re.findall(r"\$(\w+)", body)) == set(needed), "every variable that it uses is declared"


SHAPES = {"/tasks/assign": TaskBody, "/tasks/result": ResultBody, "/feedback": FeedbackBody}


@pytest.mark.parametrize("path", SKILLS, ids=lambda path: path.parent.name)
def test_a_request_is_what_the_bridge_takes(path: Path) -> None:
    requests = re.findall(r'POST "\$TENTALIS_URL([\w/]+)".*?-d \'(\{.*?\})\'', parts(path)[1], re.DOTALL)
    assert requests
    for route, body in requests:
        given = json.loads(body)
        assert SHAPES[route].model_validate(given).model_fields_set == given.keys(), "no field that it would ignore"


def test_agents_name_the_skills_and_folders_that_there_are() -> None:
    agents = (FOLDER / "AGENTS.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([a-z]+-(?:task|result|feedback))`", agents)) == {path.parent.name for path in SKILLS}
    for folder in re.findall(r"`(\w+)/`", agents):
        assert (FOLDER / folder / "SOUL.md").is_file() and (FOLDER / folder / "IDENTITY.md").is_file()


def test_souls_use_only_the_skills_of_their_agent() -> None:
    rows = re.findall(r"\| `[\w-]+` \| `(\w+)/` \|[^|]*\| ([^|]*) \|", (FOLDER / "AGENTS.md").read_text("utf-8"))
    assert len(rows) == 2
    for folder, skills in rows:
        soul = (FOLDER / folder / "SOUL.md").read_text(encoding="utf-8")
        assert set(re.findall(r"`([a-z]+-(?:task|result|feedback))`", soul)) == set(re.findall(r"`([\w-]+)`", skills))
