"""Attacks from inside a wall: each is what a model could write, with what must not have happened afterwards.

An attack prints `won` if it got what it wanted; besides, the test looks at the machine from outside.
"""

import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tentalis.agents.environments.toolcall import PYTHON
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Limits, Wall

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


def attack(wall: Wall, place: Path, code: str, limits: Limits = LIMITS) -> CommandOutput:
    script = place / "main.py"
    script.write_text(code.replace("PLACE", str(place)).replace("WORKER", str(os.getpid())))
    return wall.run([PYTHON, "-I", str(script)], place / "work", limits, readable=(script,))


READS = {
    "file beside": "print('won', open('PLACE/secret').read())",
    "symbolic link": "import os; os.symlink('PLACE/secret', 'x'); print('won', open('x').read())",
    "handle of a file": (
        "import ctypes; libc = ctypes.CDLL(None); b = ctypes.create_string_buffer(200)\n"
        "ctypes.memmove(b, (128).to_bytes(4, 'little'), 4); m = ctypes.c_int()\n"
        "libc.name_to_handle_at(-100, b'PLACE/secret', b, ctypes.byref(m), 0)\n"
        "if libc.open_by_handle_at(-100, b, 0) >= 0: print('won')"
    ),
    "hard link": "import os; os.link('PLACE/secret', 'x'); print('won', open('x').read())",
    "dot dot": "print('won', open('../../secret').read())",
    "rename": "import os; os.rename('PLACE/secret', 'x'); print('won', open('x').read())",
    "the shell": "import os; os.system('cat PLACE/secret && echo won')",
    "root of the process": "print('won', open('/proc/self/root/PLACE/secret').read())",
    "cwd of the worker": "import os; print('won', os.listdir('/proc/WORKER/cwd'))",
    "environment of the worker": "print('won', open('/proc/WORKER/environ', 'rb').read())",
    "memory of the worker": "open('/proc/WORKER/mem', 'rb').seek(4096); print('won')",
    "descriptors of the worker": "import os; print('won', os.listdir('/proc/WORKER/fd'))",
    "passwords": "print('won', open('/etc/shadow').read())",
    "home of root": "import os; print('won', os.listdir('/root'))",
    "every folder": "import os; print('won', os.listdir('/'))",
    "kernel memory": "print('won', open('/dev/mem', 'rb').read(1))",
    "inherited descriptors": (
        "import os\nfor n in range(3, 256):\n  try: data = os.pread(n, 64, 0)\n  except OSError: continue\n"
        "  if b'the-secret' in data: print('won')"
    ),
    "own environment": "import os\nif 'the-secret' in str(os.environ): print('won')",
    "python of the worker": "import tentalis; print('won')",
}
ACTS = {
    "write beside": "open('PLACE/reward', 'w').write('1.0'); print('won')",
    "patch the tests": "open('PLACE/tests/test_answer.py', 'w').write('pass'); print('won')",
    "delete the tests": "import shutil; shutil.rmtree('PLACE/tests'); print('won')",
    "rights of a file": "import os; os.chmod('PLACE/secret', 0o777); print('won')",
    "rights by a descriptor": "import os, site; os.fchmod(os.open(site.__file__, 0), 0o777); print('won')",
    "rights by a new call": (
        "import ctypes\nif ctypes.CDLL(None).syscall(452, -100, b'PLACE/secret', 0o777, 0) == 0: print('won')"
    ),
    "attributes by a new call": (
        "import ctypes; v = b'1'; a = ctypes.create_string_buffer(v)\n"
        "b = ctypes.addressof(a).to_bytes(8, 'little') + (1).to_bytes(8, 'little')\n"
        "if ctypes.CDLL(None).syscall(463, -100, b'PLACE/secret', 0, b'user.x', b, 16) == 0: print('won')"
    ),
    "flags of a file": (
        "import fcntl, os, site\nfd = os.open(site.__file__, 0)\n"
        "fcntl.ioctl(fd, 0x40086602, fcntl.ioctl(fd, 0x80086601, bytes(8))); print('won')"
    ),
    "version of a file": (
        "import fcntl, os, site\nfd = os.open(site.__file__, 0)\n"
        "for request in (0x40087602, 0x40086604):\n"
        "  try: fcntl.ioctl(fd, request, bytes(8)); print('won')\n  except OSError: pass"
    ),
    "mounts by new calls": (
        "import ctypes; b = ctypes.create_string_buffer(64)\n"
        "for call in ((428, -100, b'PLACE', 1), (467, -100, b'PLACE', 1, b, 32), (430, b'tmpfs', 0), (300, 0, 0)):\n"
        "  if ctypes.CDLL(None).syscall(*call) >= 0: print('won', call)"
    ),
    "log of the kernel": "import ctypes\nif ctypes.CDLL(None).syscall(103, 10, None, 0) >= 0: print('won')",
    "rights through a link": (
        "import os; os.symlink('PLACE/secret', 'x'); os.symlink('PLACE', 'y')\n"
        "for path in ('x', 'y/secret', '/proc/self/cwd/x'):\n  try: os.chmod(path, 0o777); print('won')\n"
        "  except OSError: pass"
    ),
    "times through a link": "import os; os.symlink('PLACE/secret', 'x'); os.utime('x', (1, 1)); print('won')",
    "times of a link": "import os; os.utime('PLACE/socket', (1, 1), follow_symlinks=False); print('won')",
    "rights exchanged in between": (
        "import os, threading\nopen('a', 'w').close(); os.symlink('PLACE/secret', 'b'); end = []\n"
        "def swap():\n  while not end:\n"
        "    for old, new in ('ac', 'ba', 'ab', 'ca'): os.rename(old, new)\n"
        "threads = [threading.Thread(target=swap)]; threads[0].start()\nfor _ in range(100):\n"
        "  try: os.chmod('a', 0o777)\n  except OSError: pass\nend.append(1); threads[0].join()"
    ),
    "set user id": (
        "import os; open('x', 'w').close(); os.chmod('x', 0o6777)\nif os.stat('x').st_mode & 0o6000: print('won')"
    ),
    "owner of a file": "import os; os.chown('PLACE/secret', 1, 1); print('won')",
    "times of a file": "import os; os.utime('PLACE/secret', (1, 1)); print('won')",
    "attributes of a file": "import os; os.setxattr('PLACE/secret', 'user.x', b'1'); print('won')",
    "truncation": "import os; os.truncate('PLACE/secret', 0); print('won')",
    "priority of the worker": "import os; os.setpriority(os.PRIO_PROCESS, WORKER, 19); print('won')",
    "processors of the worker": "import os; os.sched_setaffinity(WORKER, {0}); print('won')",
    "ring": (
        "import ctypes; b = ctypes.create_string_buffer(200)\n"
        "if ctypes.CDLL(None).syscall(425, 4, b) >= 0: print('won')"
    ),
    "import hook": "import site; open(site.__file__, 'a').write('x'); print('won')",
    "system folder": "open('/usr/bin/evil', 'w').write('x'); print('won')",
    "temporary folder": "open('/tmp/tentalis-evil', 'w').write('x'); print('won')",
    "shared memory": "open('/dev/shm/tentalis-evil', 'w').write('x'); print('won')",
    "device": "import os; os.mknod('disk', 0o60600, os.makedev(8, 0)); print('won')",
    "signal to the worker": "import os; os.kill(WORKER, 0); print('won')",
    "signal to the parent": "import os; os.kill(os.getppid(), 0); print('won')",
    "ptrace": (
        "import ctypes; libc = ctypes.CDLL(None)\nif libc.ptrace(16, WORKER, 0, 0) == 0: print('won')"  # attach
    ),
    "mount": (
        "import ctypes; libc = ctypes.CDLL(None)\nif libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('won')"
    ),
    "namespaces": "import ctypes; libc = ctypes.CDLL(None)\nif libc.unshare(0x10000000) == 0: print('won')",
    "clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0.0); print('won')",
    "host name": "import socket; socket.sethostname('evil'); print('won')",
    "chroot": "import os; os.chroot('.'); print('won')",
    "limits raised": (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))\n"
        "if resource.getrlimit(resource.RLIMIT_CPU)[0] == -1: print('won')"
    ),
    "loopback": "import socket; socket.create_connection(('127.0.0.1', PORT), 2); print('won')",
    "metadata address": "import socket; socket.create_connection(('169.254.169.254', 80), 2); print('won')",
    "datagram": (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', PORT)); print('won')"
    ),
    "raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('won')",
    "unix socket": "import socket; s = socket.socket(socket.AF_UNIX); s.connect('PLACE/socket'); print('won')",
    "abstract socket": (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0tentalis-test-WORKER'); print('won')"
    ),
    "listener": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); print('won')",
}


