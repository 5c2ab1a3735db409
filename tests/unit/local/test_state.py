"""The state directory: one holder, remembered ports, a status that others can read."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tentalis.local.child import MARK, kill_marked, marked
from tentalis.local.ports import free_port, port_is_free
from tentalis.local.state import FOLDERS, StateDir, StateDirError, request_stop, write_whole
from tests.support.kafka_fixture import eventually

HOLD = """
import signal, sys, time
from pathlib import Path
from tentalis.local.state import StateDir
with StateDir(Path(sys.argv[1])):
    print("held", flush=True)
    {then}
"""


def hold(path: Path, then: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(then=then), str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_it_has_its_folders_and_is_given_back(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "home")
    assert state.holder() is None
    with state:
        assert {entry.name for entry in state.path.iterdir() if entry.is_dir()} == set(FOLDERS)
        assert state.holder() == StateDir(state.path).holder() == os.getpid()
    assert state.holder() is None
    with state:
        pass


def test_a_second_run_is_told_who_has_it_and_a_killed_holder_has_it_no_more(tmp_path: Path) -> None:
    process = hold(tmp_path, "time.sleep(60)")
    try:
        assert StateDir(tmp_path).holder() == process.pid
        with pytest.raises(StateDirError) as error:
            StateDir(tmp_path).acquire()
        for part in (str(process.pid), "tentalis down", "TENTALIS_HOME", str(tmp_path), "-c"):
            assert part in str(error.value)
    finally:
        process.kill()
        process.wait()
    with StateDir(tmp_path):
        pass


def test_a_directory_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateDirError, match="TENTALIS_HOME"):
        StateDir(tmp_path / "file" / "home").acquire()


def test_ports_are_remembered_and_differ(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        ports = {name: state.port(name) for name in ("kafka", "model", "bridge")}
        assert len(set(ports.values())) == 3
        assert all(port_is_free(port) for port in ports.values())
    with StateDir(tmp_path) as state:
        assert {name: state.port(name) for name in ports} == ports


def test_a_preferred_port_is_taken_if_it_is_free_and_kept(tmp_path: Path) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        taken = foreign.getsockname()[1]
        with StateDir(tmp_path) as state:
            elsewhere = state.port("gateway", preferred=taken)
            assert elsewhere != taken
    with StateDir(tmp_path) as state:
        assert state.port("gateway", preferred=taken) == elsewhere, "users may have written it down"
        free = free_port(avoid={elsewhere})
        assert state.port("another", preferred=free) == free
        assert state.port("third", preferred=free) != free, "a port has one name"


def test_a_taken_port_is_replaced_unless_it_is_fixed(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state, socket.socket() as foreign:
        port = state.port("kafka", fixed=True)
        foreign.bind(("127.0.0.1", port))
        foreign.listen()
        with pytest.raises(StateDirError, match=rf"port {port} of kafka is taken by process {os.getpid()}"):
            state.port("kafka", fixed=True)
        other = state.port("kafka")
        assert other != port
        assert state.port("kafka") == other


def test_ports_are_for_the_holder(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        StateDir(tmp_path).port("kafka")


def test_nothing_to_stop(tmp_path: Path) -> None:
    assert request_stop(tmp_path / "nowhere") is None
    with StateDir(tmp_path):
        pass
    assert request_stop(tmp_path) is None


def test_stop_waits_until_the_holder_has_let_go(tmp_path: Path) -> None:
    process = hold(tmp_path, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(60)")
    with process:
        assert request_stop(tmp_path, 20) == process.pid
        assert process.wait(20) in (7, -signal.SIGTERM)
    assert StateDir(tmp_path).holder() is None


def test_stop_waits_for_the_last_moment_of_the_process_too(tmp_path: Path) -> None:
    last = "import atexit; atexit.register(time.sleep, 0.5); signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    with hold(tmp_path, last + "print('there', flush=True); time.sleep(60)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        assert request_stop(tmp_path, 20) == process.pid
        assert process.poll() == 0


def test_a_holder_that_does_not_stop_is_named(tmp_path: Path) -> None:
    process = hold(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)")
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "deaf\n"
        with pytest.raises(StateDirError, match=f"kill -9 {process.pid}"):
            request_stop(tmp_path, 0.3)
        process.kill()


def test_status_tells_whether_its_writer_is_still_there(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert state.status() is None
    with state:
        write_whole(tmp_path / "status.json", {"supervisor": os.getpid(), "processes": {}})
        assert state.status() == {"supervisor": os.getpid(), "processes": {}, "running": True}
    assert json.loads((tmp_path / "status.json").read_text())["supervisor"] == os.getpid()
    status = state.status()
    assert status is not None
    assert status["running"] is False
    assert [entry.name for entry in tmp_path.glob("*.tmp")] == []


def test_a_killed_holders_id_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path) -> None:
    with hold(tmp_path, "time.sleep(60)") as process:
        process.kill()
    stale = json.loads((tmp_path / "lock").read_text())
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / "lock").write_text(json.dumps({**stale, "pid": bystander.pid}))
        # Somebody is just taking the directory, and has not yet written who.
        with (tmp_path / "lock").open("a") as taking:
            fcntl.flock(taking, fcntl.LOCK_EX)
            assert StateDir(tmp_path).holder() is None
            assert request_stop(tmp_path) is None
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_two_that_look_do_not_take_each_other_for_the_holder(tmp_path: Path) -> None:
    with StateDir(tmp_path):
        content = (tmp_path / "lock").read_text()
    (tmp_path / "lock").write_text(content)  # as it is after `kill -9`
    with (tmp_path / "lock").open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert StateDir(tmp_path).holder() is None


@pytest.mark.parametrize("content", [b"[", b"", b"[]", b"\xff"])
def test_a_damaged_file_is_named_with_the_way_on(content: bytes, tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(StateDirError, match=r"status\.json is damaged: .*remove this file"):
        state.status()
    (tmp_path / "ports.json").write_bytes(content)
    with state, pytest.raises(StateDirError, match=r"ports\.json is damaged: .*remove this file"):
        state.port("broker")


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        (tmp_path / "status.json").mkdir()
        write_whole(tmp_path / "status.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_leftovers_of_an_earlier_run_are_ended_and_nobody_else(tmp_path: Path) -> None:
    mine, other = StateDir(tmp_path / "mine"), StateDir(tmp_path / "other")
    assert mine.mark != other.mark
    leftover, bystander = (
        subprocess.Popen(["sleep", "60"], env={MARK: f"{state.mark}join/1/"}, start_new_session=True)
        for state in (mine, other)
    )
    try:
        eventually(lambda: marked(mine.mark) == [leftover.pid], 10)
        with mine:
            assert leftover.wait(10) == -signal.SIGKILL
        assert bystander.poll() is None
        assert kill_marked(mine.mark) == []
    finally:
        for process in (leftover, bystander):
            process.kill()
            process.wait()
