"""The file of scorers: what it makes known, and what it is refused for."""

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schemas.records import Opens, Polarity, Source, Terms, Verifier
from tentalis.cli.main import app
from tentalis.rewards import registry, scorer_file
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.rewards.scorer_file import BadScorers, load_scorers
from tentalis.rewards.verdict import FeedbackJudge, UnknownVerifier
from tentalis.service.exit_codes import ExitCode
from tests.support import ROOT
from tests.support.stream_records import QUESTION, make_feedback, make_result, make_task

PAGE = ROOT / "docs" / "concepts" / "judges.md"
FILE = """
judges:
  small:
    url: http://127.0.0.1:8001/v1
    model: judge
    api_key_env: JUDGE_KEY
environments:
  chat:
    quality:
      kind: combined
      parts:
        next: {scorer: next_state, weight: 0.7}
        taste: {scorer: taste, weight: 0.2, data: {max_words: 60}}
        user: {source: user, weight: 0.1}
    next_state: {kind: next_state, judge: small, votes: 5, consensus: 0.5}
    cheap: {kind: composite, weights: {on_topic: 0.5}}
    mine: {kind: custom, target: "tests.support.own_scorers:three_quarters"}
  math:
    steps: {kind: steps, judge: small, outcome: last}
"""
ENV = {"JUDGE_KEY": "sk-very-secret"}


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> dict[str, str]:
    path = tmp_path / "scorers.yaml"
    path.write_text(text, encoding="utf-8")
    return {f"{environment}.{name}": scorer.name for environment, name, scorer in load_scorers(path, env or ENV)}


def test_what_the_file_names_is_what_tasks_can_name(tmp_path: Path) -> None:
    names = load(tmp_path, FILE)
    assert list(names) == ["chat.quality", "chat.next_state", "chat.cheap", "chat.mine", "math.steps"]
    kinds = {name: scorer.partition("/")[0] for name, scorer in names.items()}
    assert kinds["chat.quality"] == "combined" and kinds["chat.next_state"] == "next_state"
    terms = Terms(rl=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)
    task = make_task(terms=terms, verifier=Verifier(name="next_state"))
    registry.check(task)
    assert registry.scorer_name(task) == names["chat.next_state"]
    assert set(registry.vote_counts()) == {names["chat.next_state"], names["math.steps"]}


def test_a_changed_file_makes_other_versions_of_what_it_changes(tmp_path: Path) -> None:
    before = load(tmp_path, FILE)
    assert load(tmp_path, FILE) == before
    assert load(tmp_path, FILE.replace("127.0.0.1:8001", "judge.example:9")) == before, "where it is changes nothing"
    after = load(tmp_path, FILE.replace("votes: 5", "votes: 7"))
    # What is combined changes with its parts.
    assert {name for name in before if before[name] != after[name]} == {"chat.quality", "chat.next_state"}


def test_what_conversations_name_may_be_made_of_parts_and_of_ones_own_object(tmp_path: Path) -> None:
    """Only a scorer that never hears what came next is refused: with one every turn's reward would be unknown."""
    for scorer in (
        "{kind: combined, parts: {mine: {scorer: mine, weight: 1}}}",
        '{kind: custom, target: "tests.support.own_scorers:RULES"}',
        "{kind: next_state_rules}",
    ):
        assert load(tmp_path, FILE.replace("{kind: next_state, judge: small, votes: 5, consensus: 0.5}", scorer))


