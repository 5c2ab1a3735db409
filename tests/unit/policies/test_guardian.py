"""The guard at work, against a server in memory: what it tries, what it refuses, and what it goes back to."""

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from schemas import topics
from schemas.records import EvalResult, LogprobsMode, PolicyUpdate, Promotion, RunManifest, Sampling, Task, Verifier
from tentalis.inference.protocol import Completion, Float32, Generation, RequestRefused, ServerUnavailable
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored
from tentalis.policies import evaluation
from tentalis.policies.core import PolicyLog
from tentalis.policies.evaluation import VOTE_TRIES, PromptRefused, divergence, fixture_task, prompts_of
from tentalis.policies.guard import LIVE, ROLLBACK, GuardEvidence, GuardLimits
from tentalis.policies.guard_statistics import evidence_of_drop
from tentalis.policies.guardian import Guardian, verdict_of
from tentalis.policies.live import ServedAnswers
from tentalis.policies.live_windows import PAIRED_TASKS
from tentalis.policies.process import PolicyService
from tentalis.rewards.chat import ChatClient
from tentalis.rewards.verdict import ScorerAway
from tentalis.rewards.votes import NoVote
from tentalis.service.settings import Settings
from tests.support.loop_records import T0, manifest, promotion, task, update
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
        self.scored: list[str] = []
        self.only_at_1 = False

    async def generate(self, model: str, prompt: Any, **sampling: Any) -> Generation:
        self.seeds.append((model, sampling["seed"]))
        n = self.words.get(model, 20)
        text = self.says.get(model, "word " * n)
        ids, logprobs = np.arange(n, dtype=np.int32), np.full(n, -1.0 + self.moved.get(model, 0.0), dtype=np.float32)
        return Generation(
            model, np.array([1, 2], dtype=np.int32), [Completion(text, ids, logprobs, "stop")], LogprobsMode.PROCESSED
        )

    async def score(self, model: str, token_ids: Any, temperature: float = 1.0) -> Float32:
        if self.only_at_1 and temperature != 1.0:
            raise RequestRefused(400, "this server scores at temperature 1 only")
        self.scored.append(model)
        return np.full(len(token_ids), -1.0 + self.moved.get(model, 0.0), dtype=np.float32)


def run(config: str = GUARDED, first: int = 0, initial: str | None = "trained before") -> RunManifest:
    """By default v0 is no base model: the run begins with an adapter."""
    return manifest(first=first).model_copy(update={"config": f"{config}initial_adapter: {json.dumps(initial)}\n"})


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


SUMS = [task(f"t{i}", environment="math", verifier=Verifier(name="math", data='{"answer": "4"}')) for i in range(2)]
RIGHT, WRONG = r"\boxed{4}", r"\boxed{5}"


def trial_of_sums(settings: str, answers: dict[str, str]) -> tuple[EvalResult, Speaker]:
    """The verdict on v1 after v0 on two sums. `answers`: by model; the base model's are wrong by default."""
    config = f"promotion: guarded\nguard: {{{settings}}}\n"
    log = log_of(run(config), version(0), promotion(0, "guarded", "s0"), version(1))
    server = Speaker()
    server.says = {"m": WRONG} | answers
    verdict = asyncio.run(guardian(log, server, SUMS).try_candidate(version(1)))
    assert verdict is not None
    return verdict, server


@pytest.mark.parametrize(("least", "answers"), [(0, 2), (64, 64), (65, 66)])
def test_answers_are_spread_over_the_prompts_with_one_seed_for_each_prompt_and_round(least: int, answers: int) -> None:
    verdict, server = trial_of_sums(f"min_answers: {least}", {"assistant@v0": RIGHT, "assistant@v1": RIGHT})
    assert verdict.passed and verdict.metrics["seconds"] >= 0.0
    assert verdict.metrics["answers"] == verdict.metrics["base_answers"] == answers
    assert "scores" not in verdict.metrics and verdict.metrics["unfinished"] == 0.0
    seeds = {model: [seed for asked, seed in server.seeds if asked == model] for model, _ in server.seeds}
    assert len(seeds) == 3
    assert all(len(set(each)) == answers and each == seeds["assistant@v0"] for each in seeds.values())


