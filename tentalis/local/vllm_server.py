"""Runs vLLM as a child process: starts it, waits for its health, checks its log-probs, and ends all of it."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from schemas.records import LogprobsMode
from tentalis.inference.client import OpenAIClient
from tentalis.inference.logprobs_check import measure_logprobs, settled
from tentalis.inference.vllm.command import VllmOptions, vllm_command, vllm_environment, write_plugin
from tentalis.local import child
from tentalis.service.lifecycle import Unmendable
from tentalis.service.ports import listening_sockets

log = logging.getLogger(__name__)

# Loading a large model and compiling it may take this long.
START_S = 1800.0
# Time in which vLLM ends its engine, within the grace of the supervisor.
STOP_S = 3.0
_LOOK_S = 0.5


class VllmFailed(Exception):
    """vLLM ended by itself, or did not become healthy in time; its own log has the cause."""


class VllmUnfit(Unmendable):
    """The server's log-probs are not those of the sampling distribution: it is refused for training."""


def serve(executable: Path, options: VllmOptions, stop: threading.Event) -> None:
    """Serves until `stop` is set. Raises PortTaken, VllmFailed, VllmUnfit."""
    for free in listening_sockets(options.host, options.port, "model server"):
        free.close()
    with tempfile.TemporaryDirectory(prefix="tentalis-vllm-") as plugins:
        write_plugin(Path(plugins))
        # The child dies with this process; its own session lets all of its processes be ended together.
        process = subprocess.Popen(
            [*child.command(), "exec", str(os.getpid()), *vllm_command(executable, options)],
            env=os.environ | vllm_environment(options, Path(plugins)),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            asyncio.run(_watch(process, options, stop))
        finally:
            _end(process)


async def _watch(process: "subprocess.Popen[bytes]", options: VllmOptions, stop: threading.Event) -> None:
    url = f"http://{'127.0.0.1' if options.host == '0.0.0.0' else options.host}:{options.port}"
    deadline = asyncio.get_running_loop().time() + START_S
    async with OpenAIClient(url, timeout=60.0) as client:
        while not await client.healthy():
            if stop.is_set():
                return
            _check_running(process)
            if asyncio.get_running_loop().time() > deadline:
                raise VllmFailed(f"vLLM is not healthy after {START_S:g} s; its log is above.")
            await asyncio.sleep(_LOOK_S)
        measured = await measure_logprobs(client, options.served_name)
        mode, problem = settled(LogprobsMode.PROCESSED, measured)
        if measured.mode is None or mode is not LogprobsMode.PROCESSED:
            raise VllmUnfit(f"vLLM is refused for training: it {problem}")
        log.info("listening on %s; its log-probs are those of the sampling distribution (%s)", url, measured.reason)
        while not stop.is_set():
            _check_running(process)
            await asyncio.sleep(_LOOK_S)


def _check_running(process: "subprocess.Popen[bytes]") -> None:
    code = process.poll()
    if code is not None:
        raise VllmFailed(f"vLLM ended with exit code {code}; its log is above.")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends vLLM and its engine processes: in order within STOP_S, else by force."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):  # its engine may outlive it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
