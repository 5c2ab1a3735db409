"""Records traces on disk and sends them to a gateway; a trace's id makes repeated sending idempotent."""

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tentalis.traces.judge import judge
from tentalis.traces.sender import GatewayUnavailable, TraceBatchTooLarge, TraceSender
from tentalis.traces.spool import SpoolError, TraceSpool, TraceSpoolFull

log = logging.getLogger(__name__)

SPOOL_BYTES = 64 * 2**20
BATCH_ITEMS, BATCH_BYTES = 100, 4 * 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
REFUSED = "refused.jsonl"
MOST_REFUSED_BYTES = 16 * 2**20
_SESSION = re.compile(r"[!-.0-~]{1,160}")
_POLARITY = {"negative": -1, "none": 0, "neutral": 0, "positive": 1}


@dataclass(frozen=True, slots=True)
class TraceClientStats:
    """Since this client was made: `recorded` traces and `feedback` that are safe on disk; items, earlier ones included,
    that the gateway has acknowledged (`sent`) or refused permanently (`refused`, kept in refused.jsonl). Now: items
    `waiting` on disk, their `spool_bytes`, `damaged` lines. `mean_composite`: of the judged traces (0..100), None if
    there are none. `last_error`: of the last attempt to send, "" if it succeeded."""

    recorded: int = 0
    feedback: int = 0
    sent: int = 0
    refused: int = 0
    waiting: int = 0
    spool_bytes: int = 0
    damaged: int = 0
    judged: int = 0
    mean_composite: float | None = None
    last_error: str = ""


