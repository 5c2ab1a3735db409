"""What is written down of a call, and when its client may hear the end."""

import asyncio
import logging
import time
import uuid
from contextlib import suppress

from schemas.records import LogprobsMode, Sampling, SessionEvent, SessionEventKind, Status
from tentalis.gateway.asking import logprobs_mode, not_trainable, sampling_of
from tentalis.gateway.calls import RETRY_AFTER_S, Call
from tentalis.gateway.capture import Capture
from tentalis.gateway.failure import Refused
from tentalis.gateway.measures import Measures
from tentalis.gateway.recorder import NotRecorded, Recorder
from tentalis.kafka import now_ms

log = logging.getLogger(__name__)


class Unwritten(Refused):
    """Neither the log nor the disk takes the turn."""


class Writing:
    """Makes session events of calls and has them recorded."""

    def __init__(self, recorder: Recorder, measures: Measures, gateway_id: str) -> None:
        self._recorder, self._measures, self._gateway_id = recorder, measures, gateway_id
        self._under_way: set[asyncio.Task[None]] = set()

    async def keep(self, call: Call, capture: Capture) -> None:
        """Returns when the turn is written down, or is not to be. Raises Unwritten."""
        if not call.keep:
            self._measures.recorded("off")
            return
        writing = asyncio.create_task(self._recorder.record(self._event(call, capture, Status.OK)))
        self._under_way.add(writing)
        writing.add_done_callback(self._under_way.discard)
        try:
            # Whoever hangs up now may have the turn written down all the same: it is complete.
            await asyncio.shield(writing)
        except NotRecorded as error:
            log.error("%s", error)
            raise Unwritten(
                503, "the turn cannot be written down now; try again", "server_error", retry_after_s=RETRY_AFTER_S
            ) from error

    def keep_failed(self, call: Call, capture: Capture) -> None:
        """Writes down, if it can, that a turn came to nothing."""
        if not call.keep:
            return

        async def write() -> None:
            with suppress(NotRecorded):  # it is counted, and nobody was told that the turn is complete
                await self._recorder.record(self._event(call, capture, Status.FAILED))

        writing = asyncio.create_task(write())
        self._under_way.add(writing)
        writing.add_done_callback(self._under_way.discard)

    async def end(self, session_id: str, user_id: str) -> None:
        """Writes down that a session is over; its id as the log has it. Raises NotRecorded."""
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

    async def finish(self) -> None:
        """Waits until what is being written down is."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _event(self, call: Call, capture: Capture, status: Status) -> SessionEvent:
        tokens = capture.tokens() if call.tokens else None
        prompt, response, logprobs = tokens or (b"", b"", b"")
        reason = not_trainable(call.ask.body, call.route, capture, tokens=call.tokens, n=call.ask.n)
        if status is Status.FAILED:
            reason = "the call failed"
        self._measures.trainable.labels("no" if reason else "yes").inc()
        return SessionEvent(
            session_event_id=call.event_id,
            event_time=now_ms(),
            session_id=call.turn.session_id,
            turn_type=call.turn.turn_type,
            worker_id=call.worker_id,
            model=capture.model or call.route.model or "",
            messages=call.messages,
            response=capture.text,
            prompt_token_ids=prompt,
            response_token_ids=response,
            sampler_logprobs=logprobs,
            done=call.turn.done,
            decided_by=call.turn.decided_by.value,
            user_id=call.user_id or None,
            policy=call.route.policy,
            request=call.unspoken,
            tool_calls=capture.tool_calls,
            logprobs_mode=logprobs_mode(call.ask.body, call.route) if logprobs else LogprobsMode.NONE,
            sampling=sampling_of(call.ask.body) or Sampling(),
            finish_reason=capture.finish_reason,
            status=status,
            not_trainable=reason,
            elapsed_s=time.monotonic() - call.began,
            gateway_id=self._gateway_id,
        )