def test_a_trial_ends_as_soon_as_the_scores_show_a_drop() -> None:
    verdict, _ = trial_of_sums("min_answers: 64", {"assistant@v0": RIGHT, "assistant@v1": WRONG})
    assert not verdict.passed and "worse in pairs of answers" in verdict.details
    assert verdict.metrics["answers"] < 32


def test_a_trial_ends_after_a_quarter_if_the_candidate_is_far_from_every_limit() -> None:
    verdict, server = trial_of_sums("min_answers: 64, early_pass: 0.75", {"assistant@v0": RIGHT, "assistant@v1": RIGHT})
    assert verdict.passed and verdict.metrics["answers"] == verdict.metrics["served_answers"] == 16
    assert server.scored == ["m"] * 8, "the divergence is measured on half of the answers"
    verdict, _ = trial_of_sums("min_answers: 64, early_pass: 0.75", {"assistant@v0": RIGHT, "assistant@v1": WRONG})
    assert not verdict.passed


def test_an_untrained_initial_adapter_is_not_asked_beside_the_base_model_whose_weights_it_has() -> None:
    config = "promotion: guarded\nguard: {min_answers: 8}\n"
    log = log_of(run(config, initial=None), version(0), promotion(0, "guarded", "s0"), version(1))
    server = Speaker()
    server.says = {"m": RIGHT, "assistant@v1": RIGHT}
    verdict = asyncio.run(guardian(log, server, SUMS).try_candidate(version(1)))
    assert verdict is not None and verdict.passed
    assert {model for model, _ in server.seeds} == {"m", "assistant@v1"}
    assert verdict.metrics["served_score"] == verdict.metrics["base_score"] == 1.0
    # A branch begins with trained weights, whatever its version 0 was.
    branch = run(config, 2, None).model_copy(update={"run_id": "run-1.1", "parent_run": "run-1", "parent_step": 1})
    log = log_of(branch, update(2, run_id="run-1.1", step=0, sha256="s1"), promotion(2, "guarded", "s1"))
    assert not log.equals_base(update(2, run_id="run-1.1", step=0, sha256="s1"))


def test_no_model_answers_a_prompt_twice_with_one_seed_over_several_candidates() -> None:
    config = "promotion: guarded\nguard: {min_answers: 8, early_pass: 0.75}\n"
    log = log_of(run(config), version(0), promotion(0, "guarded", "s0"), version(1), version(2))
    server = Speaker()
    of = guardian(log, server, SUMS)
    metrics: dict[str, float] = {}
    for number in (1, 2):
        # The second is longer, so that all rounds are needed.
        server.words["assistant@v2"] = 60
        verdict = asyncio.run(of.try_candidate(version(number)))
        assert verdict is not None and verdict.passed
        metrics = verdict.metrics
        log.apply(promotion(number, "guarded", f"s{number}"), 9 + number)
    assert metrics["answers"] == metrics["served_answers"] == 8
    asked = [each for each in server.seeds if each[0] != "assistant@v0"]
    assert len(asked) == len(set(asked)) == 8 + 8 + 8


class FailingOnce(Speaker):
    """Is away for the first request to another model while the candidate's are under way. These end only when the
    candidate is tried again."""

    def __init__(self) -> None:
        super().__init__()
        self.failed, self.tried_again = False, asyncio.Event()
        self.under_way = 0

    async def generate(self, model: str, prompt: Any, **sampling: Any) -> Generation:
        if model == "assistant@v1":
            self.under_way += 1
            try:
                if self.failed:
                    self.tried_again.set()
                await self.tried_again.wait()
            finally:
                self.under_way -= 1
        elif not self.failed:
            self.failed = True
            raise ServerUnavailable("http://model", "away for a moment")
        return await super().generate(model, prompt, **sampling)


def test_a_trial_that_failed_leaves_no_answers_under_way_that_the_next_try_would_count_twice() -> None:
    async def twice(server: FailingOnce) -> EvalResult | None:
        log = log_of(run("promotion: guarded\nguard: {min_answers: 4}\n"), version(0), promotion(0, "guarded", "s0"))
        log.apply(version(1), 9)
        of = guardian(log, server, SUMS)
        with pytest.raises(ServerUnavailable):
            await of.try_candidate(version(1))
        assert server.under_way == 0
        return await of.try_candidate(version(1))

    server = FailingOnce()
    verdict = asyncio.run(twice(server))
    assert verdict is not None and verdict.metrics["answers"] == verdict.metrics["base_answers"] == 4
    seeds = {model: sorted(seed for name, seed in server.seeds if name == model) for model in ("assistant@v1", "m")}
    assert seeds["assistant@v1"] == sorted(set(seeds["m"])) and len(seeds["assistant@v1"]) == 4


