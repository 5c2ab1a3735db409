"""Hostile requests are refused with a reason, or carried without harm."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tentalis.gateway.http.keys import Scope, create
from tests.support.gateway_lab import Lab, lab


def _body(*texts: str) -> dict[str, Any]:
    return {"model": "assistant", "messages": [{"role": "user", "content": text} for text in texts]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"messages": []}',
        b'{"messages": [1]}',
        b'{"messages": [{"role": "user", "content": 3}]}',
        b'{"messages": [{"content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
        b'{"messages": [{"role": "user", "content": "x"}], "n": 0}',
        b'{"messages": [{"role": "user", "content": "x"}], "model": 7}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b'{"a":' * 950 + b"1" + b"}" * 950 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}]}'.decode().encode("utf-16"),
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_an_invalid_call_is_refused_and_reaches_no_backend(gateway: Lab, content: bytes) -> None:
    seen = len(gateway.script.bodies)
    refused = gateway.http.post("/v1/chat/completions", content=content)
    assert refused.status_code == 400 and refused.json()["error"]["message"]
    assert len(gateway.script.bodies) == seen


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("gateway"), body_bytes=100_000, header_s=0.5, body_s=0.7) as made:
        yield made


def test_oversize_bodies_are_refused(gateway: Lab) -> None:
    assert gateway.chat("x" * 200_000).status_code == 413
    assert gateway.chat("x" * 50_000).status_code == 200


def test_control_bytes_are_carried_unharmed(gateway: Lab) -> None:
    text = "".join(map(chr, range(32))) + "\x7f\u2028 \U0001f600"
    gateway.chat(text)
    assert gateway.script.bodies[-1]["messages"][0]["content"] == text
    assert gateway.log.events[-1].messages[0].content == text


def _raw(gateway: Lab, *pieces: bytes) -> bytes:
    """Sends raw bytes and returns the answer, until the gateway closes the connection."""
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        for piece in pieces:
            connection.sendall(piece)
        heard = b""
        # A gateway that answers before it has read everything may reset the connection after its answer.
        with suppress(ConnectionResetError):
            while more := connection.recv(65536):
                heard += more
        return heard


def test_slow_heads_and_bodies_are_cut_off(gateway: Lab) -> None:
    assert _raw(gateway, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ") == b""
    assert _raw(gateway) == b""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n"
    assert b" 408 " in _raw(gateway, head, b"{").split(b"\r\n")[0]
    assert gateway.chat("x").status_code == 200


def test_headers_cannot_be_injected_and_paths_cannot_be_tricked(gateway: Lab) -> None:
    body = json.dumps(_body("x")).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n" % len(body)
    answer = _raw(gateway, head, b"X-Session-Id: a\r\n b\r\nX-Evil: 1\r\n\r\n", body)
    assert b"x-evil" not in answer.lower().split(b"\r\n\r\n")[0]
    answer = _raw(gateway, head, b"X-Session-Id: a\x00b\r\n\r\n", body)
    assert b" 400 " in answer.split(b"\r\n")[0]
    seen = len(gateway.script.bodies)
    for path in (
        "/v1/../v1/chat/completions",
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/load_lora_adapter",
    ):
        request = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        assert b" 200 " not in _raw(gateway, request, body).split(b"\r\n")[0]
    assert len(gateway.script.bodies) == seen


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://203.0.113.7"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Host": "evil.example:8200"}, 403),
        ({"Host": "evil.example:8200", "Origin": "http://evil.example:8200"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "http://127.0.0.1:8200", "Host": "localhost:8200"}, 200),
        ({"Origin": "vscode-webview://1a2b"}, 200),
        ({"Host": "[::1]:8200"}, 200),
        ({"Host": "box.local"}, 200),
        ({}, 200),
    ],
)
def test_where_nobody_is_asked_for_a_key_pages_of_other_sites_are_not_answered(
    gateway: Lab, headers: dict[str, str], status: int
) -> None:
    """A page that a browser of this machine shows can post here, and can give a name of its own this address."""
    seen = len(gateway.script.bodies)
    answer = gateway.chat("x", headers=headers)
    assert answer.status_code == status and ("--keys" in answer.text) is (status == 403)
    assert len(gateway.script.bodies) - seen == (status == 200)


def test_who_has_a_key_may_ask_from_any_page(tmp_path: Path) -> None:
    key = create(tmp_path / "keys.json", [Scope.CHAT])
    with lab(tmp_path, keys=tmp_path / "keys.json") as asked:
        headers = {"Authorization": f"Bearer {key}", "Origin": "https://ours.example", "Host": "gateway.example"}
        assert asked.chat("x", headers=headers).status_code == 200
