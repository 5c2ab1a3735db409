"""OpenTelemetry traces, from a task's creation to the policy that learned from it. Off, at no cost, unless configured.

The context travels as W3C `traceparent` in record headers, never in a record: a replay does not depend on it. A task is
the root of its trace; scoring, hinting and the join continue it. A training step is the root of another trace, with a
link to each rollout that it learned from; the swap of its adapter continues that trace.

The ids of a root are derived from the task or step, so that a process that lost the context in a restart continues the
same trace.
"""

import atexit
import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self

from tentalis.service import variables

TRACEPARENT = "traceparent"
# A batch links every rollout in it; the SDK's own limit is 128.
MAX_LINKS = 65_536

FLUSH_S = 1.0

_sampler: Any = None
_tracer: Any = None
_last_words: "_LastWords | None" = None
_root: ContextVar[tuple[int, int] | None] = ContextVar("root", default=None)


class TracingError(ValueError):
    """The OTEL_* variables ask for something that is not installed. The message names it and the remedy."""


class TraceSpan:
    """A unit of work. `traceparent` goes into the headers of the records that it writes; None while tracing is off."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Any = None) -> None:
        self._span = span
        self.traceparent = None if span is None else _format(span.get_span_context())

    def link(self, traceparents: Iterable[str | None]) -> None:
        """Links the span to further causes."""
        if self._span is not None:
            for traceparent in traceparents:
                context = _parse(traceparent)
                if context is not None:
                    self._span.add_link(context)

    def describe(self, attributes: Mapping[str, Any]) -> None:
        """Adds attributes under the names of a convention."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def fail(self, kind: str, message: str) -> None:
        """Marks the span as failed. `kind`: an HTTP status, or one word for the kind of failure."""
        if self._span is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, message)
            self._span.set_attribute("error.type", kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._span is not None:
            if error is not None:
                from opentelemetry.trace import StatusCode

                self._span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
            self._span.end()


_OFF = TraceSpan()


def enabled() -> bool:
    """True if spans are recorded."""
    return _tracer is not None


def configure(service: str, env: Mapping[str, str] = os.environ) -> None:
    """Turns tracing on if OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT or TENTALIS_TRACES (a folder, for files of
    OTLP JSON) is set. Sampling, batching, headers and resource follow the OTEL_* variables. Raises TracingError.
    """
    exporter = _exporter(service, env)
    if exporter is None:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = env.get("OTEL_SERVICE_NAME") or f"tentalis-{service.rpartition('tentalis-')[2]}"
    resource = Resource.create({"service.name": name, "service.instance.id": f"{socket.gethostname()}-{os.getpid()}"})
    provider = provider_of(resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    install(provider)
    global _last_words
    _last_words = _LastWords(provider)
    atexit.register(shutdown)


def provider_of(resource: Any = None) -> Any:
    """A TracerProvider with our derived ids, and a link limit that is large enough for a batch."""
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider

    limits = SpanLimits() if os.environ.get("OTEL_SPAN_LINK_COUNT_LIMIT") else SpanLimits(max_links=MAX_LINKS)
    return TracerProvider(resource=resource, span_limits=limits, id_generator=_ids(), shutdown_on_exit=False)


def install(provider: Any) -> None:
    """Records spans with this provider from now on; None stops recording."""
    global _sampler, _tracer
    _tracer = None if provider is None else provider.get_tracer("tentalis")
    _sampler = None if provider is None else provider.sampler


class _LastWords:
    """Exports the remaining spans when the process ends, within FLUSH_S: an unreachable collector must not delay it.

    The thread is started beforehand, because none can be started while Python shuts down.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._asked, self._done = threading.Event(), threading.Event()
        threading.Thread(target=self._flush, name="last traces", daemon=True).start()

    def _flush(self) -> None:
        self._asked.wait()
        self._provider.force_flush()
        self._done.set()

    def say(self) -> None:
        if not self._asked.is_set():
            self._asked.set()
            self._done.wait(FLUSH_S)


def shutdown() -> None:
    """Exports the remaining spans. For processes that end without Python's own clean-up; others do it automatically."""
    if _last_words is not None:
        _last_words.say()


def traceparent_of(headers: Iterable[tuple[str, bytes | None]]) -> str | None:
    """The context in the headers of a record, None if there is none or tracing is off."""
    if _tracer is None:
        return None
    for name, value in headers:
        if name == TRACEPARENT and value:
            return value.decode("ascii", "replace")
    return None


def derived(root: str) -> str | None:
    """The context of the root span of this name, from the name alone; None while tracing is off."""
    if _tracer is None:
        return None
    from opentelemetry.context import Context

    trace_id, span_id = _derived_ids(root)
    sampled = _sampler.should_sample(Context(), trace_id, root).decision.is_sampled()
    return f"00-{trace_id:032x}-{span_id:016x}-{sampled:02x}"


def continued(headers: Iterable[tuple[str, bytes | None]], task_id: str | None) -> str | None:
    """The context for work on a record: the one in its headers, else the derived context of its task."""
    if _tracer is None:
        return None
    came_with = traceparent_of(headers)
    if _parse(came_with) is not None or task_id is None:
        return came_with
    return derived(task_id)


def span(
    name: str, *, parent: str | None = None, root: str | None = None, producer: bool = False, **attributes: str | int
) -> TraceSpan:
    """Starts a span, a context manager. `root` begins a trace whose ids are derived from this name. Without parent and
    root it begins a trace with random ids. An attribute `task_id` becomes `tentalis.task_id`.
    """
    if _tracer is None:
        return _OFF
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanKind, set_span_in_context

    context = _parse(parent)
    token = _root.set(None if root is None else _derived_ids(root))
    try:
        return TraceSpan(
            _tracer.start_span(
                name,
                context=Context() if context is None else set_span_in_context(NonRecordingSpan(context), Context()),
                kind=SpanKind.PRODUCER if producer else SpanKind.CONSUMER,
                attributes={f"tentalis.{key}": value for key, value in attributes.items()},
            )
        )
    finally:
        _root.reset(token)


def client_span(name: str, attributes: Mapping[str, Any], parent: str | None = None) -> TraceSpan:
    """Starts the span of a call to another service, a context manager. `attributes`: by the names of a convention."""
    if _tracer is None:
        return _OFF
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanKind, set_span_in_context

    context = _parse(parent)
    inside = Context() if context is None else set_span_in_context(NonRecordingSpan(context), Context())
    return TraceSpan(_tracer.start_span(name, context=inside, kind=SpanKind.CLIENT, attributes=attributes))


def _derived_ids(root: str) -> tuple[int, int]:
    digest = hashlib.sha256(f"tentalis/{root}".encode()).digest()
    return int.from_bytes(digest[:16], "big") | 1, int.from_bytes(digest[16:24], "big") | 1


def _ids() -> Any:
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Ids(IdGenerator):
        # Not from `random`: tracing must not advance the generator that training uses.
        def generate_trace_id(self) -> int:
            given = _root.get()
            return given[0] if given else secrets.randbits(128) | 1

        def generate_span_id(self) -> int:
            given = _root.get()
            return given[1] if given else secrets.randbits(64) | 1

    return Ids()


def _format(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _parse(traceparent: str | None) -> Any:
    """The context in a traceparent, None if it is invalid: a foreign header must not stop a record."""
    if traceparent is None:
        return None
    from opentelemetry.trace import SpanContext, TraceFlags

    parts = traceparent.split("-")
    try:
        if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
            return None
        context = SpanContext(int(parts[1], 16), int(parts[2], 16), True, TraceFlags(int(parts[3], 16)))
    except ValueError:
        return None
    return context if context.is_valid else None


def _exporter(service: str, env: Mapping[str, str]) -> Any:
    """The exporter that the variables ask for, None for none. Raises TracingError."""
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if folder := variables.TRACES.read(env):
        from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter

        folder.mkdir(parents=True, exist_ok=True)
        return FileSpanExporter(folder / f"{service}-{os.getpid()}.jsonl")
    endpoint = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    match env.get("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none"):
        case "none":
            return None
        case "console":
            import sys

            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            return ConsoleSpanExporter(out=sys.stderr)
        case "otlp":
            protocol = env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or env.get("OTEL_EXPORTER_OTLP_PROTOCOL")
            return _plugin({None: "otlp_json_http", "http/json": "otlp_json_http"}.get(protocol, f"otlp_{protocol}"))
        case other:
            return _plugin(other)


_PACKAGES = {
    "otlp_http/protobuf": ("otlp_proto_http", "opentelemetry-exporter-otlp-proto-http"),
    "otlp_grpc": ("otlp_proto_grpc", "opentelemetry-exporter-otlp-proto-grpc"),
}


def _plugin(asked: str) -> Any:
    from importlib.metadata import entry_points

    name, package = _PACKAGES.get(asked, (asked, "the package that provides it"))
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        return found.load()()
    raise TracingError(
        f"OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_PROTOCOL asks for {asked.removeprefix('otlp_')!r}, which is not "
        f"installed: install {package}, or use OTLP over HTTP with JSON (OTEL_EXPORTER_OTLP_PROTOCOL=http/json)"
    )