def test_a_server_that_scores_at_temperature_1_only_compares_both_models_there() -> None:
    server = Speaker()
    server.only_at_1 = True
    server.moved["assistant@v1"] = 0.5
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1))
    warm = [each.model_copy(update={"sampling": Sampling(temperature=0.7)}) for each in QUESTIONS]
    verdict = asyncio.run(guardian(log, server, warm).try_candidate(version(1)))
    assert verdict is not None and verdict.metrics["kl"] == pytest.approx(np.exp(-0.5) - 1.0 + 0.5)
    assert sorted(set(server.scored)) == ["assistant@v1", "m"]


def test_a_task_whose_rule_this_process_lacks_is_tried_without_a_score(caplog: pytest.LogCaptureFixture) -> None:
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1))
    unknown = [task(f"t{i}", verifier=Verifier(name="elsewhere")) for i in range(2)]
    verdict = asyncio.run(guardian(log, Speaker(), unknown).try_candidate(version(1)))
    assert verdict is not None and verdict.passed and "score" not in verdict.metrics
    assert [each.message for each in caplog.records if "'elsewhere'" in each.message]
    assert len(caplog.records) == 1


def judged(answer: Callable[[str], httpx.Response], judge_url: str = "http://judge:1") -> tuple[EvalResult, list[str]]:
    """The verdict on v1, whose answers a judge grades; `answer` gives the judge's reply to a question."""
    asked: list[str] = []

    def respond(request: httpx.Request) -> httpx.Response:
        question = json.loads(request.content)["messages"][-1]["content"]
        asked.append(question)
        return answer(question)

    config = f"promotion: guarded\nguard: {{min_answers: 64, judge: {{url: '{judge_url}', model: grader}}}}\n"
    log = log_of(run(config), version(0), promotion(0, "guarded", "s0"), version(1))
    server = Speaker()
    server.says = {"assistant@v0": "This answers it.", "assistant@v1": "Bananas.", "m": "This answers it."}
    of = guardian(log, server)
    with pytest.MonkeyPatch.context() as patch:
        client = httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url=judge_url)
        patch.setattr(ChatClient, "_http", client)
        verdict = asyncio.run(of.try_candidate(version(1)))
    assert verdict is not None
    return verdict, asked


def said_by_judge(text: str) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


def test_where_no_rule_scores_the_answers_a_configured_judge_does() -> None:
    verdict, asked = judged(lambda q: said_by_judge(r"\boxed{-1}" if "Bananas" in q else r"Good: \boxed{1}"))
    assert not verdict.passed and "worse in pairs of answers" in verdict.details
    assert verdict.metrics["score"] == -1.0 and verdict.metrics["base_score"] == 1.0
    assert any("question 1" in each for each in asked)
    verdict, _ = judged(lambda q: said_by_judge(r"\boxed{1}"))
    assert verdict.passed


def test_a_judge_that_is_away_leaves_the_candidate_waiting() -> None:
    with pytest.raises(ScorerAway):
        judged(lambda q: httpx.Response(503))


def test_an_answer_on_which_a_judge_never_votes_does_not_hold_the_candidates_up() -> None:
    """A request whose text makes the judge ramble until it is cut, or that a filter refuses."""
    one_good = lambda q: httpx.Response(400) if "question 1" in q else said_by_judge(r"\boxed{1}")  # noqa: E731
    verdict, asked = judged(one_good)
    assert verdict.passed and verdict.metrics["score"] == 1.0
    tries = sum("question 1" in each for each in asked)
    assert tries == VOTE_TRIES * sum("Say hello." in each for each in asked) > 0
    with pytest.raises(NoVote):
        judged(lambda q: httpx.Response(400))


def test_a_grade_that_cannot_be_read_leaves_its_pair_out() -> None:
    verdict, _ = judged(lambda q: said_by_judge("no grade"))
    assert verdict.passed and "score" not in verdict.metrics


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
    refused = {"t1", found[-1].task_id}
    assert [each.task_id for each in prompts_of(Settings(), codec, "assistant", limits, refused)] == ["t0", "t3"]


