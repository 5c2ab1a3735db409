"""`serve vllm` over a program that takes vLLM's arguments and answers as vLLM does: served, or refused and ended."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tentalis.cli.shared.errors import explain
from tentalis.inference.logprobs_check import MENDING_FLAG
from tentalis.inference.vllm.command import VllmOptions
from tentalis.local.ports import free_port
from tentalis.local.vllm_server import VllmFailed, VllmUnfit, serve
from tentalis.service.exit_codes import ExitCode
from tentalis.service.ports import PortTaken
from tests.support.http_server import serving
from tests.support.kafka_fixture import eventually
from tests.support.sampling_server import program

pytestmark = pytest.mark.timeout(120)


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def served_by(folder: Path, port: int, stop: threading.Event | None = None, **server: Any) -> None:
    """Returns when `serve` does, with the program's process gone."""
    try:
        serve(program(folder, **server), VllmOptions(folder, "tiny", port=port), stop or threading.Event())
    finally:
        assert not answers(port), "its process is ended"


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({"mode": "raw_logprobs"}, f"gives the log-probs of the bare model.*Start vLLM with {MENDING_FLAG}"),
        ({"mode": "raw_logits"}, f"of neither the bare model nor the distribution.*Start vLLM with {MENDING_FLAG}"),
        ({"scores": False}, "cannot be checked: .*prompt_logprobs is not supported"),
        ({"tokenizes": False}, "cannot be checked: .*404"),
    ],
    ids=["raw", "neither", "no log-probs of prompts", "no tokenizer"],
)
def test_a_server_whose_log_probs_are_not_those_of_the_sampling_is_refused_and_ended(
    tmp_path: Path, server: dict[str, Any], reason: str
) -> None:
    with pytest.raises(VllmUnfit, match=f"vLLM is refused for training: it .*{reason}") as refused:
        served_by(tmp_path, free_port(), **server)
    assert explain(refused.value)[1] == ExitCode.PERMANENT


def test_a_server_started_with_our_arguments_serves_until_it_is_stopped(tmp_path: Path) -> None:
    port, stop = free_port(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(served_by, tmp_path, port, stop)
        try:
            eventually(lambda: answers(port) or running.done(), 60, message="it does not serve")
            with pytest.raises(TimeoutError):  # it was measured and found fit
                running.result(3.0)
        finally:
            stop.set()
        running.result(60)


@pytest.mark.parametrize("after_s", [0, 4.0], ids=["at once", "serving"])
def test_a_server_that_ends_by_itself_is_an_error_with_its_code(tmp_path: Path, after_s: float) -> None:
    with pytest.raises(VllmFailed, match="ended with exit code 3"):
        served_by(tmp_path, free_port(), exits_after_s=after_s)


def test_a_port_of_another_program_is_named_before_anything_starts(tmp_path: Path) -> None:
    with serving(lambda *request: (404, "text/plain", b"")) as other:
        port = int(other.rpartition(":")[2])
        with pytest.raises(PortTaken, match=str(port)):
            served_by(tmp_path, port)
