"""Traces: a spool that no kill, no full disk and no duplicate harms, and a judge of rules."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.gateway.http.bodies import parse_object
from tentalis.gateway.http.errors import APIError
from tentalis.traces import SpoolBusy, SpoolDamaged, TraceClient, TraceSpoolFull, judge
from tentalis.traces.spool import SpoolPosition, TraceSpool, line_of

TEXTS = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20), max_size=8)
NOWHERE = "http://127.0.0.1:1"


def waiting(folder: Path) -> list[str]:
    spool = TraceSpool(folder, 2**20)
    try:
        return spool.peek(1000, 2**20)[0]
    finally:
        spool.close()


# --- the spool --------------------------------------------------------------------------------------------------------


@given(texts=TEXTS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_cut_at_any_byte_the_whole_lines_are_there_and_the_next_follow(texts: list[str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spool = TraceSpool(folder, 2**20)
        for text in texts:
            spool.append(text)
        spool.close()
        path = folder / "0000000000.lines"
        whole = path.read_bytes()
        cut = data.draw(st.integers(0, len(whole)))
        path.write_bytes(whole[:cut])
        ends = [sum(len(line_of(text)) for text in texts[:n]) for n in range(len(texts) + 1)]
        kept = texts[: max(n for n, end in enumerate(ends) if end <= cut)]
        spool = TraceSpool(folder, 2**20)
        assert spool.peek(1000, 2**20)[0] == kept and len(spool) == len(kept) and spool.damaged == 0
        spool.append("next")
        spool.close()
        assert waiting(folder) == [*kept, "next"]


@given(
    steps=st.lists(
        st.one_of(st.just("append"), st.integers(1, 4), st.just("reopen"), st.just("lost front")), max_size=30
    )
)
@settings(max_examples=60, deadline=None)
def test_a_queue_through_any_appends_releases_and_restarts(steps: list[str | int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spool, model, made = TraceSpool(folder, 10_000, segment_bytes=50), [], 0
        for step in steps:
            if step == "append":
                made += 1
                spool.append(f"line {made}")
                model.append(f"line {made}")
            elif step == "reopen":
                spool.close()
                spool = TraceSpool(folder, 10_000, segment_bytes=50)
            elif step == "lost front":  # killed between the new front and its name
                (folder / "front.new").write_bytes(b"0000")
            else:
                texts, behind = spool.peek(int(step), 10_000)
                assert texts == model[: int(step)]
                if texts:
                    spool.release(behind, len(texts))
                    del model[: len(texts)]
            assert spool.peek(1000, 10_000)[0] == model and len(spool) == len(model)
        spool.close()


@given(bad=st.integers(0, 60), flip=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_damaged_line_is_told_and_passed_over_alone(bad: int, flip: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spool = TraceSpool(folder, 2**20)
        texts = ["the first", "the second", "the third"]
        for text in texts:
            spool.append(text)
        spool.close()
        path = folder / "0000000000.lines"
        data = bytearray(path.read_bytes())
        at = bad % (len(data) - 1)  # not the last line end: that would be a line that was never finished
        data[at] ^= flip
        path.write_bytes(bytes(data))
        spool = TraceSpool(folder, 2**20)
        left = spool.peek(1000, 2**20)[0]
        assert spool.damaged >= 1 and len(left) in (1, 2) and set(left) < set(texts)
        spool.append("the fourth")
        assert spool.peek(1000, 2**20)[0] == [*left, "the fourth"]
        spool.close()


def test_its_size_is_bounded_and_comes_back(tmp_path: Path) -> None:
    spool = TraceSpool(tmp_path, 2000)
    written = 0
    with pytest.raises(TraceSpoolFull, match="spool_bytes"):
        while True:
            spool.append("x" * 50)
            written += 1
    assert 20 < written < 40 and spool.size <= 2000
    texts, behind = spool.peek(written, 10_000)
    spool.release(behind, len(texts))
    spool.append("y")
    assert spool.size < 700
    spool.close()
    assert waiting(tmp_path) == ["y"]


def test_a_full_disk_is_said_and_nothing_of_the_line_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = TraceSpool(tmp_path, 2**20)
    spool.append("before")
    write, cut = os.write, os.ftruncate

    def half(handle: int, data: Any) -> int:
        write(handle, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    def cannot(handle: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for breaks in (cut, cannot):
        monkeypatch.setattr(os, "write", half)
        monkeypatch.setattr(os, "ftruncate", breaks)
        with pytest.raises(TraceSpoolFull, match="No space left on device"):
            spool.append("lost")
        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "ftruncate", cut)
        spool.append("after")
    spool.close()
    assert waiting(tmp_path) == ["before", "after", "after"]


def test_its_folder_is_its_owners_alone(tmp_path: Path) -> None:
    TraceSpool(tmp_path / "traces", 2**20).close()
    assert (tmp_path / "traces").stat().st_mode & 0o077 == 0, "what people said lies there"


def test_a_folder_belongs_to_one_process_and_a_wrong_front_is_named(tmp_path: Path) -> None:
    spool = TraceSpool(tmp_path, 2**20)
    with pytest.raises(SpoolBusy, match="another process"):
        TraceSpool(tmp_path, 2**20)
    spool.append("a")
    spool.close()
    (tmp_path / "front").write_bytes(line_of("0 999"))
    with pytest.raises(SpoolDamaged, match="past the end"):
        TraceSpool(tmp_path, 2**20)
    (tmp_path / "front").write_bytes(b"nonsense")
    with pytest.raises(SpoolDamaged, match="remove it"):
        TraceSpool(tmp_path, 2**20)
    assert SpoolPosition(0, 5) < SpoolPosition(1, 0)


# --- the client -------------------------------------------------------------------------------------------------------


class Gateway(ThreadingHTTPServer):
    """`items`: the requests that it got; `plan`: how it answers the next requests: a status, "hang up" after it has
    taken everything, or "proxy" for a refusal of something before it. `choke`: it takes bodies as the real one does."""

    daemon_threads = True

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.plan: list[int | str] = []
        self.refuse: set[str] = set()
        self.choke = False
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def ids(self) -> Counter[str]:
        return Counter(item.get("feedback_id") or item["trace_id"] for item in self.items)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        step = self.server.plan.pop(0) if self.server.plan else 201
        try:
            body = parse_object(data) if self.server.choke else json.loads(data)
        except APIError as error:
            self._answer(error.status, json.dumps({"error": str(error)}).encode())
            return
        if step == "proxy":
            self._answer(400, b"<html>Bad Request</html>")
            return
        if step in (201, "hang up"):
            known = set(self.server.ids)
            new = [item for item in body["items"] if (item.get("feedback_id") or item["trace_id"]) not in known]
            self.server.items += new
        if step == "hang up":
            self.close_connection = True
            return
        answer: dict[str, Any] = {"error": "as planned"}
        if step == 201:
            refused = self.server.refuse
            answer = {
                "items": [
                    {"id": "", "status": "refused", "error": "why"}
                    if item.get("task") in refused
                    else {"id": "", "status": "published"}
                    for item in body["items"]
                ]
            }
        self._answer(int(step), json.dumps(answer).encode())

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def gateway() -> Iterator[Gateway]:
    server = Gateway()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@given(plan=st.lists(st.sampled_from([201, 503, 500, 429, "hang up"]), max_size=4), count=st.integers(1, 5))
@settings(max_examples=10, deadline=None)
def test_whatever_the_gateway_answers_everything_arrives_once(plan: list[int | str], count: int) -> None:
    with tempfile.TemporaryDirectory() as name, gateway() as server:
        server.plan = plan
        with TraceClient(server.url, "tk-1", name) as client:
            ids = [client.record("t", "m", "Why?", f"Because {n}.") for n in range(count)]
            ids.append(client.submit_language_feedback(ids[0], "Good.", "positive"))
            assert client.flush(30), client.stats()
            stats = client.stats()
        assert (stats.recorded, stats.feedback, stats.sent, stats.waiting) == (count, 1, count + 1, 0)
        assert server.ids == Counter(ids)


def test_while_the_gateway_is_away_traces_wait_and_the_next_client_sends_them(tmp_path: Path) -> None:
    with TraceClient(NOWHERE, None, tmp_path) as client:
        first = client.record("t", "m", [{"role": "user", "content": "Why?"}], "Because.", session_id="s")
        assert not client.flush(0.5) and "does not answer" in client.stats().last_error
        assert first.startswith("s.") and client.stats().waiting == 1
        client.close(0.0)
    with gateway() as server, TraceClient(server.url + "/v1", "tk-1", tmp_path) as client:
        assert client.flush(30)
        (item,) = server.items
        assert item["trace_id"] == first and item["judgement"]["composite"] > 0 and item["done"] is False


def test_what_is_refused_for_good_is_kept_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    with gateway() as server, TraceClient(server.url, None, tmp_path) as client:
        server.refuse, server.plan = {"bad"}, [413, 413]
        client.record("good", "m", "p", "r")
        client.record("bad", "m", "p", "r")
        client.record("good", "m", "p", "r")
        assert client.flush(30)
        assert client.stats().refused + client.stats().sent == 3
        kept = [json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines()]
        assert "bad" in {each["item"]["task"] for each in kept} and all(each["error"] for each in kept)


def test_what_a_gateway_can_never_take_is_set_aside_and_what_is_behind_it_comes_through(tmp_path: Path) -> None:
    nested: Any = "x"
    for _ in range(300):
        nested = {"a": nested}
    with gateway() as server, TraceClient(server.url, None, tmp_path) as client:
        server.choke = True
        ids = [client.record("good", "m", "p", "r")]
        bad = client.record("bad", "m", "p", "r", metadata={"deep": nested})
        ids += [client.record("good", "m", "p", "r") for _ in range(3)]
        assert client.flush(60), client.stats()
        stats = client.stats()
        assert (stats.sent, stats.refused, stats.waiting) == (4, 1, 0)
        assert server.ids == Counter(ids)
    (kept,) = (json.loads(line) for line in (tmp_path / "refused.jsonl").read_text().splitlines())
    assert kept["item"]["trace_id"] == bad and kept["item"]["metadata"] == {"deep": nested}
    assert "nested deeper" in kept["error"]


def test_a_400_of_something_before_the_gateway_is_no_word_on_a_trace(tmp_path: Path) -> None:
    with gateway() as server, TraceClient(server.url, None, tmp_path) as client:
        server.plan = ["proxy"]
        trace_id = client.record("t", "m", "p", "r")
        assert client.flush(60), client.stats()
        assert client.stats().refused == 0 and server.ids == Counter([trace_id])


def test_what_cannot_be_a_trace_is_refused_where_it_is_made(tmp_path: Path) -> None:
    with TraceClient(NOWHERE, None, tmp_path) as client:
        with pytest.raises(ValueError, match="session id"):
            client.record("t", "m", "p", "r", session_id="a/b")
        with pytest.raises(ValueError, match="polarity"):
            client.submit_language_feedback("t", "x", 2)
        with pytest.raises(ValueError):
            client.record("t", "m", "p", "\ud800")
        with pytest.raises(ValueError):
            client.record("t", "m", "p", "r", elapsed_s=float("nan"))
        with pytest.raises(TypeError):
            client.record("t", "m", "p", "r", metadata={"a": object()})
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        with pytest.raises(ValueError, match="nested"):
            client.record("t", "m", "p", "r", metadata={"a": nested})
        assert client.stats().waiting == 0
        client.close(0.0)
    with pytest.raises(ValueError, match="http"):
        TraceClient("localhost:8200", None, tmp_path)


RECORDER = """
import sys
from tentalis.traces import TraceClient
client = TraceClient(sys.argv[1], None, sys.argv[2])
while True:
    print(client.record("t", "m", "Why do cats purr?", "Because. " * 50), flush=True)