class Refusing(Speaker):
    """Refuses prompts that contain "too long" for their content."""

    async def generate(self, model: str, prompt: Any, **sampling: Any) -> Generation:
        if "too long" in prompt[-1]["content"]:
            raise RequestRefused(400, "the prompt has 9999 tokens, the context 2048")
        return await super().generate(model, prompt, **sampling)


def test_a_prompt_that_the_server_refuses_does_not_hold_the_candidates_up(caplog: pytest.LogCaptureFixture) -> None:
    """Any client can send one. Its task would stay among the prompts, and no candidate would ever be served."""
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1))
    tasks = [*QUESTIONS, fixture_task("assistant", "too long"), fixture_task("assistant", "too long too")]
    settings, asked = Settings(bootstrap="nowhere:1"), list[int]()

    def find(*arguments: Any) -> list[Task]:
        found = [each for each in tasks if each.task_id not in arguments[-1]]
        asked.append(len(found))
        return found

    of = Guardian(settings, make_codec(settings), Refusing(), log, "guard/test", find)
    verdict = asyncio.run(of.try_candidate(version(1)))
    assert verdict is not None and verdict.passed
    assert verdict.metrics["answers"] == 3
    assert [tasks[-2].task_id in caplog.text, tasks[-1].task_id in caplog.text] == [True, True]
    del tasks[:3]
    of = Guardian(settings, make_codec(settings), Refusing(), log, "guard/test", find)
    for _ in range(2):  # nothing is left: the server may be at fault, and is asked again
        with pytest.raises(PromptRefused, match="9999 tokens"):
            asyncio.run(of.try_candidate(version(1)))


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


def test_a_version_that_passed_is_served_although_newer_ones_were_published_during_its_trial() -> None:
    """A rollback may go back to a version that passed, and the trainer keeps the checkpoints of what was served."""
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1), version(2))
    assert [u.version for u in log.untried()] == [2]
    log.apply(said(1), -1)
    assert [u.version for u in log.due_promotions()] == [1] and [u.version for u in log.untried()] == [2]
    log.apply(promotion(1, "guarded", "s1"), 10)
    assert log.due_promotions() == [], "it is served"
    log.apply(said(2, "one word"), -1)
    assert guardian(log, Speaker()).refusal_rollback(log.refused()[0]).version == 1
    # A person's decision, or the refusal of a later version, overrides all that was published before it.
    for mode in ("manual", ROLLBACK):
        log = log_of(run(), version(0), promotion(0, "guarded", "s0"), version(1), version(2), promotion(0, mode, "s0"))
        log.apply(said(1), -1)
        log.apply(version(3), 9)
        assert log.due_promotions() == [], mode


def said(name: int, *reasons: str, experiment: str = "guard") -> EvalResult:
    return verdict_of(version(name), experiment, {"base_length": 20.0}, list(reasons), "guard/test")


def answered(
    answers: ServedAnswers, number: int, length: int, reward: float = 0.5, count: int = 8, first: int = 0
) -> None:
    for i in range(first, first + count):
        made = rollout(
            f"t{number}-{i}",
            policy="assistant",
            version=number,
            response=[7] * length,
            sampler=[-1.0] * length,
            reward=reward,
        )
        answers.apply(made)


def test_the_length_of_an_episode_is_that_of_its_turns() -> None:
    """The base model's length is of one turn each, so that several turns were called too long."""
    answers = ServedAnswers()
    masks = ([0] * 4 + [1] * 3 + [0] * 5 + [1] * 5 + [0] * 2 + [1] * 4, [0] * 4 + [1] * 6 + [0] * 13)
    for number, mask in enumerate(masks):
        made = rollout(f"t{number}", policy="assistant", version=1, response=[7] * 19)
        answers.apply(made.model_copy(update={"loss_mask": bytes(mask)}))
    assert answers.evidence("assistant@v1").length == (4 + 6) / 2


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


PAIRED = run("promotion: guarded\nguard: {live_answers: 4, min_answers: 64, max_similarity: 0.6}\n")


