"""The OpenTelemetry span of a model call, with the attributes of the conventions for generative AI.

It continues the trace of the client's `traceparent` and links to the trace of the task that the turn becomes. It holds
nothing that was said.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tentalis.gateway.calls.call import GatewayCall
from tentalis.gateway.calls.capture import AnswerCapture
from tentalis.service import tracing
from tentalis.service.tracing import TraceSpan

Attributes = dict[str, str | int | float | bool | Sequence[str]]

_NUMBERS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def call_span(call: GatewayCall) -> TraceSpan:
    """Starts the span of a call, a context manager; without effect while tracing is off."""
    if not tracing.enabled():
        return tracing.client_span("", {})
    name = f"{_operation(call)} {call.route.model or ''}".rstrip()
    span = tracing.client_span(name, request_attributes(call), parent=call.traceparent)
    span.link([tracing.derived(call.task_id)])
    return span


def note_answer(span: TraceSpan, call: GatewayCall, capture: AnswerCapture) -> None:
    """Adds the answer's attributes to the span of a call."""
    if tracing.enabled():
        span.describe(answer_attributes(call, capture))


def request_attributes(call: GatewayCall) -> Attributes:
    """The attributes of a request, as its client sent it."""
    made: Attributes = {
        "gen_ai.operation.name": _operation(call),
        "gen_ai.provider.name": call.route.backend.name,
        "gen_ai.request.stream": call.backend_request.stream,
        "gen_ai.conversation.id": call.session.session_id,
        "gen_ai.response.id": call.event_id,
        "tentalis.turn_type": call.session.turn_type,
    }
    if call.route.model:
        made["gen_ai.request.model"] = call.route.model
    if call.route.policy:
        made["tentalis.policy"] = call.route.policy
    for name in _NUMBERS:
        value = call.body.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            made[f"gen_ai.request.{name}"] = value
    stop = call.body.get("stop")
    if isinstance(stop, list) and all(isinstance(each, str) for each in stop):
        made["gen_ai.request.stop_sequences"] = stop
    return made


def answer_attributes(call: GatewayCall, capture: AnswerCapture) -> Attributes:
    """The attributes of an answer."""
    made: Attributes = {}
    if capture.model:
        made["gen_ai.response.model"] = capture.model
    if capture.finish_reason:
        made["gen_ai.response.finish_reasons"] = [capture.finish_reason]
    usage: Mapping[str, Any] = capture.usage or {}
    for field, attribute in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")):
        count = usage.get(field)
        if isinstance(count, int) and not isinstance(count, bool):
            made[f"gen_ai.usage.{attribute}"] = count
    return made


def _operation(call: GatewayCall) -> str:
    return "chat" if call.protocol.chat else "text_completion"
