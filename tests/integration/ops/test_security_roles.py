"""The processes of a conversation and of its policies, each as the user of its role, with TLS, SCRAM and its own ACLs;
and what each says when one right is missing."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.records import EvalResult, Feedback, Hint, PolicyAck, Promotion, Record, Result, SessionEvent, Source, Task
from tentalis.cli.main import app
from tentalis.kafka.acls import ROLES, Grant, Operation, Resource
from tentalis.kafka.admin import bindings, grant
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import GroupConsumer, read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topology import CONTROL_GROUP
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.kafka_fixture import eventually, known
from tests.support.loop_records import manifest, update
from tests.support.security_lab import Application, SafeBroker, environment, safe_broker
from tests.support.trainer_lab import rollout
from tests.support.whole_server import WholeServer, whole_server

pytestmark = pytest.mark.broker

POLICY, RUN, TRAINING = "assistant", "safe-run", "tentalis-trainer-assistant"
DENIED = ("AUTHORIZATION_FAILED", "AuthorizationFailed", "do not allow", "lacks ACLs")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SafeBroker]:
    with safe_broker(tmp_path_factory.mktemp("safe")) as broker:
        yield broker


@pytest.fixture
def server() -> Iterator[WholeServer]:
    with whole_server() as found:
        yield found


class Stage:
    """The processes of this test, and what lies on the log."""

    def __init__(self, lab: SafeBroker, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.auditor = lab.role("auditor")
        self.codec = make_codec(self.auditor)
        self.started: dict[str, Application] = {}

    def serve(self, role: str, *options: str, user: Settings | None = None) -> Application:
        application = Application(role, user or self.lab.role(role), self.folder, *options)
        self.started[role] = application
        return application

    def said(self) -> str:
        return "\n".join(f"{name}: {each.said()[-2000:]}" for name, each in self.started.items())

    def put(self, role: str, *records: tuple[str, Record]) -> None:
        who = self.lab.role(role)
        publisher = Publisher(who, "test", make_codec(who))
        for topic, record in records:
            publisher.send(topic, record)
        publisher.flush(20.0)

    def read(self, topic: str, kind: type[Record]) -> list[Any]:
        stored = read_to_end(self.auditor, topic)
        return [record for each in stored if isinstance(record := each.decode(self.codec), kind)]

    def wait(self, check: Any) -> None:
        """Until `check` returns something true, with all processes alive and none of them refused anything."""

        def checked() -> Any:
            for name, each in self.started.items():
                if each.process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {each.process.returncode}: {each.said()[-3000:]}")
                refused = [line for line in each.said().splitlines() if any(words in line for words in DENIED)]
                if refused:
                    raise RuntimeError(f"{name} was refused: {refused}")
            return known(check)

        eventually(checked, 300, 0.3, self.said)

    def wait_for(self, expected: Any, found: Any) -> None:
        """Until `found` returns what is expected; the last that it returned is in the error."""

        def as_expected() -> bool:
            last = found()
            assert last == expected
            return True

        self.wait(as_expected)

    def count(self, topic: str, kind: type[Record]) -> int:
        return len(self.read(topic, kind))


@pytest.fixture
def stage(lab: SafeBroker, tmp_path: Path) -> Iterator[Stage]:
    found = Stage(lab, tmp_path)
    yield found
    for application in found.started.values():
        application.end()


def published(folder: Path, version: int) -> tuple[str, Record]:
    """A version of the policy with its file, as a trainer announces it."""
    place = folder / f"v{version}"
    place.mkdir()
    weights = f"weights {version}".encode()
    (place / ADAPTER_WEIGHTS).write_bytes(weights)
    more = {"run_id": RUN, "step": version, "base_model": "base", "location": place.as_uri()}
    return topics.POLICIES, update(version, sha256=hashlib.sha256(weights).hexdigest(), **more)


def test_a_conversation_its_lesson_and_its_policies_under_the_least_acls(
    stage: Stage, server: WholeServer, tmp_path: Path
) -> None:
    hinters, port = tmp_path / "hinters.yaml", free_port()
    url = f"http://127.0.0.1:{port}"
    hinters.write_text(server.hinters())
    stage.serve("policies", "--server", server.url)
    stage.serve("gateway", "--server", server.url, "--policy", POLICY, "--port", str(port), "--gateway-id", "g")
    stage.serve("sessions")
    stage.serve("experience", "--server", server.url, "--hinters", str(hinters))
    stage.serve("join")

    # A run under the guard: its first version is promoted, loaded and acknowledged.
    guarded = manifest(RUN, first=0).model_copy(update={"config": "promotion: guarded\nguard: {live_answers: 4}\n"})
    stage.put("trainer", (topics.RUNS, guarded), published(tmp_path, 0))
    stage.wait_for([0], lambda: [ack.version for ack in stage.read(topics.POLICY_ACKS, PolicyAck) if ack.ok])

    with httpx.Client(base_url=url, headers={"x-session-id": "s"}, timeout=60) as client:

        def ready() -> int | str:
            try:
                return client.get("/readyz").status_code
            except httpx.TransportError as error:
                return str(error)

        stage.wait_for(200, ready)
        talk = [{"role": "user", "content": "What is the weather like?"}]
        for said in ("Please answer in one sentence.", ""):
            answer = client.post("/v1/chat/completions", json={"model": POLICY, "messages": talk})
            assert answer.status_code == 200, answer.text
            talk += [answer.json()["choices"][0]["message"], {"role": "user", "content": said}]
        assert client.post("/v1/sessions/s/end").status_code == 200

        # The bridge: a task, its result and feedback on it, asked for again.
        task = {"task_id": "posted", "manager_id": "m", "task_type": "chat", "prompt": "Sort."}
        result = {"task_id": "posted", "worker_id": "w", "prompt": "Sort.", "result": "sorted"}
        told = {"task_id": "posted", "manager_id": "m", "worker_id": "w", "score": 0.2, "textual_feedback": "Shorter."}
        assert client.post("/tasks/assign", json=task).status_code == 201
        assert client.post("/tasks/result", json=result).status_code == 201
        assert client.post("/feedback", json=told).status_code == 201

        def known() -> tuple[object, ...]:
            status, training = client.get("/tasks/posted/status").json(), client.get("/training/status").json()
            policies = {each["policy"]: each for each in training["policies"]}
            components = [training["components"][name] for name in ("sessions", "join")]
            without_lag = [name for name, group in training["consumer_groups"].items() if group["lag"] is None]
            return status["status"], policies[POLICY]["promoted_version"], components, without_lag

        stage.wait_for(("completed", 0, ["active", "active"], []), known)
    stage.wait_for((3, 3), lambda: (stage.count(topics.TASKS, Task), stage.count(topics.RESULTS, Result)))
    told_by = lambda source: [each for each in stage.read(topics.FEEDBACK, Feedback) if each.source is source]  # noqa: E731
    stage.wait_for(2, lambda: len(told_by(Source.NEXT_STATE)))
    stage.wait_for(2, lambda: stage.count(topics.HALVES, Hint))
    session = {event.session_id for event in stage.read(topics.SESSIONS, SessionEvent)}
    assert {hint.sample.head.session_id for hint in stage.read(topics.HALVES, Hint)} == session and len(session) == 1

    # The guard tries the next version on the tasks of the log, and watches what is served by its rollouts.
    stage.put("trainer", published(tmp_path, 1))
    stage.wait_for([True], lambda: [each.passed for each in stage.read(topics.EVALS, EvalResult)])
    promoted = lambda: [each.version for each in stage.read(topics.POLICIES, Promotion)]  # noqa: E731
    stage.wait_for([0, 1], promoted)
    live = [rollout(f"live-{i}", policy=POLICY, version=1, response=[7]) for i in range(4)]
    stage.put("join", *((topics.ROLLOUTS, each) for each in live))
    stage.wait_for([0, 1, 0], promoted)

    # How far a trainer is behind, the gateway tells without reading what it trains on.
    member = GroupConsumer(stage.lab.role("trainer"), TRAINING, [topics.ROLLOUTS])
    try:
        stage.wait(lambda: (stored := member.poll(0.5)) and not member.commit(stored))
        behind = lambda: httpx.get(f"{url}/training/status", timeout=60).json()["consumer_groups"].get(TRAINING)  # noqa: E731
        stage.wait(lambda: (group := behind()) and group["lag"] is not None)
    finally:
        member.close()


def _less(lab: SafeBroker, role: str, lacking: Grant) -> Settings:
    """A user with all that a role needs but one right."""
    assert lacking in ROLES[role].grants
    user = f"less-{role}-{lacking.resource.value}"
    lab.add_users([user])
    all_of_it = bindings([ROLES[role]], f"User:{user}")
    grant(lab.super_user(), [each for each in all_of_it if each[2] != lacking])
    return lab.login(user)


@pytest.mark.parametrize(
    ("role", "options", "topic"),
    [
        ("sessions", (), topics.FEEDBACK),
        ("experience", ("--server", "http://127.0.0.1:9"), topics.HALVES),
        ("gateway", ("--server", "http://127.0.0.1:9", "--policy", POLICY), topics.SESSIONS),
        ("policies", ("--server", "http://127.0.0.1:9"), topics.POLICY_ACKS),
    ],
)
def test_a_process_that_may_not_write_ends_with_6_and_names_what_it_lacks(
    lab: SafeBroker, tmp_path: Path, role: str, options: tuple[str, ...], topic: str
) -> None:
    user = _less(lab, role, Grant(Resource.TOPIC, topic, Operation.WRITE))
    if role == "experience":
        (tmp_path / "hinters.yaml").write_text("lesson: {endpoint: {url: 'http://127.0.0.1:9', model: judge}}\n")
        options += ("--hinters", str(tmp_path / "hinters.yaml"))
    done = CliRunner().invoke(app, ["serve", role, *options], env=environment(user, tmp_path / "password"))
    assert done.exit_code == 6, done.output
    principal = f"User:less-{role}-topic"
    assert f"{principal} lacks ACLs that the role {role} needs: Write on topic {topic}." in done.output
    assert f"`tentalis topics acls --role {role} --principal {principal}`" in done.output


@pytest.mark.parametrize(
    ("role", "options", "group"),
    [("sessions", (), "tentalis-sessions"), ("policies", ("--server", "http://127.0.0.1:9"), CONTROL_GROUP)],
)
def test_a_process_without_its_group_ends_with_6_and_names_it(
    stage: Stage, role: str, options: tuple[str, ...], group: str
) -> None:
    user = _less(stage.lab, role, Grant(Resource.GROUP, group, Operation.READ))
    process = stage.serve(role, *options, user=user)
    assert process.process.wait(300) == 6, process.said()
    assert f"User:less-{role}-group" in process.said() and f"Read on group {group}" in process.said()