def test_live_rewards_are_compared_task_by_task_so_that_chance_is_no_fall() -> None:
    log = log_of(PAIRED, version(0), version(1), said(1), promotion(1, "guarded", "s1"))
    of = guardian(log, Speaker())
    few, many = ServedAnswers(), ServedAnswers()
    for answers, count in ((few, 6), (many, 24)):
        answered(answers, 0, 20, 0.5, count)
        answered(answers, 1, 20, -0.2, count)
    assert of.check_served(version(1), few) is None
    found = of.check_served(version(1), many)
    assert found is not None and "worse in pairs of answers" in found[0].details
    # Many samples of few tasks are no more than these tasks.
    grouped = ServedAnswers()
    for number, reward in ((0, 0.5), (1, -0.2)):
        for index in range(24):
            grouped.apply(rollout(f"t{index // 6}", index, policy="assistant", version=number, reward=reward))
    assert grouped.evidence_of_drop("assistant@v1", "assistant@v0") == evidence_of_drop((-0.2,) * 4, (0.5,) * 4)


def test_a_bad_hour_after_a_good_one_is_no_fall() -> None:
    """The test goes over all pairs. A window over the last of them would be tested again and again, until it errs."""
    log = log_of(PAIRED, version(0), version(1), said(1), promotion(1, "guarded", "s1"))
    of, answers = guardian(log, Speaker()), ServedAnswers()
    for turn in range(16):
        served, target = (1.0, 0.0) if turn < 8 else (0.0, 1.0)
        answered(answers, 1, 20, served, first=8 * turn)
        answered(answers, 0, 20, target, first=8 * turn)
        assert of.check_served(version(1), answers) is None


def test_each_live_task_is_in_one_pair_however_often_the_version_is_checked() -> None:
    rng = np.random.default_rng(0)
    scores = {number: rng.choice([0.0, 1.0], 200, p=[1 - good, good]).tolist() for number, good in ((0, 0.7), (1, 0.5))}
    answers, given = ServedAnswers(), {0: 0, 1: 0}
    for chunk in (1, 7, 30, 0, 2, 60, 60, 40):
        for number in (0, 1):
            for score in scores[number][given[number] : given[number] + chunk]:
                answered(answers, number, 3, score, 1, given[number])
                given[number] += 1
        so_far = [scores[number][: given[number]] for number in (1, 0)]
        for _ in range(3):
            assert answers.evidence_of_drop("assistant@v1", "assistant@v0") == pytest.approx(evidence_of_drop(*so_far))
    assert given == {0: 200, 1: 200} and answers.evidence_of_drop("assistant@v1", "assistant@v0") > 20.0
    # Another pair of versions is a test of its own; a version without tasks gives no pair.
    back = [scores[number][-PAIRED_TASKS:] for number in (0, 1)]
    assert answers.evidence_of_drop("assistant@v0", "assistant@v1") == pytest.approx(evidence_of_drop(*back))
    assert answers.evidence_of_drop("assistant@v1", "assistant@v2") == 1.0


def test_tasks_wait_for_their_pair_and_the_oldest_are_left_out() -> None:
    answers = ServedAnswers()
    answered(answers, 0, 3, 1.0, 3)
    answered(answers, 1, 3, 1.0, 1)
    assert answers.evidence_of_drop("assistant@v1", "assistant@v0") == 1.0
    answered(answers, 1, 3, 0.0, 1, first=1)
    answers.apply(rollout("t1-1", 1, policy="assistant", version=1, reward=0.5))
    assert answers.evidence_of_drop("assistant@v1", "assistant@v0") == evidence_of_drop([1.0, 0.25], [1.0, 1.0])
    answered(answers, 1, 3, 1.0, 20, first=2)
    answered(answers, 1, 3, 0.0, PAIRED_TASKS, first=22)
    assert answers.evidence_of_drop("assistant@v1", "assistant@v0") == pytest.approx(
        evidence_of_drop([1.0, 0.25, 0.0], [1.0, 1.0, 1.0])
    )
    answered(answers, 0, 3, 1.0, 1, first=3)
    assert answers.evidence_of_drop("assistant@v1", "assistant@v0") == pytest.approx(
        evidence_of_drop([1.0, 0.25, 0.0, 0.0], [1.0] * 4)
    )


