"""The red team against the wall of this machine, and what a wall must let a command do."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tentalis.agents.environments.toolcall import PYTHON
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits, Wall
from tentalis.agents.sandbox.folder_watch import used
from tests.redteam.attack import Attack
from tests.redteam.known import TIMED, is_expected
from tests.redteam.report import ATTACKS
from tests.redteam.trial import successes

LIMITS = Limits(time_s=20.0, cpu_s=10, memory_mb=256, processes=8, open_files=64, file_mb=4, output_bytes=20_000)
SECRET = "the-secret-of-the-worker"


def made_place(folder: Path) -> Path:
    """A folder with the attacker's folder `work`, and beside it what it must not reach."""
    (folder / "work").mkdir()
    (folder / "tests").mkdir()
    (folder / "tests/test_answer.py").write_text("assert False")
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o600)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return made_place(tmp_path)


def attacked(wall: Wall, place: Path, code: str, limits: Limits = LIMITS) -> CommandOutput:
    script = place / "main.py"
    script.write_text(code.replace("PLACE", str(place)).replace("WORKER", str(os.getpid())))
    return wall.run([PYTHON, "-I", str(script)], place / "work", limits, readable=(script,))


@pytest.mark.parametrize("attack", [each for each in ATTACKS if each.kind not in TIMED], ids=lambda each: each.id)
def test_an_attack_is_held(wall: Wall, attack: Attack) -> None:
    found = successes(attack, wall)
    assert is_expected(wall.name, attack.id, succeeded=bool(found)), found


def test_tools_that_change_rights_and_times_work_in_the_folder(wall: Wall, place: Path) -> None:
    script = """set -e
export GIT_CONFIG_NOSYSTEM=1
mkdir -p d; echo 1 >d/f; chmod 751 d/f; touch -d 2020-01-01T00:00:00Z d/f
cp -p d/f copy; tar czf d.tgz d; rm -r d; tar xzf d.tgz; gzip copy; gunzip copy.gz
printf '#!/bin/sh\\necho ran\\n' >run; chmod +x run; ./run
git init -q repository; chown "$(id -u):$(id -g)" run
for f in d/f copy; do stat -c '%a %Y' $f; done"""
    output = wall.run(["/bin/bash", "-c", script], place / "work", LIMITS)
    assert output == CommandOutput(b"ran\n751 1577836800\n751 1577836800\n", b"", CommandEnd.EXITED, 0)


def test_rights_and_times_of_a_file_change_whatever_its_name_is(wall: Wall, place: Path) -> None:
    code = """import mmap, ctypes, os
for name in (b'\\xff\\xfe', 'ä\\n'.encode(), b'x' * 255):
    open(name, 'w').close(); os.chmod(name, 0o751); os.utime(name, (5, 5))
    found = os.fstat(os.open(name, 0)); print(oct(found.st_mode & 0o777), found.st_mtime)
libc = ctypes.CDLL(None, use_errno=True); libc.mmap.restype = ctypes.c_void_p
page = libc.mmap(None, 8192, 3, 0x22, -1, 0); libc.munmap(ctypes.c_void_p(page + 4096), 4096)
ctypes.memmove(page + 4096 - 3, b'\\xff\\xfe\\0', 3)
print(libc.chmod(ctypes.c_void_p(page + 4096 - 3), 0o700), oct(os.fstat(os.open(b'\\xff\\xfe', 0)).st_mode & 0o777))
ctypes.memmove(page + 4096 - 3, b'abc', 3)
print(libc.chmod(ctypes.c_void_p(page + 4096 - 3), 0o700), ctypes.get_errno())
print(libc.chmod(b'x/' * 3000, 0o700), ctypes.get_errno())"""
    output = attacked(wall, place, code)
    assert output.stdout.decode().splitlines() == [*["0o751 5.0"] * 3, "0 0o700", "-1 14", "-1 36"], (
        output.stderr.decode()
    )


def test_a_command_cannot_lock_its_folder_for_the_next_one(wall: Wall, place: Path) -> None:
    script = "mkdir d; chmod 0 . d; chmod 0 $PWD; stat -c %a . d"
    assert wall.run(["/bin/sh", "-c", script], place / "work", LIMITS).stdout == b"700\n0\n"


def test_the_limits_of_the_worker_cannot_be_changed(wall: Wall, place: Path) -> None:
    code = "import resource; resource.prlimit(WORKER, resource.RLIMIT_CORE, (0, 0)); print('won')"
    assert b"won" not in attacked(wall, place, code).stdout


def children() -> set[int]:
    return {each.pid for each in psutil.Process().children(recursive=True)}


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for each in psutil.process_iter():
        try:
            if mark in " ".join(each.cmdline()):
                found.append(each)
        except psutil.Error:
            continue
    return found


def test_a_fork_bomb_is_bounded_and_nothing_of_it_is_left(wall: Wall, place: Path) -> None:
    before = children()
    bomb = "import os, time\nn = 0\ntry:\n  while True:\n    if os.fork() == 0:\n      time.sleep(600)\n    n += 1\n"
    output = attacked(wall, place, bomb + "except OSError: print('forked', n)")
    assert output.end is CommandEnd.EXITED
    assert int(output.stdout.split()[1]) <= LIMITS.processes
    assert children() <= before


