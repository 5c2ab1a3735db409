"""The policies process on a real broker with a server in memory."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas import topics
from schemas.records import LogprobsMode, PolicyAck, Promotion
from tentalis.inference.protocol import Completion, Float32, Generation, ServerUnavailable
from tentalis.kafka.consumer import read_to_end
from tentalis.policies.guard import ROLLBACK
from tentalis.policies.process import PolicyService
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support import ROOT
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_lab import Lab, running
from tests.support.loop_records import manifest, update
from tests.support.loop_server import LoopServer
from tests.support.trainer_lab import rollout
from tests.support.transcript import PageShell, commands_of

pytestmark = pytest.mark.broker


class Policy:
    """A policy with a name of its own, and a process that serves it."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.server: LoopServer = LoopServer()

    async def run(self, stop: threading.Event, promotion: str = "always") -> None:
        server = {"local": self.server}
        await PolicyService(self.lab.settings, server, self.server, server_id=self.lab.name, promotion=promotion).run(
            stop
        )

    def publish(self, version: int, weights: bytes = b"w", said: bytes | None = None, **more: Any) -> None:
        folder = self.folder / f"v{version}"
        folder.mkdir()
        (folder / ADAPTER_WEIGHTS).write_bytes(weights)
        values = more | {"policy": self.lab.name, "sha256": hashlib.sha256(said or weights).hexdigest()}
        self.lab.put(topics.POLICIES, update(version, location=folder.as_uri(), **values))

    def acks(self) -> list[PolicyAck]:
        return self.lab.records(
            topics.POLICY_ACKS, lambda a: a.server_id == self.lab.name and a.policy == self.lab.name
        )

    def promotions(self) -> list[Promotion]:
        return self.lab.records(topics.POLICIES, lambda p: isinstance(p, Promotion) and p.policy == self.lab.name)

    def serves(self, version: int) -> None:
        name = f"{self.lab.name}@v{version}"
        eventually(lambda: self.acks() and (self.acks()[-1].name, self.acks()[-1].ok) == (name, True), 30)
        assert name in self.server.loaded


@pytest.fixture
def policy(kafka: Kafka, unique: str, tmp_path: Path) -> Policy:
    return Policy(Lab(kafka.bootstrap, unique), tmp_path)


def test_of_any_number_of_processes_one_keeps_what_is_no_control_record(policy: Policy) -> None:
    lab = policy.lab
    lying = Promotion(policy="another", version=1, event_time=1, sha256="-", mode="always")
    bad = [(topic, lab.name.encode()) for topic in topics.CONTROL]
    bad.append((topics.POLICIES, lab.codec.encode(topics.POLICIES, lying)))
    with (
        running(policy.run),
        running(Policy(Lab(lab.settings.require_bootstrap(), f"{lab.name}-2"), policy.folder).run),
    ):
        for topic, value in bad:
            lab.publisher.send_bytes(topic, b"garbage", value, [("mine", b"1")])
        lab.publisher.flush()
        policy.publish(1)
        policy.serves(1)

        def letters() -> list[tuple[str, bytes | None]]:
            values = {value for _, value in bad}
            found = [stored for topic in topics.CONTROL for stored in read_to_end(lab.settings, topics.dlq(topic))]
            ours = [each for each in found if each.value in values]  # other tests put garbage on the same topics
            assert all(dict(each.headers)["mine"] == b"1" and each.key == "garbage" for each in ours)
            return [(each.topic.removesuffix(".dlq"), each.value) for each in ours]

        eventually(lambda: len(letters()) >= len(bad), 40)
        assert sorted(letters()) == sorted(bad)


def test_published_promoted_loaded_acknowledged_and_again_after_restarts(policy: Policy) -> None:
    with running(policy.run):
        policy.publish(1)
        policy.serves(1)
        policy.publish(2)
        policy.serves(2)
        policy.publish(3, said=b"something else")
        eventually(lambda: (3, False) in [(a.version, a.ok) for a in policy.acks()], 30)
        policy.serves(2)
        # The server restarts: away for a while, then back without adapters.
        policy.server.away = ServerUnavailable("restarting")
        policy.server.loaded.clear()
        before = len(policy.acks())
        policy.publish(4)
        eventually(lambda: len(policy.promotions()) == 4, 30)
        assert len(policy.acks()) == before
        policy.server.away = None
        policy.serves(4)
    known = len(policy.acks())
    with running(policy.run):
        policy.publish(5)
        policy.serves(5)
    assert len(policy.acks()) == known + 1, "what was acknowledged is not acknowledged again"
    assert [p.version for p in policy.promotions()] == [1, 2, 3, 4, 5]


