"""Real processes under the supervisor: started in order, restarted, stopped in order, never left behind."""

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tentalis.local.broker import metadata_ready
from tentalis.local.child import marked
from tentalis.local.disk import Space
from tentalis.local.events import read_events
from tentalis.local.restart import RestartPolicy
from tentalis.local.shutdown import stop_signals
from tentalis.local.spec import NotReady, ProcessSpec, SupervisorError
from tentalis.local.state import StateDir, request_stop
from tentalis.local.supervisor import Supervisor
from tests.support.kafka_fixture import eventually

pytestmark = pytest.mark.chaos

# Writes down when it began and when it was told to end, and ends then.
POLITE = """
import signal, sys, time
def note(word): print(word, sys.argv[1], file=open(sys.argv[2], "a"), flush=True)
def end(*_):
    note("end"); sys.exit(0)
signal.signal(signal.SIGTERM, end)
note("begin")
while True: time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
# A launcher, whose rank has left the process group, as those of torchrun do.
LAUNCHER = """
import subprocess, sys, time
print("rank", subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True); time.sleep(600)
"""


def python(name: str, code: str, *arguments: str, **options: Any) -> ProcessSpec:
    return ProcessSpec(name, [sys.executable, "-c", code, *arguments], **options)


def alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_they_start_and_stop_in_order_of_dependency(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.touch()
    supervisor = supervise(
        python("upper", POLITE, "upper", str(notes), after=("middle",)),
        python(
            "middle", POLITE, "middle", str(notes), after=("job",), ready=lambda: "begin middle" in notes.read_text()
        ),
        python("lower", POLITE, "lower", str(notes), ready=lambda: "begin lower" in notes.read_text()),
        ProcessSpec("job", ["sh", "-c", f"echo begin job >> {notes}"], after=("lower",), expect_exit=True),
    )
    supervisor.wait_ready(30)
    eventually(lambda: "begin upper" in notes.read_text(), 10)
    assert {name: entry["state"] for name, entry in supervisor.status().items()} == {
        "upper": "ready",
        "middle": "ready",
        "lower": "ready",
        "job": "done",
    }
    supervisor.stop()
    assert notes.read_text().splitlines() == [
        *("begin lower", "begin job", "begin middle", "begin upper"),
        *("end upper", "end middle", "end lower"),
    ]
    assert {entry["state"] for entry in supervisor.status().values()} == {"stopped", "done"}


def test_what_is_killed_comes_back_however_often(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(*(ProcessSpec(name, ["sleep", "600"]) for name in ("a", "b", "c")))
    supervisor.wait_ready(10)
    for number in range(1, 13):
        victim = random.choice(["a", "a", "b"])  # one of them far more often than by chance
        before = supervisor.status()[victim]
        os.kill(before["pid"], signal.SIGKILL)

        def back(victim: str = victim, restarts: int = before["restarts"]) -> bool:
            entry = supervisor.status()[victim]
            return bool(entry["state"] == "ready" and entry["restarts"] == restarts + 1)

        eventually(back, 10, message=f"kill {number}: {victim} did not come back")
    status = supervisor.status()
    assert sum(entry["restarts"] for entry in status.values()) == 12
    assert status["a"]["last_exit"].startswith("ended by SIGKILL")
    assert status["c"]["restarts"] == 0


QUICK = RestartPolicy(first_delay=0.01, longest_delay=0.2, attempts=5)


def test_a_failing_application_is_named_and_everything_else_goes_on(
    supervise: Callable[..., Supervisor], state: StateDir
) -> None:
    supervisor = supervise(
        ProcessSpec("broker", ["sleep", "600"], essential=True),
        python("join", "raise SystemExit('error: no such model: folder is empty')", policy=QUICK, ready=lambda: False),
        ProcessSpec("waits", ["sleep", "600"], after=("join",)),
        ProcessSpec("other", ["sleep", "600"]),
        ProcessSpec("aside", ["/no/such/program"], policy=QUICK),
    )
    eventually(lambda: supervisor.status()["join"]["restarts"] >= 8, 20)
    eventually(lambda: supervisor.status()["aside"]["state"] == "crash-looping", 10)
    assert supervisor.failure() is None
    status = supervisor.status()
    assert {name: status[name]["state"] for name in ("broker", "join", "waits", "other")} == {
        "broker": "ready",
        "join": "crash-looping",
        "waits": "waiting",
        "other": "ready",
    }
    assert re.match(r"failed \d+ times in .*; last error: error: no such model", status["join"]["message"])
    assert "cannot run /no/such/program" in status["aside"]["message"]
    assert status["join"]["last_error"] == "error: no such model: folder is empty"
    assert supervisor.broken().keys() == {"join", "aside"}
    assert {status[name]["restarts"] for name in ("broker", "other")} == {0}
    kept = [event for event in read_events(state.path) if event.process == "join"]
    assert [event.event for event in kept].count("crash-looping") == 1
    assert "exit code 1" in kept[-1].detail and "no such model" in kept[-1].detail


def test_a_process_that_never_runs_long_is_a_crash_loop_although_it_becomes_ready(
    supervise: Callable[..., Supervisor],
) -> None:
    policy = RestartPolicy(first_delay=0.01, longest_delay=0.1)
    supervisor = supervise(
        python("trainer", "import time; time.sleep(0.3); raise SystemExit('error: damaged checkpoint')", policy=policy)
    )
    eventually(lambda: supervisor.status()["trainer"]["state"] == "crash-looping", 20)
    for _ in range(20):
        assert supervisor.status()["trainer"]["state"] == "crash-looping"
        time.sleep(0.05)
    assert "damaged checkpoint" in supervisor.status()["trainer"]["message"]


def test_a_crash_loop_ends_when_the_process_stays_ready(
    supervise: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tentalis.local.supervisor._CHECK_READY", 0.1)
    mended = tmp_path / "mended"
    code = f"import os, time; time.sleep(600 if os.path.exists({str(mended)!r}) else 0); raise SystemExit(1)"
    policy = RestartPolicy(first_delay=0.01, longest_delay=0.05, healthy_after=0.5)
    supervisor = supervise(python("join", code, policy=policy))
    eventually(lambda: supervisor.status()["join"]["state"] == "crash-looping", 20)
    mended.touch()
    eventually(lambda: supervisor.status()["join"]["state"] == "ready", 20)


@pytest.mark.parametrize("code", [1, 7])
def test_what_nothing_can_start_without_fails_the_stack_at_its_first_start_only(
    supervise: Callable[..., Supervisor], tmp_path: Path, code: int
) -> None:
    gone = ["sh", "-c", f"echo error: the port is taken; exit {code}"]
    supervisor = supervise(
        ProcessSpec("broker", gone, essential=True, policy=QUICK, ready=lambda: False),
        ProcessSpec("join", ["sleep", "600"], after=("broker",)),
    )
    eventually(supervisor.failure, 20)
    assert "the port is taken" in str(supervisor.failure())
    assert supervisor.unmendable() is (code == 7)
    with pytest.raises(SupervisorError, match="the port is taken"):
        supervisor.wait_ready(10)
    supervisor.stop()
    once = f"test -e {tmp_path}/been && {{ echo error: gone; exit {code}; }}; touch {tmp_path}/been; sleep 0.5; exit 1"
    later = supervise(
        ProcessSpec("broker", ["sh", "-c", once], essential=True, policy=QUICK), ProcessSpec("other", ["sleep", "600"])
    )
    expected = "failed" if code == 7 else "crash-looping"
    eventually(lambda: later.broken() and later.status()["broker"]["state"] == expected, 20)
    assert later.failure() is None
    assert later.status()["other"]["state"] == "ready"


def test_a_stopped_process_is_unresponsive_at_once_and_ready_when_it_continues(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tentalis.local.supervisor._CHECK_READY", 0.1)
    supervisor = supervise(ProcessSpec("join", ["sleep", "600"]), ProcessSpec("other", ["sleep", "600"]))
    supervisor.wait_ready(10)
    pid = supervisor.status()["join"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: supervisor.status()["join"]["state"] == "unresponsive", 10)
    assert f"kill -CONT {pid}" in supervisor.status()["join"]["message"]
    assert supervisor.status()["other"]["state"] == "ready"
    os.kill(pid, signal.SIGCONT)
    supervisor.wait_ready(10)
    assert supervisor.status()["join"]["restarts"] == 0


def test_a_frozen_rank_is_found_below_its_launcher(
    supervise: Callable[..., Supervisor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher runs, and its rank sends no heartbeat."""
    monkeypatch.setattr("tentalis.local.supervisor._CHECK_READY", 0.1)
    (tmp_path / "beat").touch()
    launcher = "import subprocess, sys; print('rank', (c := subprocess.Popen(sys.argv[1:])).pid, flush=True); c.wait()"
    argv = [sys.executable, "-c", launcher, sys.executable, "-c", BEATING, str(tmp_path / "beat")]
    supervisor = supervise(ProcessSpec("trainer", argv, heartbeat=True, expect_exit=True, hang_after=600.0))
    supervisor.wait_ready(20)
    words = Path(supervisor.status()["trainer"]["log"]).read_text().split()
    rank = int(words[words.index("rank") + 1])
    os.kill(rank, signal.SIGSTOP)
    eventually(lambda: supervisor.status()["trainer"]["state"] == "unresponsive", 20)
    assert f"kill -CONT {rank}" in supervisor.status()["trainer"]["message"]
    os.kill(rank, signal.SIGCONT)
    supervisor.wait_ready(20)