RUNNER = """
import os, sys
for name, code in ATTACKS.items():
    os.mkdir(f"PLACE/work/{name}")
    os.chdir(f"PLACE/work/{name}")
    print(f"== {name}", flush=True)
    try:
        exec(code, {})
    except BaseException as error:
        print(type(error).__name__, flush=True)
print("== end")
"""
"""Runs attacks one after another, each in a folder of its own."""


def reports(output: CommandOutput) -> dict[str, str]:
    """Returns the output of each attack by its name. All attacks ran: the last line is there."""
    assert output.end is CommandEnd.EXITED and output.stdout.endswith(b"== end\n"), output
    parts = (part.partition("\n") for part in output.stdout.decode(errors="replace").split("== ")[1:])
    return {name: said for name, _, said in parts}


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_place(tmp_path_factory.mktemp("attacks"))


@pytest.fixture(scope="module")
def read(wall: Wall, outside: Path) -> dict[str, str]:
    """The reports of READS, with the secret in the worker's environment and in an open file that is inherited."""
    with pytest.MonkeyPatch.context() as patch, (outside / "secret").open() as held:
        patch.setenv("TENTALIS_TEST_SECRET", SECRET)
        os.set_inheritable(held.fileno(), True)
        output = attack(wall, outside, RUNNER.replace("ATTACKS", repr(READS)))
    assert SECRET.encode() not in output.stdout + output.stderr
    return reports(output)