def test_an_operator_takes_back_a_bad_adapter_as_the_page_says(policy: Policy, tmp_path: Path) -> None:
    lab, run = policy.lab, f"run-{policy.lab.name}"
    lab.put(topics.RUNS, manifest(run, first=0).model_copy(update={"policy": lab.name, "digest": lab.name}))
    variables = {"TENTALIS_BOOTSTRAP": lab.settings.require_bootstrap(), "POLICY": lab.name}
    with running(policy.run), PageShell(tmp_path / "operator", variables) as operator:
        for version in (1, 2):
            policy.publish(version, weights=b"w%d" % version, run_id=run, step=version)
            policy.serves(version)
        operator.follow(commands_of(ROOT / "docs" / "operations" / "disaster.md"))
        policy.serves(1)
    assert [(each.version, each.mode) for each in policy.promotions()][-1] == (1, ROLLBACK)


@pytest.mark.parametrize(
    "runbook",
    [
        ROOT / "docs" / "operations" / "runbooks" / "tentalis-adapter-refused.md",
        ROOT / "docs" / "operations" / "runbooks" / "tentalis-policy-not-served.md",
    ],
    ids=lambda page: page.stem,
)
def test_an_operator_looks_at_a_refused_adapter_as_the_runbook_says(
    runbook: Path, policy: Policy, tmp_path: Path
) -> None:
    """The server refuses version 2: its file has another sha256 than announced."""
    variables = {"TENTALIS_BOOTSTRAP": policy.lab.settings.require_bootstrap(), "POLICY": policy.lab.name}
    with running(policy.run), PageShell(tmp_path / "operator", variables) as operator:
        policy.publish(1)
        policy.serves(1)
        policy.publish(2, said=b"something else")
        eventually(lambda: (2, False) in [(each.version, each.ok) for each in policy.acks()], 30)
        operator.follow(commands_of(runbook))


def test_without_the_guard_nothing_is_promoted(policy: Policy) -> None:
    policy.publish(1)
    with running(lambda stop: policy.run(stop, "manual")):
        policy.lab.put(
            topics.POLICIES,
            Promotion(
                policy=policy.lab.name,
                version=1,
                event_time=1,
                sha256=hashlib.sha256(b"w").hexdigest(),
                mode="manual",
            ),
        )
        policy.serves(1)
    assert [p.mode for p in policy.promotions()] == ["manual"]


class OneWord(LoopServer):
    """Answers with 20 tokens, but for the versions that have collapsed."""

    collapsed = ""

    async def generate(self, model: str, prompt: Any, **sampling: Any) -> Generation:
        n = 1 if model == self.collapsed else 20
        ids, logprobs = np.arange(n, dtype=np.int32), np.full(n, -1.0, dtype=np.float32)
        return Generation(
            model,
            np.array([1, 2], dtype=np.int32),
            [Completion("word " * n, ids, logprobs, "stop")],
            LogprobsMode.PROCESSED,
        )

    async def score(self, model: str, token_ids: Any, temperature: float = 1.0) -> Float32:
        canary = np.array([np.nan, -1.0, -2.0], dtype=np.float32)
        return canary if len(token_ids) == 3 else np.full(len(token_ids), -1.0, dtype=np.float32)


def test_under_the_guard_a_collapse_is_not_served_and_one_that_is_served_is_rolled_back(policy: Policy) -> None:
    lab = policy.lab
    policy.server = server = OneWord()
    server.collapsed = f"{lab.name}@v2"
    config = "promotion: guarded\nguard: {fixture: [Hello], live_answers: 4}\n"
    lab.put(
        topics.RUNS,
        manifest(lab.name, first=0).model_copy(update={"policy": lab.name, "config": config, "digest": "d"}),
    )
    with running(lambda stop: policy.run(stop, "run")):
        policy.publish(0, run_id=lab.name, step=0)
        policy.serves(0)
        policy.publish(1, b"w1", run_id=lab.name, step=1)
        policy.serves(1)
        policy.publish(2, b"w2", run_id=lab.name, step=2)
        eventually(lambda: policy.promotions()[-1].mode == ROLLBACK, 30)
        assert policy.promotions()[-1].version == 1
        assert "v2 was refused: answers have 1.0 tokens" in policy.promotions()[-1].reason
        # Its users get one word from v1 after all.
        lab.put(
            topics.ROLLOUTS, *[rollout(f"{lab.name}-{i}", policy=lab.name, version=1, response=[7]) for i in range(4)]
        )
        eventually(lambda: policy.promotions()[-1].version == 0, 30)
        policy.serves(0)
    assert [(p.version, p.mode) for p in policy.promotions()] == [
        (0, "guarded"),
        (1, "guarded"),
        (1, ROLLBACK),
        (0, ROLLBACK),
    ]
    said = lab.records(topics.EVALS, lambda e: e.scenario == lab.name)
    assert [(e.policy, e.experiment, e.passed) for e in said] == [
        (f"{lab.name}@v1", "guard", True),
        (f"{lab.name}@v2", "guard", False),
        (f"{lab.name}@v1", "guard-live", False),
    ]