def test_a_detector_that_is_switched_off_in_the_rules_costs_no_answer_its_reward(tmp_path: Path) -> None:
    def reward(**fields: list[str]) -> tuple[str, float | None]:
        rules = json.dumps({"kind": "next_state_rules"} | fields)
        names = load(tmp_path, f"environments: {{chat: {{next_state: {rules}}}}}")
        scorer = ENVIRONMENTS["chat"]["next_state"]
        assert isinstance(scorer, FeedbackJudge)
        turn = make_result(make_task(terms=Terms(rl=Source.NEXT_STATE), n_samples=1))
        asked_again = make_feedback(turn, QUESTION, source=Source.NEXT_STATE, author="user", polarity=Polarity.NONE)
        verdict = asyncio.run(scorer.judge_feedback(turn.task, turn, asked_again))
        return names["chat.next_state"], verdict.reward

    rules, without = reward(), reward(signals=["correction", "edit", "tool_failure", "abandoned"])
    assert rules == ("next_state_rules/4", -1.0)
    assert without == ("next_state_rules/4-without-reasked", None)


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        ("votes: 5", "vote: 5", r"environments\.chat\.next_state\.vote: no such setting, did you mean votes\?"),
        ("api_key_env", "api_key_evn", r"judges\.small\.api_key_evn: no such setting, did you mean api_key_env\?"),
        ("environments:", "enviroments:", r"enviroments: no such setting, did you mean environments\?"),
        ("weight: 0.7", "wieght: 0.7", r"parts\.next\.wieght: no such setting, did you mean weight\?"),
        ("kind: steps", "kind: step", r"environments\.math\.steps: there is no kind 'step', did you mean steps\?"),
        ("kind: steps, ", "", r"environments\.math\.steps: kind is missing"),
        ("judge: small, votes", "judge: smal, votes", r"there is no judge 'smal', did you mean small\?"),
        ("scorer: taste", "scorer: tast", r"parts\.taste: there is no scorer 'tast', did you mean taste\?"),
        ("scorer: taste", "scorer: quality", r"there is no scorer 'quality'"),
        ("source: user", "source: next_state", r"parts\.user\.source: Input should be"),
        ("votes: 5", "votes: 5, temperature: 0", "at temperature 0 5 votes are equal"),
        ("votes: 5", "votes: 0", r"next_state\.votes: Input should be greater than or equal to 1"),
        ("  math:", "  maths:", "'maths' is not known; the known ones are agent, chat, echo, env-pool, gui, llm"),
        ('three_quarters"', 'three_quarters", time_limit_s: 101', r"mine\.time_limit_s: .* equal to 100"),
        ("model: judge", "model: judge\n    time_limit_s: 101", r"small\.time_limit_s: .* equal to 100"),
        ("three_quarters", "nothing", r"environments\.chat\.mine: .* has no nothing"),
        ("http://127", "http://ann:secret@127", r"judges\.small\.url: must not hold a user or a password"),
        ("    model: judge", "    model: judge\n    model: other", "model: duplicate key"),
        ("outcome: last", "outcome: last, tokenizer: /nowhere", "no tokenizer can be read"),
        ("kind: composite, weights: {on_topic: 0.5}", "kind: composite, weights: {topic: 1}", "Input should be 'fini"),
        ("kind: next_state, judge: small, votes: 5, consensus: 0.5", "kind: composite", "a part of a `combined`"),
        ("cheap: {", "rules: {kind: next_state_rules, signals: [edits]}\n    cheap: {", r"rules\.signals\.0: Input"),
        (FILE, "- a list", "expected a mapping with judges and environments"),
        (FILE, "a: [", "not YAML"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_what_was_meant(
    tmp_path: Path, was: str, becomes: str, says: str
) -> None:
    assert was in FILE
    with pytest.raises(BadScorers, match=says) as raised:
        load(tmp_path, FILE.replace(was, becomes, 1))
    assert "scorers.yaml" in str(raised.value) and "secret" not in str(raised.value)


def test_a_file_or_a_key_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadScorers, match="No such file"):
        load_scorers(tmp_path / "none.yaml")
    with pytest.raises(BadScorers, match="/dev/zero: it is larger than 16 MiB"):
        load_scorers(Path("/dev/zero"))
    with pytest.raises(BadScorers, match="JUDGE_KEY is not set"):
        load(tmp_path, FILE, {"OTHER": "x"})


def test_the_file_on_the_page_is_one(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    text = text.replace("mypackage.politeness:scorer", "tests.support.own_scorers:three_quarters")
    text = "\n".join(line for line in text.splitlines() if "tokenizer:" not in line)
    assert load(tmp_path, text)


def test_who_only_takes_tasks_knows_the_names_without_keys_and_leaves_the_rest_to_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tentalis.rewards.registry._NAME_ONLY", set())
    path = tmp_path / "scorers.yaml"
    path.write_text(FILE, encoding="utf-8")
    mine = make_task(verifier=Verifier(name="quality", data='{"taste": {"max_words": 9}}'))
    with pytest.raises(UnknownVerifier):
        registry.check(mine)
    scorer_file.name_scorers(path)
    registry.check(mine)
    registry.check(make_task(verifier=Verifier(name="next_state", data="{}")))
    for environment, name in (("chat", "steps"), ("math", "quality"), ("chat", "unheard of")):
        with pytest.raises(UnknownVerifier):
            registry.check(make_task(environment=environment, verifier=Verifier(name=name)))
    path.write_text(FILE.replace("votes: 5", "vote: 5"), encoding="utf-8")
    with pytest.raises(BadScorers, match="did you mean votes"):
        scorer_file.name_scorers(path)


@pytest.mark.parametrize("command", [["scoring"], ["gateway", "--server", "http://127.0.0.1:1"]])
def test_the_command_says_what_is_wrong_with_the_file(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "scorers.yaml"
    path.write_text(FILE.replace("votes: 5", "vote: 5"), encoding="utf-8")
    command = ["serve", *command, "--scorers", str(path), "--bootstrap-server", "127.0.0.1:1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert "did you mean votes?" in " ".join(result.output.split())