"""


def test_a_program_that_is_killed_while_it_records_loses_nothing_that_it_was_told_is_safe(tmp_path: Path) -> None:
    told: list[str] = []
    with gateway() as server:
        for url in (NOWHERE, server.url, server.url):
            child = subprocess.Popen(
                [sys.executable, "-c", RECORDER, url, str(tmp_path)], stdout=subprocess.PIPE, text=True
            )
            assert child.stdout is not None
            for _ in range(20):
                told.append(child.stdout.readline().strip())
            child.send_signal(signal.SIGKILL)
            told += child.stdout.read().split()
            child.wait()
        with TraceClient(server.url, None, tmp_path) as client:
            assert client.flush(60), client.stats()
        sent = server.ids
    told = [name for name in told if len(name) == 32]
    assert len(told) >= 60 and set(told) <= set(sent) and set(sent.values()) == {1}


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, tentalis.traces; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"pydantic", "httpx", "confluent_kafka", "numpy", "schemas", "fastapi", "asyncio", "torch"}
    assert not heavy & {name.partition(".")[0] for name in loaded}


# --- the judge --------------------------------------------------------------------------------------------------------

GOOD = "Cats purr to calm themselves, and to tell others that they feel safe."


@pytest.mark.parametrize(
    ("response", "more", "label", "composite"),
    [
        (GOOD, {}, 1, 100),
        ("", {}, -1, 0),
        ("...", {}, -1, 0),
        ("Traceback (most recent call last):\n  File x", {}, -1, 55),
        ("ValueError: cats purr", {}, -1, 80),
        ("Sorry, I can't help with that.", {}, 0, 60),
        ("Bananas are yellow fruit.", {}, 0, 75),
        ("no no no no no no no no no no no no", {}, 0, 65),
        ("Sorry, I cannot cannot cannot cannot cannot cannot cannot cannot", {}, 0, None),
        (GOOD, {"tool_errors": 1}, 1, 95),
        (GOOD, {"tool_errors": 2}, 1, 90),
    ],
)
def test_the_judge_by_its_rules(response: str, more: dict[str, Any], label: int, composite: int | None) -> None:
    found = judge("Why do cats purr?", response, **more)
    assert found.label == label and composite in (None, found.composite), found
    assert found.composite == sum(found.parts.values()) and 0 <= found.composite <= 100


@given(prompt=st.text(max_size=200), response=st.text(max_size=400), tools=st.integers(-1, 5))
def test_the_judge_is_pure_and_within_its_bounds(prompt: str, response: str, tools: int) -> None:
    found = judge(prompt, response, tool_errors=tools)
    assert found == judge(prompt, response, tool_errors=tools)
    assert 0 <= found.composite <= 100 and found.label in (-1, 0, 1)