def test_live_answers_that_are_the_same_to_every_prompt_are_a_fall() -> None:
    log = log_of(PAIRED, version(0), version(1), passed_with(1, base_similarity=0.1), promotion(1, "guarded", "s1"))
    of = guardian(log, Speaker())
    for repeated in (False, True):
        answers = ServedAnswers()
        for index in range(8):
            said_ = [7] * 20 if repeated else range(100 * index + 50, 100 * index + 70)
            answers.apply(
                rollout(f"t{index}", policy="assistant", version=1, prompt=(3, index), response=[*said_], reward=None)
            )
        found = of.check_served(version(1), answers)
        assert (found is not None and "similarity of 1.00" in found[0].details) is repeated
    same_prompt = ServedAnswers()
    for index in range(8):
        same_prompt.apply(rollout(f"t{index}", policy="assistant", version=1, response=[7] * 20, reward=None))
    assert of.check_served(version(1), same_prompt) is None, "one prompt may have one answer"


def passed_with(name: int, **metrics: float) -> EvalResult:
    return verdict_of(version(name), "guard", {"base_length": 20.0} | metrics, [], "guard/test")


def test_without_a_version_to_roll_back_to_the_verdict_is_recorded_and_the_version_stays_served() -> None:
    log = log_of(run(), version(0), promotion(0, "guarded", "s0"))
    answers = ServedAnswers()
    answered(answers, 0, 1)
    found = guardian(log, Speaker()).check_served(version(0), answers)
    assert found is not None and found[1] is None


def fallback_version(*records: Any) -> int | None:
    """The version to which the last published one falls back."""
    log = log_of(*records)
    served = [record for record in records if isinstance(record, PolicyUpdate)][-1]
    found = log.fallback(served)
    return None if found is None else found.version


@pytest.mark.parametrize("compacted", [False, True])
def test_a_version_of_up_falls_back_to_the_last_that_learn_served(compacted: bool) -> None:
    """The run is the same, first with `promotion: always`. Compaction leaves the last promotion of the policy."""
    later = run().model_copy(update={"event_time": T0 + 5, "digest": "m2"})
    learnt = [version(number) for number in range(4)]
    promotions = [] if compacted else [promotion(number, "always", f"s{number}") for number in (0, 1, 3)]
    guarded = [version(number).model_copy(update={"event_time": T0 + 9}) for number in (4, 5)]
    log = [run("promotion: always\n"), *learnt, *promotions, later, guarded[0], said(4, "one word")]
    assert fallback_version(*log, guarded[1], said(5), promotion(5, "guarded", "s5")) == 3


@pytest.mark.parametrize(("promoted", "target"), [([1], 1), ([], 2)])
def test_a_version_that_passed_and_was_never_served_is_gone_back_to_only_if_no_served_one_is_known(
    promoted: list[int], target: int
) -> None:
    """The trainer keeps the checkpoints of versions that were served. Compaction may remove their promotions."""
    tried = [record for number in (1, 2) for record in (version(number), said(number))]
    served = [promotion(number, "guarded", f"s{number}") for number in promoted]
    log = [run(), version(0), *tried, *served, version(3), said(3), promotion(3, "guarded", "s3")]
    assert fallback_version(*log) == target


def test_a_version_falls_back_within_the_runs_that_it_was_trained_from() -> None:
    """A version of another run may be of more steps than the run has, or of another shape."""
    first = [run(), version(0), version(1), said(1), promotion(1, "guarded", "s1")]
    began = run(first=3).model_copy(update={"run_id": "run-2", "digest": "m2"})
    second = [update(3 + step, run_id="run-2", step=step, sha256=f"t{step}") for step in (0, 1)]
    assert fallback_version(*first, began, *second, promotion(4, "guarded", "t1")) == 3


@pytest.mark.parametrize("mode", ["manual", ROLLBACK])
def test_a_version_that_was_taken_back_is_not_gone_back_to(mode: str) -> None:
    learnt = [run("promotion: always\n"), *(version(number) for number in range(4))]
    served = [promotion(number, "always", f"s{number}") for number in range(4)]
    later = run().model_copy(update={"event_time": T0 + 5, "digest": "m2"})
    guarded = version(4).model_copy(update={"event_time": T0 + 9})
    log = [*learnt, *served, promotion(1, mode, "s1"), later, guarded, promotion(4, "guarded", "s4")]
    assert fallback_version(*log) == 1
    again = [*log[:-3], promotion(3, "manual", "s3"), *log[-3:]]
    assert fallback_version(*again) == 3, "it was promoted again"


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
