"""Traces: off, they cost and change nothing; on, one leads from a task to the version that learned from it."""

import asyncio
import hashlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from schemas import topics
from schemas.records import Outcome, Rollout
from streams.apps.hinting.processor import Hinting
from streams.apps.join.processor import JoinProcessor
from streams.apps.scoring.processor import Scoring
from streams.runtime.dlq import letter
from streams.runtime.processor import Dead, Effects, LogRecord, OutputRecord
from tentalis.opd import FixedModel, Teacher
from tentalis.policies.core import PolicyLog
from tentalis.policies.sync import AdapterSync
from tentalis.service import tracing
from tentalis.service.tracing import TracingError, derived, provider_of, span, traceparent_of
from tentalis.storage.file_cache import FileCache
from tentalis.storage.version_files import ADAPTER_WEIGHTS
from tests.support.fake_inference import FakeInference
from tests.support.loop_records import promotion, update
from tests.support.loop_server import LoopServer
from tests.support.stream_records import CODEC, make_feedback, make_result, make_task, on_log
from trainer.data.fetch import RolloutCache
from trainer.run.commit import step_trace_name

PARTITION = 3
COMPLAINT = "That was too long: please answer in one sentence."


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Tracing is on; what ended is here."""
    exporter, provider = InMemorySpanExporter(), provider_of()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.install(provider)
    yield exporter
    tracing.install(None)


def with_trace(record: LogRecord, traceparent: str | None) -> LogRecord:
    headers = () if traceparent is None else (("traceparent", traceparent.encode()),)
    return LogRecord(record.topic, record.partition, record.offset, record.timestamp, record.key, record.value, headers)


def halves_on_log(outputs: list[OutputRecord], *, headers: bool) -> list[LogRecord]:
    return [
        LogRecord(
            topics.HALVES,
            PARTITION,
            offset,
            5_000 + offset,
            output.key,
            output.value,
            output.headers if headers else (),
        )
        for offset, output in enumerate(outputs)
    ]


def teacher() -> Teacher:
    async def model() -> str:
        return "base"

    return Teacher(FakeInference(), FixedModel(model))


def streamed(traceparent: str | None, *, heard: bool = True) -> Effects:
    """One task of one sample through scoring, hinting and the join; the task and the rest came with a trace, which the
    join has not `heard` of if it was restarted."""
    task = make_task(n_samples=1)
    result = make_result(task)
    scoring, hinting = Scoring(CODEC), Hinting(CODEC, teacher())
    records = [
        with_trace(on_log(topics.TASKS, task), traceparent),
        with_trace(on_log(topics.RESULTS, result), traceparent),
        with_trace(on_log(topics.FEEDBACK, make_feedback(result, COMPLAINT)), traceparent),
    ]

    async def run() -> Effects:
        halves: list[OutputRecord] = []
        for record in records:
            halves += (await scoring.process(PARTITION, [record])).outputs
        halves += (await hinting.process(PARTITION, records[2:])).outputs
        join = JoinProcessor(CODEC)
        join.restore(PARTITION, {})
        return await join.process(PARTITION, halves_on_log(halves, headers=heard))

    return asyncio.run(run())


def header(output: OutputRecord) -> str:
    return dict(output.headers)["traceparent"].decode()


def test_what_is_written_is_the_same_with_and_without_tracing(spans: InMemorySpanExporter) -> None:
    with span("task", root="t1") as task:
        traced = streamed(task.traceparent)
    tracing.install(None)
    plain = streamed("00-11111111111111111111111111111111-2222222222222222-01")
    assert [(o.topic, o.key, o.value) for o in traced.outputs] == [(o.topic, o.key, o.value) for o in plain.outputs]
    assert traced.changes == plain.changes
    assert all("traceparent" not in dict(output.headers) for output in plain.outputs)
    for output in traced.outputs:
        assert header(output)[3:35].encode() not in output.value


def test_one_trace_leads_from_a_task_to_the_version_that_learned_from_it(
    spans: InMemorySpanExporter, tmp_path: Path
) -> None:
    with span("task", root="t1", producer=True) as task:
        effects = streamed(task.traceparent)
    (rollout,) = [o for o in effects.outputs if o.topic == topics.ROLLOUTS]
    (outcome,) = [o for o in effects.outputs if o.topic == topics.OUTCOMES]
    assert header(rollout) == header(outcome)

    # The trainer keeps the context beside the rollout, and its step links it.
    record = CODEC.decode(rollout.value, topic=topics.ROLLOUTS, partition=0, offset=0)
    assert isinstance(record, Rollout)
    cache = RolloutCache()
    cache.put(0, 0, record, traceparent_of(rollout.headers))
    with span("step", root=step_trace_name("run", 1, 1), policy="assistant@v2") as step:
        step.link([cache.traces.pop(record.rollout_id)])
    published = derived(step_trace_name("run", 1, 1))
    assert published == step.traceparent, "also a trainer that was restarted knows the context of its step"

    # The server loads what the step made.
    log, server = PolicyLog("local"), LoopServer()
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"w")
    sha256 = hashlib.sha256(b"w").hexdigest()
    made = update(2, sha256=sha256, location=tmp_path.as_uri())
    log.apply(made, 0)
    log.apply(promotion(2, sha256=sha256), 1)
    sync = AdapterSync(
        {"local": server}, log, "local", lambda ack: log.apply(ack, -1), FileCache(tmp_path, 0), {made.name: published}
    )
    asyncio.run(sync.round())

    found: Mapping[str, Any] = {each.name: each for each in spans.get_finished_spans()}
    trace_id = found["task"].context.trace_id
    assert {name for name, each in found.items() if each.context.trace_id == trace_id} == {
        *("task", "score", "hint", "join")
    }
    (linked,) = found["step"].links
    assert linked.context.trace_id == trace_id != found["step"].context.trace_id
    assert linked.context.span_id == found["join"].context.span_id
    assert found["step"].attributes["tentalis.policy"] == found["swap"].attributes["tentalis.policy"] == made.name
    assert found["swap"].parent.span_id == found["step"].context.span_id
    assert len(found["join"].links) == 1, "one half is its parent, the other is linked"


def test_a_join_that_was_restarted_finds_the_trace_of_a_task_by_its_id(spans: InMemorySpanExporter) -> None:
    with span("task", root="t1") as task:
        pass
    effects = streamed(task.traceparent, heard=False)
    assert {header(output)[3:35] for output in effects.outputs} == {str(task.traceparent)[3:35]}


@pytest.mark.parametrize("came_with", [None, "nonsense"])
def test_a_task_that_came_without_a_trace_has_one_all_the_same(
    spans: InMemorySpanExporter, came_with: str | None
) -> None:
    effects = streamed(came_with)
    assert {header(output)[3:35] for output in effects.outputs} == {str(derived("t1"))[3:35]}


def test_what_is_derived_follows_the_sampler() -> None:
    provider = provider_of()
    provider.sampler = ParentBased(TraceIdRatioBased(0.5))
    tracing.install(provider)
    try:
        flags = []
        for name in map(str, range(50)):
            with span("task", root=name) as task:
                assert task.traceparent == derived(name)
            flags.append(str(task.traceparent)[-2:])
        assert set(flags) == {"00", "01"}
    finally:
        tracing.install(None)


def test_a_foreign_trace_is_continued_and_nonsense_is_not(spans: InMemorySpanExporter) -> None:
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert {header(output)[3:35] for output in streamed(theirs).outputs} == {theirs[3:35]}
    for nonsense in ("", "00-0-0-0", "zz", "00-" + "x" * 32 + "-b7ad6b7169203331-01", "00-" + "0" * 32 + "-00-01"):
        with span("work", parent=nonsense) as work:
            assert work.traceparent and work.traceparent[3:35] != "0" * 32


def test_an_unsampled_trace_stays_unsampled(spans: InMemorySpanExporter) -> None:
    effects = streamed("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
    assert all(header(output).endswith("-00") for output in effects.outputs)
    assert spans.get_finished_spans() == ()


def test_a_dead_letter_keeps_its_trace(spans: InMemorySpanExporter) -> None:
    with span("task") as task:
        record = with_trace(on_log(topics.TASKS, make_task()), task.traceparent)
    dead = letter(Dead.of(record, "process", ValueError("no")), group="g", attempts=1, version="1", failed_at=0.0)
    assert traceparent_of(dead.headers) == task.traceparent


def test_an_error_is_on_its_span(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="no"), span("work"):
        raise ValueError("no")
    (found,) = spans.get_finished_spans()
    assert (found.status.is_ok, found.status.description) == (False, "ValueError: no")


def test_ids_do_not_come_from_the_generator_that_others_use(spans: InMemorySpanExporter) -> None:
    random.seed(1)
    before = random.getstate()
    with span("a"), span("b"):
        pass
    assert random.getstate() == before


def test_off_nothing_is_imported_read_or_written() -> None:
    program = (
        "import sys; from tentalis.service import tracing; tracing.configure('x', {})\n"
        "with tracing.span('a', root='r') as s: s.link(['00-x'])\n"
        "print(s.traceparent, tracing.derived('r'), tracing.traceparent_of([('traceparent', b'x')]))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None None None", "[]"]


def test_spans_of_a_process_are_in_its_file_when_it_ends(tmp_path: Path) -> None:
    program = (
        "from tentalis.service import tracing; tracing.configure('worker')\n"
        "with tracing.span('generate', root='t1', task_id='t1'): pass"
    )
    env = {"TENTALIS_TRACES": str(tmp_path), "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)
    (file,) = tmp_path.glob("worker-*.jsonl")
    (resource,) = json.loads(file.read_text())["resourceSpans"]
    attributes = {a["key"]: a["value"] for a in resource["resource"]["attributes"]}
    assert attributes["service.name"] == {"stringValue": "tentalis-worker"}
    assert [s["name"] for scope in resource["scopeSpans"] for s in scope["spans"]] == ["generate"]


def test_spans_go_to_a_collector() -> None:
    received: list[tuple[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        program = (
            "from tentalis.service import tracing; tracing.configure('worker')\n"
            "with tracing.span('generate', root='t1'): pass"
        )
        endpoint = f"http://127.0.0.1:{server.server_port}"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "PATH": "", "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, "-c", program], check=True, env=env)
        server.shutdown()
        serving.join()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert body["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] == "generate"


def test_an_exporter_that_is_not_installed_is_named() -> None:
    with pytest.raises(TracingError, match="'grpc', which is not installed: install opentelemetry-exporter-otlp-proto"):
        tracing.configure("x", {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    with pytest.raises(TracingError, match="asks for 'zipkin'"):
        tracing.configure("x", {"OTEL_TRACES_EXPORTER": "zipkin"})
    for nothing in ({"OTEL_SDK_DISABLED": "true", "TENTALIS_TRACES": "/x"}, {"OTEL_TRACES_EXPORTER": "none"}, {}):
        tracing.configure("x", nothing)
    assert not tracing.enabled()


def test_outcomes_carry_the_trace_as_rollouts_do(spans: InMemorySpanExporter) -> None:
    effects = streamed(None)
    kinds = {type(CODEC.decode(o.value, topic=o.topic, partition=0, offset=0)) for o in effects.outputs}
    assert kinds == {Outcome, Rollout}
    assert len({header(output) for output in effects.outputs}) == 1
