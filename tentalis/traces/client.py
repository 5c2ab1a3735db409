"""Records traces on disk and brings them to a gateway, each once by its id."""

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
from tentalis.traces.sender import Away, Sender, TooLarge
from tentalis.traces.spool import Spool, SpoolError, SpoolFull

log = logging.getLogger(__name__)

SPOOL_BYTES = 64 * 2**20
BATCH, BATCH_BYTES = 100, 4 * 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
REFUSED = "refused.jsonl"
MOST_REFUSED_BYTES = 16 * 2**20
_SESSION = re.compile(r"[!-.0-~]{1,160}")
_POLARITY = {"negative": -1, "none": 0, "neutral": 0, "positive": 1}


@dataclass(frozen=True, slots=True)
class Stats:
    """Since this client was made: `recorded` and `feedback` that are safe on disk, `sent` of them and of earlier ones
    that the gateway has acknowledged, `refused` that it will never take (they lie in refused.jsonl). Now: `waiting` on
    disk, its `spool_bytes`, `damaged` lines. `mean_composite`: of the judged (0..100), None of none. `last_error`: of
    the last try to send, "" if it went well."""

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
    """Where a program records its calls.

    Args:
        base_url: of a gateway.
        api_key: with the scope `traces`; None where the gateway asks nobody for one.
        spool_dir: a folder of this program alone.
        spool_bytes: the most that may wait there.
        timeout_s: of one request.
        judged: whether each trace carries the judgement of `tentalis.traces.judge`.
    Raises:
        SpoolBusy, SpoolDamaged, OSError; ValueError for a URL that is none.
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
        self._sender = Sender(base_url, api_key, timeout_s)
        self._spool = Spool(Path(spool_dir), spool_bytes)
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
        """Returns the trace's id when the trace is safe on disk.

        Args:
            task: what kind of call it was.
            model: what answered; a version of a policy, `policy@vN`, can be trained on.
            prompt: a text, or chat messages (role, content).
            session_id: of the conversation that it is a turn of, visible ASCII without a slash; by default it is one of
                its own, which is over with it.
            done: whether the session is over; by default only where no session is named.
            prompt_token_ids, response_token_ids, logprobs, sampling: all of them, or it cannot be trained on either.
        Raises:
            SpoolFull, SpoolError, ValueError (a session id that is none), TypeError (what is no JSON).
        """
        if session_id is not None and not _SESSION.fullmatch(session_id):
            raise ValueError("a session id has 1 to 160 visible ASCII characters, without blanks and slashes")
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
            found = judge(_asked(prompt), response, tool_errors=tool_errors)
            item["judgement"] = asdict(found)
        self._put(item, "recorded")
        if self._judged:
            with self._changed:
                self._counts["judged"] += 1
                self._composites += found.composite
        return trace_id

    def submit_language_feedback(self, trace_id: str, text: str, polarity: int | str = 0) -> str:
        """What somebody says of a trace: `polarity` -1, 0 or 1 (or negative, none, positive). Returns the feedback's id
        when it is safe on disk.

        Raises SpoolFull, SpoolError, ValueError.
        """
        sign = _POLARITY.get(polarity.lower()) if isinstance(polarity, str) else polarity
        if sign not in (-1, 0, 1):
            raise ValueError(f"a polarity is -1, 0 or 1, or negative, none or positive, not {polarity!r}")
        feedback_id = uuid.uuid4().hex
        item = {
            "kind": "feedback",
            "feedback_id": feedback_id,
            "trace_id": trace_id,
            "recorded_at": time.time_ns() // 1_000_000,
            "text": text,
            "polarity": sign,
        }
        self._put(item, "feedback")
        return feedback_id

    def flush(self, timeout: float = 30.0) -> bool:
        """Waits until nothing is left on disk; False if that took longer than `timeout` seconds: `stats().last_error`
        says why."""
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not len(self._spool), timeout)

    def stats(self) -> Stats:
        """What became of the traces."""
        with self._changed:
            judged = self._counts["judged"]
            return Stats(
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

    def _put(self, item: Mapping[str, Any], counted: str) -> None:
        # What is no JSON would be refused later, when nobody can do anything about it; lone surrogates are no text.
        try:
            text = json.dumps(item, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except RecursionError as error:
            raise ValueError("a trace cannot be nested so deep") from error
        text.encode()
        self._spool.append(text)
        with self._changed:
            self._counts[counted] += 1
            self._changed.notify_all()

    def _drain(self) -> None:
        pause = FIRST_PAUSE_S
        most = BATCH
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or len(self._spool))
                if self._stop:
                    return
            try:
                most = self._send(most)
                pause, error = FIRST_PAUSE_S, ""
            except (Away, OSError, SpoolError) as why:
                error = str(why)
                log.warning("%d traces wait on disk: %s; again in %.2g s", len(self._spool), error, pause)
            with self._changed:
                self._last_error = error
                self._changed.notify_all()
                if error:
                    self._changed.wait_for(lambda: self._stop, pause)
                    pause = min(2 * pause, LONGEST_PAUSE_S)

    def _send(self, most: int) -> int:
        """Sends the first of what waits; how many to send next time. Raises Away, OSError: they come again."""
        texts, behind = self._spool.peek(most, BATCH_BYTES)
        if not texts:
            return most
        try:
            refused = self._sender.send(texts)
        except TooLarge as error:
            if len(texts) > 1:
                return len(texts) // 2
            refused = {0: str(error)}
        for at, why in refused.items():
            self._set_aside(texts[at], why)
        self._spool.release(behind, len(texts))
        with self._changed:
            self._counts["sent"] += len(texts) - len(refused)
            self._counts["refused"] += len(refused)
        return min(BATCH, 2 * most)

    def _set_aside(self, text: str, why: str) -> None:
        log.error("the gateway refuses a trace for good (it is kept in %s): %s", REFUSED, why)
        path = self._spool.folder / REFUSED
        with path.open("ab") as file:
            if file.tell() > MOST_REFUSED_BYTES:
                raise SpoolFull(f"{path} is full of refused traces: look at them, and remove it")
            # The item as it lies in the spool, byte for byte: it may be what nobody can parse.
            file.write(b'{"error": ' + json.dumps(why).encode() + b', "item": ' + text.encode() + b"}\n")
            file.flush()

            os.fsync(file.fileno())


def _asked(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The last user message's text, or the prompt itself."""
    if isinstance(prompt, str):
        return prompt
    said = [message.get("content") for message in prompt if message.get("role") == "user"]
    return said[-1] if said and isinstance(said[-1], str) else ""
