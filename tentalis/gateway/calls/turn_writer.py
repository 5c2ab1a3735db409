"""Builds the session event of a call and records it, before the client gets the end of the answer."""

import asyncio
import logging
import time
import uuid
from contextlib import suppress

from schemas.records import LogprobsMode, RecordedBy, Sampling, SessionEvent, SessionEventKind, Status
from tentalis.gateway.calls.backend_request import logprobs_mode, sampling_of
from tentalis.gateway.calls.call import RETRY_AFTER_S, GatewayCall
from tentalis.gateway.calls.capture import AnswerCapture
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.gateway.protocols.responses import ResponsesProtocol
from tentalis.gateway.protocols.responses_history import with_call_ids
from tentalis.gateway.recording.recorder import NotRecorded, TurnRecorder
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)


class TurnNotRecorded(APIError):
    """Neither the log nor the disk accepts the turn."""


class TurnWriter:
    """Builds session events from calls and has them recorded."""

    def __init__(self, recorder: TurnRecorder, metrics: GatewayMetrics, gateway_id: str) -> None:
        self._recorder, self._metrics, self._gateway_id = recorder, metrics, gateway_id
        self._pending: set[asyncio.Task[None]] = set()

    async def record(self, call: GatewayCall, capture: AnswerCapture) -> None:
        """Returns once the turn is recorded, or immediately if it must not be recorded. Raises TurnNotRecorded."""
        if not call.recordable:
            self._metrics.recorded("off")
            return
        task = asyncio.create_task(self._recorder.record(self._event(call, capture, Status.OK)))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        try:
            # The turn is complete, so it is recorded even if the client disconnects now.
            await asyncio.shield(task)
        except NotRecorded as error:
            log.error("%s", error)
            raise TurnNotRecorded(
                503, "the turn cannot be recorded now; try again", "server_error", retry_after_s=RETRY_AFTER_S
            ) from error

    async def record_failed(self, call: GatewayCall, capture: AnswerCapture) -> None:
        """Records a failed turn, if the log or the disk accepts it. Returns immediately, but for a turn of an episode:
        its program may end when it hears of the failure, and the worker then reads the log."""
        if not call.recordable:
            return

        async def record() -> None:
            with suppress(NotRecorded):  # counted as lost; the client was not told that the turn is complete
                await self._recorder.record(self._event(call, capture, Status.FAILED))

        task = asyncio.create_task(record())
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        if call.caller.episode is not None:
            await asyncio.shield(task)

    async def record_end(self, session_id: str, user_id: str) -> None:
        """Records the end of a session. `session_id`: the id on the log. Raises NotRecorded."""
        await self._recorder.record(
            SessionEvent(
                session_event_id=str(uuid.uuid4()),
                event_time=now_ms(),
                session_id=session_id,
                kind=SessionEventKind.END,
                user_id=user_id or None,
                done=True,
                gateway_id=self._gateway_id,
            )
        )

    async def wait(self) -> None:
        """Waits for turns that are being recorded."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    def _request(self, call: GatewayCall, capture: AnswerCapture) -> str:
        """The rest of the request. A turn of the responses API keeps the ids of its tool calls, which the items of a
        request that continues it name."""
        kept = isinstance(call.protocol, ResponsesProtocol)
        return with_call_ids(call.request_extras, capture.call_ids) if kept else call.request_extras

    def _event(self, call: GatewayCall, capture: AnswerCapture, status: Status) -> SessionEvent:
        tokens = capture.encoded_tokens() if call.asks_token_ids else None
        prompt, response, logprobs = tokens or (b"", b"", b"")
        reason, mode = call.not_trainable_reason(capture), LogprobsMode.NONE
        if logprobs:
            replica = LogprobsMode.UNKNOWN if call.replica_mode is None else call.replica_mode
            mode = logprobs_mode(call.backend_request.body, replica)
        if status is Status.FAILED:
            reason = "the call failed"
        self._metrics.trainable.labels("no" if reason else "yes").inc()
        return SessionEvent(
            session_event_id=call.event_id,
            event_time=now_ms(),
            session_id=call.session.session_id,
            turn_type=call.session.turn_type,
            worker_id=call.worker_id,
            model=capture.model or call.route.model or "",
            messages=call.messages,
            response=capture.text,
            prompt_token_ids=prompt,
            response_token_ids=response,
            sampler_logprobs=logprobs,
            done=call.session.done,
            decided_by=call.session.decided_by.value,
            user_id=call.user_id or None,
            policy=call.route.policy,
            request=self._request(call, capture),
            tool_calls=capture.tool_calls,
            logprobs_mode=mode,
            sampling=sampling_of(call.backend_request.body) or Sampling(),
            finish_reason=capture.finish_reason,
            status=status,
            not_trainable=reason,
            elapsed_s=time.monotonic() - call.started,
            gateway_id=self._gateway_id,
            recorded_by=RecordedBy.GATEWAY,
        )