def test_a_slow_answer_is_not_shown_as_trouble(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is shown after a quarter of the time after which it would be restarted, and not before."""
    monkeypatch.setattr("tentalis.local.supervisor._CHECK_READY", 0.05)
    monkeypatch.setattr("tentalis.local.supervisor._CHECK_AGAIN", 0.05)
    answers = [True]
    supervisor = supervise(ProcessSpec("join", ["sleep", "600"], ready=lambda: answers[0], hang_after=8.0))
    supervisor.wait_ready(10)
    answers[0] = False
    began, seen = time.monotonic(), set()
    while time.monotonic() < began + 1.0:
        seen.add(supervisor.status()["join"]["state"])
        time.sleep(0.02)
    assert seen == {"ready"}
    eventually(lambda: supervisor.status()["join"]["state"] == "unresponsive", 10)
    answers[0] = True
    supervisor.wait_ready(10)


def test_ends_while_a_dependency_is_down_do_not_count(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    up = tmp_path / "up"
    up.touch()
    # As a client of Kafka does that ends whenever the broker is away.
    client = f"import os, time\nwhile os.path.exists({str(up)!r}): time.sleep(0.01)\nraise SystemExit(1)"
    supervisor = supervise(
        ProcessSpec("broker", ["sleep", "600"], ready=up.exists),
        python("client", client, after=("broker",), policy=RestartPolicy(loop_after=2)),
    )
    supervisor.wait_ready(10)
    for round_ in range(1, 5):
        up.unlink()
        os.kill(supervisor.status()["broker"]["pid"], signal.SIGKILL)
        eventually(lambda: supervisor.status()["client"]["state"] == "waiting", 10)
        up.touch()
        eventually(lambda: supervisor.status()["client"]["state"] == "ready", 10)
        assert supervisor.status()["client"]["restarts"] == round_


@pytest.mark.usefixtures("impatient")
def test_what_does_not_become_ready_is_killed_and_says_so(supervise: Callable[..., Supervisor]) -> None:
    def never() -> bool:
        raise ConnectionError("port 1234 is closed")

    supervisor = supervise(
        ProcessSpec("hung", ["sleep", "600"], ready=never, ready_timeout=0.6, policy=RestartPolicy(0.01, loop_after=1))
    )
    eventually(lambda: "port 1234 is closed" in supervisor.status()["hung"]["message"], 10)
    eventually(lambda: supervisor.status()["hung"]["state"] == "crash-looping", 20)
    assert "was not ready for" in supervisor.status()["hung"]["message"]


@pytest.mark.usefixtures("impatient")
def test_what_only_waits_for_another_process_is_left_alone(supervise: Callable[..., Supervisor]) -> None:
    def waits() -> bool:
        raise NotReady("waiting for the first served version of the policy p")

    supervisor = supervise(ProcessSpec("gateway", ["sleep", "600"], ready=waits, alive=lambda: True, ready_timeout=0.6))
    with pytest.raises(SupervisorError, match="gateway starting"):
        supervisor.wait_ready(3.0)
    shown = supervisor.status()["gateway"]
    assert (shown["restarts"], shown["message"]) == (0, "waiting for the first served version of the policy p")


# Beats as our own processes do, for as long as the file is there.
BEATING = """
import sys, time
from pathlib import Path
from tentalis.service.heartbeat import Heart
heart = Heart()
while True:
    if Path(sys.argv[1]).exists(): heart.beat(Path(sys.argv[1]).read_text())
    time.sleep(0.05)
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tentalis.local.supervisor._CHECK_READY", 0.2)
    monkeypatch.setattr("tentalis.local.supervisor._GRACE", 0.5)
    monkeypatch.setattr("tentalis.service.heartbeat.INTERVAL_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_what_hangs_is_killed_and_started_again_and_what_waits_for_it_is_not(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    beat = tmp_path / "beat"
    beat.touch()
    # Longer than a beat under load, and than the child's own interval of a second.
    options: dict[str, Any] = {"heartbeat": True, "hang_after": 4.0}
    supervisor = supervise(
        python("stopped", BEATING, str(beat), **options),
        python("waits", BEATING, str(beat), after=("stopped",), **options),
        python("trainer", BEATING, str(beat), expect_exit=True, **options),
    )
    supervisor.wait_ready(30, ["stopped", "waits"])
    before = supervisor.status()
    # Both stand still, but only the one that depends on nobody is to blame.
    for name in ("stopped", "waits"):
        os.kill(before[name]["pid"], signal.SIGSTOP)
    eventually(lambda: supervisor.status()["stopped"]["restarts"] == 1, 30)
    assert supervisor.status()["waits"]["restarts"] == 0
    assert "gave no sign of life for" in str(supervisor.status()["stopped"]["last_exit"])
    os.kill(before["waits"]["pid"], signal.SIGCONT)
    supervisor.wait_ready(30, ["stopped", "waits"])
    assert supervisor.status()["waits"]["restarts"] == supervisor.status()["trainer"]["restarts"] == 0
    # A loop that stands still while its process runs: of one that ends by itself, too.
    beat.rename(tmp_path / "away")
    eventually(lambda: supervisor.status()["trainer"]["restarts"] == 1, 30)


@pytest.mark.usefixtures("impatient")
def test_a_process_says_itself_what_keeps_it_from_being_ready(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    beat = tmp_path / "beat"
    beat.write_text("v3 is damaged")
    supervisor = supervise(python("policies", BEATING, str(beat), heartbeat=True, ready_timeout=4.0, hang_after=30.0))
    eventually(lambda: supervisor.status()["policies"]["state"] == "degraded", 20)
    assert supervisor.status()["policies"]["message"] == "v3 is damaged"
    with pytest.raises(SupervisorError, match="policies degraded"):
        supervisor.wait_ready(6.0)  # longer than it may take to become ready: it works, so it is left alone
    beat.write_text("")
    supervisor.wait_ready(20)
    assert supervisor.status()["policies"]["restarts"] == 0


def test_a_halted_process_waits_for_an_operator_and_a_permanent_error_fails_at_once(
    supervise: Callable[..., Supervisor],
) -> None:
    supervisor = supervise(
        ProcessSpec("scoring", ["sh", "-c", "echo error: 100 dead letters in a row; echo bye; exit 5"]),
        ProcessSpec("other", ["sleep", "600"]),
    )
    eventually(supervisor.halted, 20)
    assert "error: 100 dead letters in a row" in supervisor.halted()["scoring"]
    assert supervisor.status()["scoring"]["state"] == "halted"
    supervisor.wait_ready(10, ["other"])
    assert supervisor.failure() is None
    supervisor.stop()
    assert supervisor.halted()  # also in the last word
    torn = supervise(ProcessSpec("model", ["sh", "-c", "echo error: model.safetensors is damaged; exit 7"]))
    eventually(torn.failed, 20)
    assert torn.failure() is None and torn.status()["model"]["restarts"] == 0
    assert "a restart cannot fix it (exit code 7" in torn.failed()["model"]
    assert "model.safetensors is damaged" in torn.failed()["model"].splitlines()[0]


def test_a_full_disk_is_named_and_waited_for(
    supervise: Callable[..., Supervisor], state: StateDir, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    full = Space(state.path, free=0, total=2**30, inodes=None)
    found = [full]
    monkeypatch.setattr("tentalis.local.disk_watch.space", lambda _: found[0])
    monkeypatch.setattr("tentalis.local.disk_watch._EVERY", 0.0)
    supervisor = supervise(ProcessSpec("a", ["sleep", "600"]))
    eventually(lambda: "no space left on" in supervisor.status()["a"]["message"], 10)
    assert "(free 0.0 MiB of 1.0 GiB)" in supervisor.status()["a"]["message"]
    assert "no space left on" in caplog.text
    found[0] = replace(full, free=2**30)
    supervisor.wait_ready(10)
    assert "has free space again" in caplog.text


def test_the_supervisor_lives_on_when_it_can_write_neither_logs_nor_status(
    supervise: Callable[..., Supervisor], state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tentalis.local.supervisor._START_AGAIN", 0.1)
    # Said by the process, and gone again when the supervisor looks: a checkpoint that did not fit.
    tidy = ProcessSpec(
        "tidy", ["sh", "-c", "echo OSError: No space left on device; exit 1"], policy=RestartPolicy(space_delay=0.01)
    )
    with monkeypatch.context() as patched:
        patched.setattr("tentalis.local.launcher._open_log", refuse)
        patched.setattr("tentalis.local.supervisor.write_whole", refuse)
        supervisor = supervise(ProcessSpec("a", ["sleep", "600"]), tidy)
        eventually(lambda: "cannot be started: [Errno 28]" in supervisor.status()["a"]["message"], 10)
    supervisor.wait_ready(10, ["a"])
    assert supervisor.status()["a"]["restarts"] == 0
    eventually(lambda: supervisor.status()["tidy"]["restarts"] > 8, 20)
    eventually(lambda: "No space left on device" in supervisor.status()["tidy"]["message"], 10)
    eventually((state.path / "status.json").exists, 10)


def test_everything_is_gone_in_time_though_some_ignore_sigterm(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(
        python("lower", DEAF), python("middle", DEAF, after=("lower",)), python("upper", DEAF, after=("middle",))
    )
    supervisor.wait_ready(10)
    logs = [Path(entry["log"]) for entry in supervisor.status().values()]
    eventually(lambda: all("deaf" in log.read_text() for log in logs), 20)
    pids = [entry["pid"] for entry in supervisor.status().values()]
    began = time.monotonic()
    supervisor.stop(timeout=4.0)
    assert time.monotonic() - began < 5.0  # a promise to people, with room for a busy machine
    assert not any(alive(pid) for pid in pids)


def test_a_descendant_that_left_the_group_ends_with_its_launcher(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(python("trainer", LAUNCHER))
    log = Path(supervisor.status()["trainer"]["log"])

    def ranks() -> list[int]:
        return [int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("rank")]

    eventually(lambda: log.exists() and ranks(), 10)
    os.kill(supervisor.status()["trainer"]["pid"], signal.SIGKILL)
    eventually(lambda: len(ranks()) == 2, 10)
    assert [alive(rank) for rank in ranks()] == [False, True]
    supervisor.stop()
    assert not alive(ranks()[1])


CHATTY = """
import os, time
for number in range(10**9):
    os.write(1, b"line %d %s\\n" % (number, b"x" * 1000))  # whole: the log may be turned over between two writes
    if number % 100 == 99: time.sleep(0.02)
"""


def test_a_log_is_turned_over_while_its_process_lives(
    supervise: Callable[..., Supervisor], state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tentalis.local.logfiles.LIMIT", 50_000)
    monkeypatch.setattr("tentalis.local.disk_watch._EVERY", 0.05)
    file, other = (state.folder("logs") / name for name in ("chatty.log", "up.log"))
    other.write_bytes(b"old" * 50_000)
    supervisor = supervise(python("chatty", CHATTY))
    earlier = file.with_name("chatty.log.1")
    eventually(earlier.exists, 20)
    inode = earlier.stat().st_ino
    eventually(lambda: earlier.stat().st_ino != inode, 20, message="not turned over a second time")
    assert supervisor.status()["chatty"]["restarts"] == 0
    assert not file.read_bytes().startswith(b"\0")
    assert earlier.read_bytes().splitlines()[0].startswith(b"line ")
    # Also what no supervised process writes: the supervisor's own, of `tentalis up --detach`.
    assert (other.stat().st_size, other.with_name("up.log.1").stat().st_size) == (0, 150_000)


def test_a_log_that_cannot_be_turned_over_is_left_and_named_once(
    supervise: Callable[..., Supervisor], state: StateDir, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("tentalis.local.logfiles.LIMIT", 1_000)
    monkeypatch.setattr("tentalis.local.disk_watch._EVERY", 0.0)
    file = state.folder("logs") / "up.log"
    file.write_bytes(b"x" * 2_000)
    file.with_name("up.log.1").mkdir()
    supervise(ProcessSpec("a", ["sleep", "600"])).wait_ready(10)
    eventually(lambda: "cannot rotate" in caplog.text, 10)
    assert file.stat().st_size == 2_000
    assert caplog.text.count("cannot rotate") == 1
    assert {entry.name for entry in file.parent.iterdir()} == {"up.log", "up.log.1", "a.log"}


def test_the_status_file_is_for_other_processes(supervise: Callable[..., Supervisor], state: StateDir) -> None:
    supervisor = supervise(ProcessSpec("a", ["sleep", "600"]))
    supervisor.wait_ready(10)

    def written() -> bool:
        status = StateDir(state.path).status()
        return status is not None and status["processes"]["a"]["state"] == "ready" and status["running"]

    eventually(written, 10)
    supervisor.stop()
    content = json.loads((state.path / "status.json").read_text())
    assert content["processes"]["a"] == supervisor.status()["a"]
    assert content["processes"]["a"]["state"] == "stopped"


# A whole command: holds the directory, supervises, stops on a signal.
COMMAND = """
import sys
from pathlib import Path
from tentalis.local.spec import ProcessSpec
from tentalis.local.shutdown import stop_signals
from tentalis.local.state import StateDir
from tentalis.local.supervisor import Supervisor
with stop_signals() as stop, StateDir(Path(sys.argv[1])) as state:
    supervisor = Supervisor(state, [
        ProcessSpec("launcher", [sys.executable, "-c", sys.argv[2]]),
        ProcessSpec("deaf", [sys.executable, "-c", sys.argv[3]]),
    ])
    supervisor.start()
    while not stop.wait(0.05):
        if failure := supervisor.failure():
            supervisor.stop(float(sys.argv[4]))
            sys.exit(failure)
    supervisor.stop(float(sys.argv[4]))
"""


def command(
    home: Path, timeout: float = 2.0, stderr: IO[bytes] | None = None
) -> tuple[subprocess.Popen[bytes], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(home), LAUNCHER, DEAF, str(timeout)], start_new_session=True, stderr=stderr
    )
    logs = home / "logs"

    def said() -> bool:
        files = [logs / "launcher.log", logs / "deaf.log"]
        return all(file.exists() for file in files) and all(
            any(line.startswith(word) for line in file.read_text().splitlines())
            for file, word in zip(files, ("rank ", "deaf"), strict=True)
        )

    eventually(said, 30)
    status = StateDir(home).status()
    assert status is not None and status["supervisor"] == process.pid
    ours = [entry["pid"] for entry in status["processes"].values()]
    rank = next(line for line in (logs / "launcher.log").read_text().splitlines() if line.startswith("rank "))
    return process, [*ours, int(rank.split()[1])]


def test_nothing_survives_a_killed_supervisor(tmp_path: Path) -> None:
    process, children = command(tmp_path)
    assert len(children) == 3  # the rank too
    process.kill()
    process.wait()
    eventually(lambda: not any(alive(pid) for pid in children), 10, message=f"of {children} some are left")
    assert StateDir(tmp_path).holder() is None


def test_a_supervisor_that_lost_its_directory_stops_only_its_own_processes(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with (tmp_path / "errors").open("wb") as errors:
        old, before = command(home, stderr=errors)
    try:
        shutil.rmtree(home, ignore_errors=True)  # what is written meanwhile may keep the folder itself
        new, after = command(home)
        try:
            assert old.wait(30) == 1
            assert f"{home} was removed" in (tmp_path / "errors").read_text().splitlines()[-1]
            assert not any(alive(pid) for pid in before)
            assert not set(before) & set(after) and len(after) == 3
            assert all(alive(pid) for pid in after), "the next one lost processes"
            assert set(after) <= set(marked(StateDir(home).mark))
            status = StateDir(home).status()
            assert status is not None and status["supervisor"] == new.pid
            assert {entry["restarts"] for entry in status["processes"].values()} == {0}
        finally:
            new.kill()
            new.wait()
        eventually(lambda: not any(alive(pid) for pid in after), 10)
    finally:
        old.kill()
        old.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything_within_ten_seconds(tmp_path: Path, number: signal.Signals) -> None:
    process, children = command(tmp_path, timeout=10.0 if number == signal.SIGINT else 2.0)
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(30) == 0
    assert time.monotonic() - began < 11  # the promise, and the end of the interpreter
    assert not any(alive(pid) for pid in children)


def test_down_asks_the_command_to_stop(tmp_path: Path) -> None:
    process, children = command(tmp_path)
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    assert request_stop(tmp_path, 20) == process.pid
    reaper.join()
    assert not any(alive(pid) for pid in children)


def test_a_directory_of_somebody_else_is_not_supervised_in(tmp_path: Path) -> None:
    with pytest.raises(SupervisorError, match="acquire the state directory"):
        Supervisor(StateDir(tmp_path), []).start()


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(10)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.broker
def test_the_broker_is_restarted_with_its_records(supervise: Callable[..., Supervisor], state: StateDir) -> None:
    port, controller = state.port("kafka", fixed=True), state.port("kafka-controller")
    bootstrap = f"127.0.0.1:{port}"
    arguments = ["--data-dir", str(state.folder("kafka")), "--port", str(port), "--controller-port", str(controller)]
    supervisor = supervise(
        ProcessSpec(
            "kafka",
            [sys.executable, "-m", "tentalis.local.broker", *arguments],
            ready=lambda: metadata_ready(bootstrap),
        )
    )
    supervisor.wait_ready(60)
    quiet = {"bootstrap.servers": bootstrap, "log_level": 0}
    admin = AdminClient(quiet)
    admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(30)
    producer = Producer(quiet)
    producer.produce("kept", b"value")
    assert producer.flush(30) == 0
    for restarts in (1, 2):
        os.kill(supervisor.status()["kafka"]["pid"], signal.SIGKILL)

        def back(restarts: int = restarts) -> bool:
            entry = supervisor.status()["kafka"]
            return bool(entry["state"] == "ready" and entry["restarts"] == restarts)

        eventually(back, 60, message=lambda: (state.folder("logs") / "kafka.log").read_text()[-2000:])
    assert "kept" in AdminClient(quiet).list_topics(timeout=30).topics
