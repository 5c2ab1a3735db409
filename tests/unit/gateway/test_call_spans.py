"""Spans of model calls: the attributes of OpenTelemetry's conventions for generative AI, and nothing that was said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from schemas.ids import turn_task_id
from tentalis.service import tracing
from tentalis.service.tracing import provider_of
from tests.support.gateway_lab import Lab, lab, wait_for

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), provider_of()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.install(provider)
    yield exporter
    tracing.install(None)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("spans")) as made:
        made.serve(2)
        yield made


def span_of_call(spans: InMemorySpanExporter) -> ReadableSpan:
    def found() -> ReadableSpan | None:
        return next((span for span in spans.get_finished_spans() if span.kind is SpanKind.CLIENT), None)

    span: ReadableSpan = wait_for(found, "the span of the call has ended")
    return span


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_call_is_a_span_of_its_caller_s_trace_with_a_link_to_its_task(
    gateway: Lab, spans: InMemorySpanExporter, streamed: bool
) -> None:
    headers = {"traceparent": PARENT, "X-Session-Id": "s", "X-User-Id": "ann"}
    asked: dict[str, Any] = {"max_tokens": 9, "temperature": 0.5, "stop": ["x"], "headers": headers}
    if streamed:
        gateway.stream("secret words", stream_options={"include_usage": True}, **asked)
    else:
        assert gateway.chat("secret words", **asked).status_code == 200
    span, event = span_of_call(spans), gateway.log.events[-1]
    assert (span.name, span.status.status_code) == ("chat assistant@v2", StatusCode.UNSET)
    assert (
        span.parent is not None and f"{span.parent.trace_id:032x}" in PARENT and f"{span.parent.span_id:016x}" in PARENT
    )
    attributes = dict(span.attributes or {})
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "local",
        "gen_ai.request.model": "assistant@v2",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.request.stream": streamed,
        "gen_ai.conversation.id": "ann/s",
        "gen_ai.response.id": event.session_event_id,
        "gen_ai.response.model": "assistant@v2",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "tentalis.policy": "assistant",
        "tentalis.turn_type": "main",
    }
    task = tracing.derived(turn_task_id(event.session_id, event.session_event_id))
    assert task is not None
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [task.split("-")[1]]
    assert "secret" not in str(attributes)


def test_a_failed_call_is_an_error_with_its_status(
    gateway: Lab, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.script, "error", (500, b'{"error": {"message": "out of memory"}}', "application/json"))
    assert gateway.chat("hi").status_code == 500
    span = span_of_call(spans)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "500"


def test_a_stream_that_breaks_off_is_an_error(
    gateway: Lab, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.script, "break_after", 2)
    gateway.stream("hi")
    span = span_of_call(spans)
    assert span.status.status_code is StatusCode.ERROR and (span.attributes or {})["error.type"] == "broken"


def test_without_tracing_nothing_is_made(gateway: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("attributes were made")

    monkeypatch.setattr("tentalis.gateway.calls.call_span.request_attributes", never)
    monkeypatch.setattr("tentalis.gateway.calls.call_span.answer_attributes", never)
    assert gateway.chat("hi").status_code == 200
