"""The guard at work, against a server in memory: what it tries, what it refuses, and what it goes back to."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from schemas import topics
from schemas.records import EvalResult, LogprobsMode, PolicyUpdate, Promotion, RunManifest, Task, Verifier
from tentalis.inference.protocol import Completion, Float32, Generation
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored
from tentalis.policies import evaluation
from tentalis.policies.core import PolicyLog
from tentalis.policies.evaluation import divergence, fixture_task, prompts_of
from tentalis.policies.guard import LIVE, ROLLBACK, GuardEvidence, GuardLimits
from tentalis.policies.guardian import Guardian, verdict_of
from tentalis.policies.live import ServedAnswers
from tentalis.policies.process import PolicyService
from tentalis.service.settings import Settings
from tests.support.loop_records import manifest, promotion, task, update
from tests.support.loop_server import LoopServer
from tests.support.trainer_lab import rollout

GUARDED = "promotion: guarded\nguard: {live_answers: 4}\n"


class Speaker(LoopServer):
    """Answers with as many words as it is told per model; the base model agrees with every token up to `moved`."""

    def __init__(self) -> None:
        super().__init__()
        self.words: dict[str, int] = {}
        self.moved: dict[str, float] = {}
        self.says: dict[str, str] = {}
        self.seeds: list[tuple[str, int]] = []

    async def generate(self, model: str, prompt: Any, **sampling: Any) -> Generation:
        self.seeds.append((model, sampling["seed"]))
        n = self.words.get(model, 20)
        text = self.says.get(model, "word " * n)
        ids, logprobs = np.arange(n, dtype=np.int32), np.full(n, -1.0 + self.moved.get(model, 0.0), dtype=np.float32)
        return Generation(
            model, np.array([1, 2], dtype=np.int32), [Completion(text, ids, logprobs, "stop")], LogprobsMode.PROCESSED
        )

    async def score(self, model: str, token_ids: Any, temperature: float = 1.0) -> Float32:
        return np.full(len(token_ids), -1.0, dtype=np.float32)


def run(config: str = GUARDED, first: int = 0) -> RunManifest:
    return manifest(first=first).model_copy(update={"config": config})


def log_of(*records: Any) -> PolicyLog:
    log = PolicyLog("local")
    for offset, record in enumerate(records):
        log.apply(record, offset)
    return log


def version(number: int) -> PolicyUpdate:
    return update(number, step=number, sha256=f"s{number}")


QUESTIONS = [fixture_task("assistant", f"question {i}") for i in range(3)]


def guardian(log: PolicyLog, server: LoopServer, tasks: list[Task] = QUESTIONS) -> Guardian:
    settings = Settings(bootstrap="nowhere:1")
    return Guardian(settings, make_codec(settings), server, log, "guard/test", lambda *_: tasks)


def test_the_collapse_is_tried_refused_and_the_run_goes_on_from_what_is_served() -> None:
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1))
    server = Speaker()
    of = guardian(log, server)
    assert log.due_promotions() == [] and [u.version for u in log.untried()] == [1]
    passed = asyncio.run(of.try_candidate(version(1)))
    assert passed is not None and passed.passed and passed.metrics["base_length"] == 20.0
    log.apply(passed, -1)
    assert [u.version for u in log.due_promotions()] == [1] and log.untried() == []
    log.apply(promotion(1, "guarded", "s1"), 10)

    server.words["assistant@v2"] = 1
    log.apply(version(2), 11)
    refused = asyncio.run(of.try_candidate(version(2)))
    assert refused is not None and refused.passed is False
    assert "answers have 1.0 tokens on average" in refused.details
    log.apply(refused, -1)
    assert log.due_promotions() == log.untried() == []
    (candidate,) = log.refused()
    decision = of.refusal_rollback(candidate)
    assert (decision.version, decision.sha256, decision.mode) == (1, "s1", ROLLBACK)
    assert "assistant@v2 was refused: answers have 1.0 tokens" in decision.reason
    log.apply(decision, 12)
    assert log.refused() == []
    # The branch begins with the weights that are served: it needs no decision, and the old verdict holds for it.
    log.apply(run(first=3).model_copy(update={"run_id": "run-1.1", "parent_run": "run-1", "parent_step": 1}), 1)
    log.apply(update(3, run_id="run-1.1", step=0, sha256="s1"), 13)
    assert [u.version for u in log.due_promotions()] == [3] and log.passed("assistant@v3") is True


def test_a_policy_that_moved_too_far_from_the_base_is_refused() -> None:
    log, server = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1)), Speaker()
    server.moved["assistant@v1"] = 3.0
    verdict = asyncio.run(guardian(log, server).try_candidate(version(1)))
    assert verdict is not None and "KL divergence" in verdict.details
    assert verdict.metrics["kl"] == pytest.approx(np.exp(-3.0) - 1.0 + 3.0)


def test_a_policy_that_answers_tasks_with_a_rule_worse_than_what_is_served_is_refused() -> None:
    """However long its answers are."""
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1))
    sums = [task(f"t{i}", environment="math", verifier=Verifier(name="math", data='{"answer": "4"}')) for i in range(2)]
    server = Speaker()
    server.says = {"assistant@v0": r"\boxed{4}", "assistant@v1": r"\boxed{5}"}
    verdict = asyncio.run(guardian(log, server, sums).try_candidate(version(1)))
    assert verdict is not None and "the mean score is" in verdict.details
    assert verdict.metrics["served_score"] > verdict.metrics["score"] + 0.2
    server.says["assistant@v1"] = server.says["assistant@v0"]
    better = asyncio.run(guardian(log, server, sums).try_candidate(version(1)))
    assert better is not None and better.passed


@pytest.mark.parametrize(("least", "answers"), [(0, 2), (64, 64), (65, 66)])
def test_answers_are_spread_over_the_prompts_with_one_seed_for_each_and_judged_in_pairs(
    least: int, answers: int
) -> None:
    config = f"promotion: guarded\nguard: {{min_answers: {least}}}\n"
    log = log_of(run(config), version(0), promotion(0, "guarded", "s0"), version(1))
    sums = [task(f"t{i}", environment="math", verifier=Verifier(name="math", data='{"answer": "4"}')) for i in range(2)]
    server = Speaker()
    server.says = {"assistant@v0": r"\boxed{4}", "assistant@v1": r"\boxed{5}"}
    verdict = asyncio.run(guardian(log, server, sums).try_candidate(version(1)))
    assert verdict is not None and ("worse in pairs of answers" in verdict.details) is (least > 0)
    assert verdict.metrics["answers"] == verdict.metrics["base_answers"] == answers
    assert "scores" not in verdict.metrics and verdict.metrics["unfinished"] == 0.0
    seeds = {model: [seed for asked, seed in server.seeds if asked == model] for model, _ in server.seeds}
    assert all(len(set(each)) == answers and each == seeds["assistant@v0"] for each in seeds.values())


def test_candidates_are_tried_on_the_policys_latest_tasks_and_on_what_nobody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec = make_codec(Settings(bootstrap="nowhere:1"))
    asked = [task(f"t{i}") for i in range(4)] + [task("alien").model_copy(update={"policy": "another"})]
    lying = [
        Stored(topics.TASKS, 0, offset, at, each.key, codec.encode(topics.TASKS, each), ())
        for offset, (at, each) in enumerate(zip((3, 9, 1, 7, 10), asked, strict=True))
    ]
    lying += [Stored(topics.TASKS, 0, 5, 11, "t9", b"no record", ()), Stored(topics.TASKS, 0, 6, 12, "t9", None, ())]
    monkeypatch.setattr(evaluation, "end_offsets", lambda *_: {0: 7})
    monkeypatch.setattr(evaluation, "read_to_end", lambda *_, **__: iter(lying))
    limits = GuardLimits(prompts=2, fixture=("Hello",))
    found = prompts_of(Settings(), codec, "assistant", limits)
    assert [each.task_id for each in found[:2]] == ["t1", "t3"]
    assert [each.messages[-1].content for each in found[2:]] == ["Hello"]


def test_without_prompts_there_is_no_verdict() -> None:
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1))
    assert asyncio.run(guardian(log, Speaker(), []).try_candidate(version(1))) is None


def test_who_decides_is_what_the_run_says() -> None:
    for config, due in (("steps: 1\n", [1]), ("promotion: manual\n", []), (GUARDED, []), ("promotion: maybe\n", [])):
        log = log_of(run(config), version(0), promotion(0, "always", "s0"), version(1))
        assert [u.version for u in log.due_promotions()] == due, config
        assert [u.version for u in log.due_promotions(always=True)] == [1]
    assert log.unruled == {"run-1": log.unruled["run-1"]} and "maybe" in log.unruled["run-1"]
    # Nothing was ever served: the initial adapter is the base model, whoever decides about the others.
    assert [u.version for u in log_of(run("promotion: manual\n"), version(0)).due_promotions()] == [0]
    assert log_of(version(0)).due_promotions() == [], "its manifest was not read yet"


def test_where_more_than_the_initial_adapter_was_published_before_anybody_decided_that_one_is_served_first() -> None:
    for config, tried in ((GUARDED, [2]), ("promotion: manual\n", [])):
        log = log_of(run(config), version(0), version(1), version(2))
        assert [u.version for u in log.due_promotions()] == [0]
        assert [u.version for u in log.untried()] == tried
        log.apply(said(2, "one word"), -1)
        assert log.refused() == [], "there is nothing yet to go back to"
    log = log_of(run(), version(0), version(1), said(1, "one word"), promotion(0, "guarded", "s0"))
    (candidate,) = log.refused()
    assert guardian(log, Speaker()).refusal_rollback(candidate).version == 0
    assert log_of(run(), version(0), version(0)).untried() == [], "said twice it is the initial adapter all the same"
    branch = run(first=3).model_copy(update={"run_id": "run-1.1", "parent_run": "run-1", "parent_step": 2})
    log = log_of(run(), branch, update(3, run_id="run-1.1", step=0, sha256="s2"))
    assert log.due_promotions() == [] and len(log.untried()) == 1, "a branch begins with weights that were trained"


def said(name: int, *reasons: str, experiment: str = "guard") -> EvalResult:
    return verdict_of(version(name), experiment, {"base_length": 20.0}, list(reasons), "guard/test")


def answered(answers: ServedAnswers, number: int, length: int, reward: float = 0.5, count: int = 8) -> None:
    for i in range(count):
        made = rollout(
            f"t{number}-{i}",
            policy="assistant",
            version=number,
            response=[7] * length,
            sampler=[-1.0] * length,
            reward=reward,
        )
        answers.apply(made)


def test_a_served_version_that_falls_below_its_guard_is_rolled_back() -> None:
    log = log_of(run(), version(0), version(1), said(1), version(2), said(2), promotion(2, "guarded", "s2"))
    of, answers = guardian(log, Speaker()), ServedAnswers()
    answered(answers, 2, 20, count=3)
    assert of.check_served(version(2), answers) is None, "too few to tell"
    answered(answers, 2, 18)
    assert of.check_served(version(2), answers) is None
    answered(answers, 2, 1, count=64)
    found = of.check_served(version(2), answers)
    assert found is not None
    verdict, back = found
    assert (verdict.experiment, verdict.passed) == (LIVE, False)
    assert back is not None and (back.version, back.mode) == (1, ROLLBACK)
    assert "fell below its guard: answers have 1.0 tokens" in back.reason
    log.apply(verdict, -1)
    assert of.check_served(version(2), answers) is None, "it is said once"


def test_a_guard_that_is_killed_after_its_first_record_has_rolled_back() -> None:
    """The fall of a served version is said once. Killed after the first record and started again, it is not served."""
    log = log_of(run(), version(0), version(1), said(1), version(2), said(2), promotion(2, "guarded", "s2"))
    of, answers = guardian(log, Speaker()), ServedAnswers()
    written: list[Promotion | EvalResult] = []
    answered(answers, 2, 1, count=64)

    def decide(record: Promotion | EvalResult) -> None:
        written.append(record)
        raise KeyboardInterrupt

    live = SimpleNamespace(poll=lambda: None, answers=answers)
    process = cast(PolicyService, SimpleNamespace(_live=live, _guardian=of, _decide=decide))
    with pytest.raises(KeyboardInterrupt):
        PolicyService._watch(process, log.guarded())
    log.apply(written[0], 99)
    assert log.promotion("assistant").version == 1
    assert log.guarded()[0].version == 1 and of.check_served(log.guarded()[0], answers) is None


def test_worse_rewards_than_before_are_a_fall_too() -> None:
    log = log_of(run(), version(0), version(1), said(1), promotion(1, "guarded", "s1"))
    of, answers = guardian(log, Speaker()), ServedAnswers()
    answered(answers, 0, 20, 0.5)
    answered(answers, 1, 20, -0.2)
    found = of.check_served(version(1), answers)
    assert found is not None and "it fell by more than 0.2" in found[0].details
    assert found[1] is not None and found[1].version == 0, "the initial adapter needs no verdict to go back to"


def test_without_a_version_to_roll_back_to_the_verdict_is_recorded_and_the_version_stays_served() -> None:
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"))
    answers = ServedAnswers()
    answered(answers, 0, 1)
    found = guardian(log, Speaker()).check_served(version(0), answers)
    assert found is not None and found[1] is None


def test_answers_of_two_versions_and_redacted_rollouts_say_nothing() -> None:
    answers = ServedAnswers()
    made = rollout("t", policy="assistant", version=1)
    answers.apply(made.model_copy(update={"forgotten": True, "token_ids": b"", "loss_mask": b""}))
    both = (*made.policy_spans, made.policy_spans[0].model_copy(update={"policy": "assistant@v2"}))
    answers.apply(made.model_copy(update={"policy_spans": both}))
    assert answers.evidence("assistant@v1") == GuardEvidence(0, 0.0)


def test_the_divergence_is_zero_for_the_same_policy_and_infinite_for_no_number() -> None:
    same = np.array([-1.0, -2.0], dtype=np.float32)
    assert divergence(same, same) == 0.0
    assert divergence(same, np.array([-1.0, np.nan], dtype=np.float32)) == float("inf")
    assert divergence(same, np.array([-1.0, -1e9], dtype=np.float32)) == pytest.approx(np.expm1(-10.0) + 10.0)