@pytest.fixture(scope="module")
def acted(wall: Wall, outside: Path) -> dict[str, str]:
    """The reports of ACTS, with servers on loopback, on a path and on an abstract name."""
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        by_path.bind(str(outside / "socket"))
        abstract.bind(f"\0tentalis-test-{os.getpid()}")
        for each in (by_path, abstract):
            each.listen()
        code = RUNNER.replace("ATTACKS", repr(ACTS)).replace("PORT", str(tcp.getsockname()[1]))
        return reports(attack(wall, outside, code, replace(LIMITS, time_s=60.0)))


@pytest.mark.parametrize("name", READS)
def test_nothing_outside_is_read(read: dict[str, str], name: str) -> None:
    assert "won" not in read[name]


@pytest.mark.parametrize("name", ACTS)
def test_nothing_outside_is_changed_or_reached(acted: dict[str, str], name: str) -> None:
    assert "won" not in acted[name]


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
    output = attack(wall, place, code)
    assert output.stdout.decode().splitlines() == [*["0o751 5.0"] * 3, "0 0o700", "-1 14", "-1 36"], (
        output.stderr.decode()
    )


def test_a_command_cannot_lock_its_folder_for_the_next_one(wall: Wall, place: Path) -> None:
    script = "mkdir d; chmod 0 . d; chmod 0 $PWD; stat -c %a . d"
    assert wall.run(["/bin/sh", "-c", script], place / "work", LIMITS).stdout == b"700\n0\n"


@pytest.mark.usefixtures("acted")
def test_the_machine_is_as_before(outside: Path) -> None:
    assert not (outside / "reward").exists()
    assert (outside / "tests/test_answer.py").read_text() == "assert False"
    secret = outside / "secret"
    assert secret.read_text() == SECRET and secret.stat().st_mode & 0o777 == 0o600 and secret.stat().st_mtime > 1
    for path in ("/usr/bin/evil", "/tmp/tentalis-evil", "/dev/shm/tentalis-evil"):
        assert not Path(path).exists()


def test_the_limits_of_the_worker_cannot_be_changed(wall: Wall, place: Path) -> None:
    code = "import resource; resource.prlimit(WORKER, resource.RLIMIT_CORE, (0, 0)); print('won')"
    assert b"won" not in attack(wall, place, code).stdout


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
    output = attack(wall, place, bomb + "except OSError: print('forked', n)")
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
    output = attack(wall, place, code, replace(LIMITS, time_s=2.0))
    assert (output.end, output.stdout) == (CommandEnd.TIMED_OUT, b"moved\n")
    assert marked(f"{place}/main.py") == []


def test_a_daemon_does_not_outlive_its_command(wall: Wall, place: Path) -> None:
    mark = f"{place}/main.py"
    code = (
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    time.sleep(600)\n  os._exit(0)"
    )
    assert attack(wall, place, code + "\nprint('gone')").stdout == b"gone\n"
    assert marked(mark) == []


def test_zombies_do_not_fill_the_machine(wall: Wall, place: Path) -> None:
    before = children()
    storm = (
        "import os\ntry:\n  for _ in range(1000):\n    if os.fork() == 0: os._exit(0)\nexcept OSError: print('full')"
    )
    assert attack(wall, place, storm).end is CommandEnd.EXITED
    assert children() <= before


def test_memory_is_bounded(wall: Wall, place: Path) -> None:
    output = attack(wall, place, "x = b'x' * (1 << 30); print('won')")
    assert b"won" not in output.stdout


def test_a_file_is_bounded(wall: Wall, place: Path) -> None:
    attack(wall, place, "with open('big', 'wb') as f:\n  for _ in range(64): f.write(b'x' * (1 << 20))\nprint('won')")
    assert (place / "work/big").stat().st_size <= LIMITS.file_mb << 20


def test_endless_output_ends_the_command_and_is_cut(wall: Wall, place: Path) -> None:
    output = attack(wall, place, "import sys\nwhile True: sys.stdout.write('x' * 10_000)")
    assert output.end is CommandEnd.TOO_MUCH_OUTPUT and len(output.stdout) == LIMITS.output_bytes


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(600)", "import signal, time\nsignal.signal(15, 1)\ntime.sleep(600)"]
)
def test_what_does_not_end_is_ended(wall: Wall, place: Path, code: str) -> None:
    output = attack(wall, place, code, Limits(time_s=1.0, memory_mb=256))
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
        assert attack(wall, place, f"import os; os.kill(os.getpid(), {number})").end is CommandEnd.KILLED
        assert caplog.messages[-1] == f"a command was ended by {name}"


def test_an_exit_code_is_the_commands_own(wall: Wall, place: Path) -> None:
    assert attack(wall, place, "import os; os._exit(7)").exit_code == 7
    assert attack(wall, place, "print(6 * 7)") == CommandOutput(b"42\n", b"", CommandEnd.EXITED, 0)
