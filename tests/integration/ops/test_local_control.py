"""An operator and a running stack: its processes are restarted, stopped and started, and asked what they said."""

import json
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tentalis.cli.main import app
from tentalis.local.control import SOCKET, ControlError, ControlRequest, ControlServer, ask
from tentalis.local.events import FILE, StackHistory, older, read_events
from tentalis.local.restart import RestartPolicy
from tentalis.local.spec import ProcessSpec
from tentalis.local.state import StateDir
from tentalis.local.supervisor import Supervisor
from tests.support.kafka_fixture import eventually

pytestmark = pytest.mark.chaos

SLEEP = ["sleep", "600"]


@pytest.fixture
def tool(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("TENTALIS_HOME", str(state.path))
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_single_processes_are_restarted_stopped_and_started(
    supervise: Callable[..., Supervisor], tool: Callable[..., Result]
) -> None:
    supervisor = supervise(*(ProcessSpec(name, SLEEP) for name in ("join", "scoring", "other")))
    supervisor.wait_ready(10)
    before = supervisor.status()
    done = tool("restart", "join", "scoring")
    assert done.exit_code == 0, done.stderr
    after = supervisor.status()
    assert all(after[name]["pid"] != before[name]["pid"] for name in ("join", "scoring"))
    assert after["other"]["pid"] == before["other"]["pid"]
    assert "join is ready" in done.stderr and after["join"]["state"] == "ready"

    assert tool("stop", "join").exit_code == 0
    assert supervisor.status()["join"]["state"] == "stopped" and supervisor.status()["join"]["pid"] is None
    time.sleep(0.5)  # it is not restarted
    assert supervisor.status()["join"]["state"] == "stopped"
    assert tool("status").exit_code == 0, "what an operator has stopped is no trouble"
    assert tool("start", "join", "other").exit_code == 0
    assert supervisor.status()["join"]["state"] == "ready"
    assert supervisor.status()["other"]["pid"] == before["other"]["pid"], "it ran already"


def test_what_needs_an_operator_starts_again_when_asked_and_not_before(
    supervise: Callable[..., Supervisor], tool: Callable[..., Result], tmp_path: Path
) -> None:
    mended = tmp_path / "mended"
    code = f"test -e {mended} && exec sleep 600; echo error: it is damaged; exit $0"
    policy = RestartPolicy(first_delay=0.01, longest_delay=600.0)
    supervisor = supervise(
        ProcessSpec("five", ["sh", "-c", code, "5"]),
        ProcessSpec("seven", ["sh", "-c", code, "7"]),
        ProcessSpec("one", ["sh", "-c", code, "1"], policy=policy),
        ProcessSpec("other", SLEEP),
    )
    eventually(lambda: supervisor.status()["one"]["restarts"] == 7, 20)
    states = {name: one["state"] for name, one in supervisor.status().items()}
    assert states == {"five": "halted", "seven": "failed", "one": "crash-looping", "other": "ready"}
    assert supervisor.status()["five"]["restarts"] == supervisor.status()["seven"]["restarts"] == 0
    shown = tool("status")
    assert shown.exit_code == 1 and "`tentalis restart five`" in shown.stdout
    refused = tool("restart", "seven")
    assert refused.exit_code == 1 and "it is damaged" in refused.stderr
    mended.touch()
    assert tool("restart", "five", "seven", "one").exit_code == 0
    assert {one["state"] for one in supervisor.status().values()} == {"ready"}
    kept = [json.loads(line) for line in tool("events", "five", "-o", "json").stdout.splitlines()]
    steps = [event["event"] for event in kept if event["event"] != "ready"]
    assert steps == ["starting", "exited", "halted", "restart", "waiting", "starting"]
    (exited,) = [event for event in kept if event["event"] == "exited"]
    assert exited["detail"].endswith("error: it is damaged")


def test_an_unknown_process_and_a_stack_that_does_not_run_are_refused(
    supervise: Callable[..., Supervisor], tool: Callable[..., Result]
) -> None:
    nobody = tool("restart", "join")
    assert nobody.exit_code == 1
    supervisor = supervise(ProcessSpec("join", SLEEP))
    supervisor.wait_ready(10)
    refused = tool("stop", "joint", "join")
    assert refused.exit_code == 1 and "the stack has no joint; it has join" in refused.stderr
    assert supervisor.status()["join"]["state"] == "ready", "nothing is done by half"


def test_only_the_owner_reaches_the_socket_and_a_deep_folder_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    (deep / SOCKET).touch()  # left over by a killed supervisor
    asked: list[ControlRequest] = []

    def handle(request: ControlRequest) -> dict[str, dict[str, Any]]:
        asked.append(request)
        return {}

    server = ControlServer(deep, handle)
    assert stat.S_IMODE((deep / SOCKET).stat().st_mode) == 0o600
    assert ask(deep, ControlRequest("stop", ("join",))) == {}
    assert asked == [ControlRequest("stop", ("join",))]
    with monkeypatch.context() as patched:
        patched.setattr("tentalis.local.control.struct.unpack", lambda *_: (1, 12345, 1))
        with pytest.raises(ControlError, match="belongs to another user"):
            ask(deep, ControlRequest("stop", ("join",)))
    # Nonsense and a client that leaves do not end the server.
    monkeypatch.chdir(deep)
    for nonsense in (b"nonsense\n", b"[]\n", b'{"action": 1}\n', b""):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(SOCKET)
            client.sendall(nonsense)
    assert ask(deep, ControlRequest("status", ())) == {}
    server.close()
    assert not (deep / SOCKET).exists()
    with pytest.raises(ControlError, match="does not answer"):
        ask(deep, ControlRequest("status", ()))


def test_the_history_is_bounded_and_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tentalis.local.events.LIMIT", 2_000)
    history = StackHistory(tmp_path)
    for number in range(200):
        history.add("join", "exited", str(number), restarts=number)
    assert (tmp_path / FILE).stat().st_size + older(tmp_path / FILE).stat().st_size < 5_000
    found = [event.detail for event in read_events(tmp_path)]
    assert found == [str(number) for number in range(200 - len(found), 200)] and len(found) > 20
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.open", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "full")))
        history.add("join", "lost", "?")
        history.add("join", "lost", "?")
    assert caplog.text.count("cannot write the history") == 1
    history.flush()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"at": 1, "proc')  # cut
    assert [event.event for event in read_events(tmp_path)][-2:] == ["lost", "lost"]
    assert list(read_events(tmp_path, since=2**60)) == []


TALKING = """
import logging, sys, time
logging.basicConfig(level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
log = logging.getLogger("app")
log.info("{0} begins")
try: 1 / 0
except ZeroDivisionError: log.warning("{0} warns", exc_info=True)
log.info("{0} goes on")
print("error: {0} printed", flush=True)
time.sleep(600)
"""


def test_logs_are_merged_and_filtered(supervise: Callable[..., Supervisor], tool: Callable[..., Result]) -> None:
    supervisor = supervise(*(ProcessSpec(name, [sys.executable, "-c", TALKING.format(name)]) for name in ("a", "bcd")))
    logs = [Path(one["log"]) for one in supervisor.status().values()]
    eventually(lambda: all(log.exists() and "\nerror: " in log.read_text() for log in logs), 20)
    both = tool("logs").stdout.splitlines()
    assert {line.partition(" | ")[0] for line in both} == {"a  ", "bcd"}
    alone = tool("logs", "a", "--level", "warning").stdout.splitlines()
    assert alone[0].endswith("WARNING app: a warns") and alone[-1] == "error: a printed"
    assert "ZeroDivisionError" in alone[-2], "a traceback belongs to its line"
    assert not any("begins" in line or "goes on" in line for line in alone)
    assert tool("logs", "a", "--since", "1h").stdout and not tool("logs", "a", "--since", "2099-01-01").stdout
    as_json = [json.loads(line) for line in tool("logs", "a", "-o", "json", "--level", "ERROR").stdout.splitlines()]
    assert as_json[0]["text"].startswith("Traceback") and as_json[-1]["text"] == "error: a printed"
    assert {line["level"] for line in as_json} == {"ERROR"}
    assert tool("logs", "nosuch").exit_code == 1 and tool("logs", "--level", "loud").exit_code == 2


def test_a_log_level_is_changed_and_forgotten_with_the_stack(
    supervise: Callable[..., Supervisor], tool: Callable[..., Result], state: StateDir
) -> None:
    code = "import os, sys, time; print(os.environ['TENTALIS_LOG_LEVEL_FILE'], flush=True); time.sleep(600)"
    supervisor = supervise(
        ProcessSpec("join", [sys.executable, "-c", code], log_level=True), ProcessSpec("broker", SLEEP)
    )
    file = state.path / "levels" / "join"
    log = Path(supervisor.status()["join"]["log"])
    eventually(lambda: log.exists() and str(file) in log.read_text(), 20)
    assert tool("log-level", "join", "debug").exit_code == 0 and file.read_text() == "DEBUG"
    assert tool("log-level", "join", "default").exit_code == 0 and not file.exists()
    for name, level, said in (("join", "loud", "use DEBUG, INFO"), ("broker", "DEBUG", "broker cannot be changed")):
        refused = tool("log-level", name, level)
        assert refused.exit_code == 1 and said in refused.stderr
    tool("log-level", "join", "ERROR")
    supervisor.stop()
    supervise(ProcessSpec("join", SLEEP))
    assert not file.exists()
