"""A conversation from end to end, as processes: gateway, sessions, scoring, hinting, join."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from schemas import topics
from schemas.records import Outcome, OutcomeKind, Record, Rollout
from schemas.tensors import float32_view, int32_view, uint8_view
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.support.fork_server import ForkedProcess
from tests.support.gateway_lab import PROMPT_IDS, WORDS, Script, ack, backend_app, listening
from tests.support.kafka_fixture import ensure_topics, eventually
from tests.support.model_server import model_server

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]


Commands = dict[str, "subprocess.Popen[bytes]"]


@pytest.fixture
def processes() -> Iterator[Commands]:
    started: Commands = {}
    yield started
    for process in started.values():
        process.kill()
        process.wait(10)


def test_what_is_said_to_an_answer_becomes_a_rollout_with_the_tokens_of_the_backend(
    own_broker: EmbeddedBroker, processes: Commands, tmp_path: Path
) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap)
    ensure_topics(settings)
    codec = make_codec(settings)
    publisher = Publisher(settings, "test", codec)
    publisher.send(topics.POLICY_ACKS, ack("assistant", 1))
    publisher.flush()
    port = free_port()

    def start(name: str, *options: str) -> None:
        environment = os.environ | {
            "TENTALIS_BOOTSTRAP": settings.require_bootstrap(),
            "TENTALIS_HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        }
        command = ["-m", "tentalis.cli", "serve", name, *options]
        processes[name] = ForkedProcess(command, environment, tmp_path / f"{name}.log")

    def logs() -> str:
        return "\n".join(f"{name}: {(tmp_path / f'{name}.log').read_text()[-1500:]}" for name in processes)

    def read(topic: str) -> list[Record]:
        return [each.decode(codec) for each in read_to_end(settings, topic)]

    teacher_server = model_server(prompt=PROMPT_IDS)
    with teacher_server as teacher, listening(backend_app(Script(adapters={"assistant@v1"}))) as backend:
        start("gateway", "--server", backend, "--policy", "assistant", "--port", str(port), "--gateway-id", "gw")
        start("sessions", "--instance", "0")
        start("scoring", "--instance", "0")
        start("hinting", "--instance", "0", "--server", teacher)
        start("join", "--instance", "0")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"x-session-id": "s"}, timeout=60) as client:

            def ready() -> bool:
                try:
                    return client.get("/readyz").status_code == 200
                except httpx.TransportError:
                    return False

            eventually(ready, 90, 0.5, logs)
            talk = [{"role": "user", "content": "What is the weather like?"}]
            for said in ("That is too long. Please answer in one short sentence.", ""):
                answer = client.post("/v1/chat/completions", json={"model": "assistant", "messages": talk})
                assert answer.status_code == 200, answer.text
                talk += [answer.json()["choices"][0]["message"], {"role": "user", "content": said}]
            assert client.post("/v1/sessions/s/end").status_code == 200

        def outcomes() -> dict[int | None, Outcome]:
            found = [record for record in read(topics.OUTCOMES) if isinstance(record, Outcome)]
            own = [outcome for outcome in found if outcome.kind is not OutcomeKind.LATE]
            return {outcome.head.turn_index: outcome for outcome in own}

        eventually(lambda: set(outcomes()) == {0, 1}, 120, 0.5, logs)
    assert outcomes()[0].has_opd and not outcomes()[0].not_trainable
    assert outcomes()[1].kind is OutcomeKind.EMPTY and outcomes()[1].head.session_id == outcomes()[0].head.session_id
    (rollout,) = [record for record in read(topics.ROLLOUTS) if isinstance(record, Rollout)]
    assert rollout.rollout_id == outcomes()[0].rollout_id
    response = [100 + at for at in range(len(WORDS))]
    assert int32_view(rollout.token_ids).tolist() == [*PROMPT_IDS, *response]
    assert uint8_view(rollout.loss_mask).tolist() == [0] * len(PROMPT_IDS) + [1] * len(WORDS)
    assert float32_view(rollout.sampler_logprobs).tolist() == [0.0] * len(PROMPT_IDS) + [-0.5] * len(WORDS)
    assert [(span.start, span.policy) for span in rollout.policy_spans] == [(len(PROMPT_IDS), "assistant@v1")]
    assert rollout.hints and rollout.head.policy == "assistant"