class TraceClient:
    """Records a program's calls on disk, and sends them to a gateway from a thread.

    Args:
        base_url: the gateway's URL.
        api_key: a key with the scope `traces`; None if the gateway requires no key.
        spool_dir: a folder that only this program uses.
        spool_bytes: the most bytes that may wait there.
        timeout_s: timeout of one request, in seconds.
        judged: add the judgement of `tentalis.traces.judge` to each trace.
    Raises:
        SpoolBusy, SpoolDamaged, OSError; ValueError for an invalid URL.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        spool_dir: str | Path,
        *,
        spool_bytes: int = SPOOL_BYTES,
        timeout_s: float = 30.0,
        judged: bool = True,
    ) -> None:
        self._sender = TraceSender(base_url, api_key, timeout_s)
        self._spool = TraceSpool(Path(spool_dir), spool_bytes)
        self._judged = judged
        self._counts: dict[str, int] = dict.fromkeys(("recorded", "feedback", "sent", "refused", "judged"), 0)
        self._composites = 0
        self._last_error = ""
        self._changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._drain, name="traces", daemon=True)
        self._thread.start()

    def record(
        self,
        task: str,
        model: str,
        prompt: str | Sequence[Mapping[str, Any]],
        response: str,
        *,
        session_id: str | None = None,
        done: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        tool_errors: int = 0,
        elapsed_s: float = 0.0,
        worker_id: str = "",
        prompt_token_ids: Sequence[int] = (),
        response_token_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> str:
        """Records a trace. Returns its id once the trace is safe on disk.

        Args:
            task: the kind of call.
            model: the model that answered; only a version of a policy, `policy@vN`, can be trained on.
            prompt: a text, or chat messages (role, content).
            session_id: the conversation that the trace is a turn of, visible ASCII without a slash; by default the
                trace is a complete session by itself.
            done: True if the session is over; the default is True only without a `session_id`.
            prompt_token_ids, response_token_ids, logprobs, sampling: training on the trace needs all of them.
        Raises:
            TraceSpoolFull, SpoolError, ValueError (invalid session id), TypeError (not serialisable as JSON).
        """
        if session_id is not None and not _SESSION.fullmatch(session_id):
            raise ValueError("a session id must have 1 to 160 visible ASCII characters, without blanks and slashes")
        name = uuid.uuid4().hex
        trace_id = name if session_id is None else f"{session_id}.{name}"
        item: dict[str, Any] = {
            "kind": "trace",
            "trace_id": trace_id,
            "recorded_at": time.time_ns() // 1_000_000,
            "task": task,
            "model": model,
            "prompt": prompt if isinstance(prompt, str) else [dict(message) for message in prompt],
            "response": response,
            "worker_id": worker_id,
            "metadata": dict(metadata or {}),
            "done": session_id is None if done is None else done,
            "prompt_token_ids": list(prompt_token_ids),
            "response_token_ids": list(response_token_ids),
            "sampler_logprobs": list(logprobs),
            "sampling": None if sampling is None else dict(sampling),
            "elapsed_seconds": elapsed_s,
        }
        if self._judged:
            judgement = judge(_question(prompt), response, tool_errors=tool_errors)
            item["judgement"] = asdict(judgement)
        self._append(item, "recorded")
        if self._judged:
            with self._changed:
                self._counts["judged"] += 1
                self._composites += judgement.composite
        return trace_id

    def submit_language_feedback(self, trace_id: str, text: str, polarity: int | str = 0) -> str:
        """Records feedback on a trace: `polarity` -1, 0 or 1 (or negative, none, positive). Returns the feedback's id
        once it is safe on disk.

        Raises TraceSpoolFull, SpoolError, ValueError.
        """
        sign = _POLARITY.get(polarity.lower()) if isinstance(polarity, str) else polarity
        if sign not in (-1, 0, 1):
            raise ValueError(f"polarity must be -1, 0 or 1, or negative, none or positive, not {polarity!r}")
        feedback_id = uuid.uuid4().hex
        item = {
            "kind": "feedback",
            "feedback_id": feedback_id,
            "trace_id": trace_id,
            "recorded_at": time.time_ns() // 1_000_000,
            "text": text,
            "polarity": sign,
        }
        self._append(item, "feedback")
        return feedback_id

    def flush(self, timeout: float = 30.0) -> bool:
        """Waits until nothing is left on disk. Returns False after `timeout` seconds; `stats().last_error` then says
        why."""
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not len(self._spool), timeout)

    def stats(self) -> TraceClientStats:
        """Counts of the traces, and the state of the spool."""
        with self._changed:
            judged = self._counts["judged"]
            return TraceClientStats(
                **self._counts,
                waiting=len(self._spool),
                spool_bytes=self._spool.size,
                damaged=self._spool.damaged,
                mean_composite=self._composites / judged if judged else None,
                last_error=self._last_error,
            )

    def close(self, timeout: float = 5.0) -> None:
        """Sends what can be sent within `timeout` seconds; the rest waits on disk for the next client."""
        self.flush(timeout)
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self._thread.join(self._sender.timeout_s + 1.0)
        self._spool.close()

    def __enter__(self) -> "TraceClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, item: Mapping[str, Any], counter: str) -> None:
        # Invalid JSON and lone surrogates fail here: the gateway would refuse them, too late for the caller to react.
        try:
            text = json.dumps(item, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except RecursionError as error:
            raise ValueError("the trace is nested too deeply") from error
        text.encode()
        self._spool.append(text)
        with self._changed:
            self._counts[counter] += 1
            self._changed.notify_all()

    def _drain(self) -> None:
        pause = FIRST_PAUSE_S
        max_items = BATCH_ITEMS
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or len(self._spool))
                if self._stop:
                    return
            try:
                max_items = self._send(max_items)
                pause, error = FIRST_PAUSE_S, ""
            except (GatewayUnavailable, OSError, SpoolError) as failure:
                error = str(failure)
                log.warning("%d traces wait on disk: %s; retrying in %.2g s", len(self._spool), error, pause)
            with self._changed:
                self._last_error = error
                self._changed.notify_all()
                if error:
                    self._changed.wait_for(lambda: self._stop, pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)

    def _send(self, max_items: int) -> int:
        """Sends the first waiting items. Returns how many to send next time. Raises GatewayUnavailable, OSError: retry
        later."""
        texts, end = self._spool.peek(max_items, BATCH_BYTES)
        if not texts:
            return max_items
        try:
            refused = self._sender.send(texts)
        except TraceBatchTooLarge as error:
            if len(texts) > 1:
                return len(texts) // 2
            refused = {0: str(error)}
        for index, reason in refused.items():
            self._set_aside(texts[index], reason)
        self._spool.release(end, len(texts))
        with self._changed:
            self._counts["sent"] += len(texts) - len(refused)
            self._counts["refused"] += len(refused)
        return min(BATCH_ITEMS, 2 * max_items)

    def _set_aside(self, text: str, reason: str) -> None:
        log.error("the gateway refused a trace permanently (it is kept in %s): %s", REFUSED, reason)
        path = self._spool.folder / REFUSED
        with path.open("ab") as file:
            if file.tell() > MOST_REFUSED_BYTES:
                raise TraceSpoolFull(f"{path} is full of refused traces: inspect it, then remove it")
            # The item is copied from the spool byte for byte, because it may be impossible to parse.
            file.write(b'{"error": ' + json.dumps(reason).encode() + b', "item": ' + text.encode() + b"}\n")
            file.flush()

            os.fsync(file.fileno())


def _question(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The last user message's text, or the prompt itself."""
    if isinstance(prompt, str):
        return prompt
    user_messages = [message.get("content") for message in prompt if message.get("role") == "user"]
    return user_messages[-1] if user_messages and isinstance(user_messages[-1], str) else ""