def test_a_command_that_leaves_its_process_group_is_ended_at_its_time(wall: Wall, place: Path) -> None:
    code = """import os, time
child = os.fork()
if not child:
    os.setpgid(0, 0); time.sleep(15); open('late', 'w').close(); os._exit(0)
while os.getpgid(child) != child: time.sleep(0.01)
os.setpgid(0, child); print('moved', flush=True); time.sleep(15); print('late', flush=True)"""
    output = attacked(wall, place, code, replace(LIMITS, time_s=2.0))
    assert (output.end, output.stdout) == (CommandEnd.TIMED_OUT, b"moved\n")
    assert marked(f"{place}/main.py") == []


def test_a_daemon_does_not_outlive_its_command(wall: Wall, place: Path) -> None:
    mark = f"{place}/main.py"
    code = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(600)\n  os._exit(0)"
    )
    assert attacked(wall, place, code + "\nprint('gone')").stdout == b"gone\n"
    assert marked(mark) == []


def test_zombies_do_not_fill_the_machine(wall: Wall, place: Path) -> None:
    before = children()
    storm = (
        "import os\ntry:\n  for _ in range(1000):\n    if os.fork() == 0: os._exit(0)\nexcept OSError: print('full')"
    )
    assert attacked(wall, place, storm).end is CommandEnd.EXITED
    assert children() <= before


def test_memory_is_bounded(wall: Wall, place: Path) -> None:
    output = attacked(wall, place, "x = b'x' * (1 << 30); print('won')")
    assert b"won" not in output.stdout


@pytest.mark.parametrize("start", [False, True], ids=["run", "start"])
def test_memory_that_no_limit_counts_is_refused(wall: Wall, place: Path, start: bool) -> None:
    code = """import mmap
try: mmap.mmap(-1, 4096)
except OSError as error: print(error.errno)
print(len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))"""
    if start:
        running = wall.start([PYTHON, "-I", "-c", code], place / "work", LIMITS)
        found = running.stdout.read()
        running.close()
    else:
        found = attacked(wall, place, code).stdout
    assert found.split() == [b"12", b"4096"]


def test_a_command_outlives_the_thread_that_started_it(wall: Wall, place: Path) -> None:
    started = []
    thread = threading.Thread(target=lambda: started.append(wall.start(["/bin/cat"], place / "work", LIMITS)))
    thread.start()
    thread.join()
    running = started[0]
    running.stdin.write(b"here\n")
    assert running.stdout.readline() == b"here\n"
    running.close()


def test_a_file_is_bounded(wall: Wall, place: Path) -> None:
    attacked(wall, place, "with open('big', 'wb') as f:\n  for _ in range(64): f.write(b'x' * (1 << 20))\nprint('won')")
    assert (place / "work/big").stat().st_size <= LIMITS.file_mb << 20


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (replace(LIMITS, disk_mb=8), "for n in range(20): open(f'f{n}', 'wb').write(b'x' * (4 << 20))"),
        (replace(LIMITS, files=600), "for n in range(3000): open(f'f{n}', 'w').close()"),
    ],
    ids=["bytes", "files"],
)
def test_a_folder_is_bounded(wall: Wall, place: Path, limits: Limits, code: str) -> None:
    free = shutil.disk_usage(place).free
    output = attacked(wall, place, f"{code}\nimport os, time; os.sync(); time.sleep(10)", limits)
    assert output.end is CommandEnd.TOO_MUCH_DISK, (output, free, shutil.disk_usage(place).free)
    assert used(place / "work").whole


def test_endless_output_ends_the_command_and_is_cut(wall: Wall, place: Path) -> None:
    output = attacked(wall, place, "import sys\nwhile True: sys.stdout.write('x' * 10_000)")
    assert output.end is CommandEnd.TOO_MUCH_OUTPUT and len(output.stdout) == LIMITS.output_bytes


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(600)", "import signal, time\nsignal.signal(15, 1)\ntime.sleep(600)"]
)
def test_what_does_not_end_is_ended(wall: Wall, place: Path, code: str) -> None:
    output = attacked(wall, place, code, Limits(time_s=1.0, memory_mb=256))
    assert output.end is CommandEnd.TIMED_OUT and output.exit_code is None


@pytest.mark.parametrize("after_s", [0.0, 0.2])
def test_the_caller_can_end_a_command(wall: Wall, place: Path, after_s: float) -> None:
    stop = threading.Event()
    threading.Timer(after_s, stop.set).start() if after_s else stop.set()
    command = [PYTHON, "-I", "-c", "import time; time.sleep(600)"]
    output = wall.run(command, place / "work", Limits(time_s=60.0, memory_mb=256), stop=stop)
    assert output.end is CommandEnd.KILLED


def test_the_signal_that_ended_a_command_is_logged(wall: Wall, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, name in ((6, "SIGABRT"), (9, "SIGKILL")):
        assert attacked(wall, place, f"import os; os.kill(os.getpid(), {number})").end is CommandEnd.KILLED
        assert caplog.messages[-1] == f"a command was ended by {name}"


def test_an_exit_code_is_the_commands_own(wall: Wall, place: Path) -> None:
    assert attacked(wall, place, "import os; os._exit(7)").exit_code == 7
    assert attacked(wall, place, "print(6 * 7)") == CommandOutput(b"42\n", b"", CommandEnd.EXITED, 0)
