"""Attacks on memory, disk and output."""

from dataclasses import replace
from functools import partial

from tentalis.agents.sandbox import CommandEnd
from tentalis.agents.sandbox.folder_watch import used
from tests.redteam.attack import LIMITS, Attack, Trial

_MIB = 1024 * 1024
_GIB_TAKEN = "takes a GiB of memory"
_memory = partial(Attack, "memory", success="it has over 512 MiB of 256", harms=_GIB_TAKEN)


_MOST_MB, _MOST_FILES = LIMITS.disk_mb + 1024, 100_000
"""A command passes its limits of 48 MiB and 2,000 files before it is ended: the watch looks ten times a second and then
measures, later on a busy machine. So an attack has won if it is not ended, or only after it has written what a fast disk
takes in a second. It tries several times as much."""


def _disk_is_over(trial: Trial) -> bool:
    found = used(trial.place.work)
    return found.bytes > _MOST_MB * _MIB or found.files > _MOST_FILES


_disk = partial(
    Attack,
    "disk",
    success=f"it is not ended before it has {_MOST_MB} MiB of {LIMITS.disk_mb}, or {_MOST_FILES:,} files of {LIMITS.files:,}",
    outside=_disk_is_over,
    harms="fills the disk",
)


def _output_is_over(trial: Trial) -> bool:
    return max(len(trial.output.stdout), len(trial.output.stderr)) > LIMITS.output_bytes or trial.seconds > 15


_output = partial(Attack, "output", success="more than the limit of output is kept", outside=_output_is_over)

RESOURCES = (
    _memory("one process", code="x = b'x' * (1 << 30); print('won')"),
    _memory(
        "many processes",
        code="""import os, time
for _ in range(6):
    if os.fork() == 0: x = b'x' * (150 << 20); time.sleep(2); print('held', flush=True); os._exit(0)
held = 0
for _ in range(6):
    if os.wait()[1] == 0: held += 1
if held >= 4: print('won', held)""",
    ),
    _memory(
        "file in memory",
        code="""import os
for n in range(50):
    fd = os.memfd_create('x')
    for _ in range(3): os.write(fd, b'x' * (1 << 20))
    for _ in range(3): os.write(os.memfd_create('y'), b'x' * (4 << 20))
    if n * 15 > 512: print('won'); break""",
    ),
    _memory(
        "shared memory that is unmapped but for a page",
        code="""import ctypes
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 64 << 20
for n in range(16):
    page = libc.mmap(None, size, 3, 0x21, -1, 0)
    if page == ctypes.c_void_p(-1).value: raise MemoryError
    ctypes.memset(page, 1, size); libc.munmap(page, size - 4096)
    if n * 64 > 512: print('won'); break""",
    ),
    _memory(
        "shared memory of /dev/zero",
        code="""import mmap, os
kept = []
fd = os.open('/dev/zero', os.O_RDWR)
import ctypes
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
size = 64 << 20
for n in range(16):
    page = libc.mmap(None, size, 3, 1, fd, 0)
    if page == ctypes.c_void_p(-1).value: raise MemoryError
    ctypes.memset(page, 1, size); libc.munmap(page, size - 4096)
    if n * 64 > 512: print('won'); break""",
    ),
    _memory(
        "segments of System V",
        code="""import ctypes
libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p
for n in range(16):
    key = libc.shmget(0, 64 << 20, 0o1600)
    if key < 0: raise MemoryError
    page = libc.shmat(key, None, 0)
    if page == ctypes.c_void_p(-1).value: raise MemoryError
    ctypes.memset(page, 1, 64 << 20); libc.shmctl(key, 0, None)
    if n * 64 > 512: print('won'); break""",
        harms="leaves segments of memory",
    ),
    _memory(
        "tables of pages",
        code="""import ctypes
libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
size = 256 << 30
page = libc.mmap(None, size, 1, 0x4022, -1, 0)
if page == ctypes.c_void_p(-1).value: raise MemoryError
libc.madvise(page, size, 15)
for at in range(page, page + size, 2 << 20): ctypes.string_at(at, 1)
print('won')""",
    ),
    _disk(
        "one file",
        code="with open('big', 'wb') as f:\n    for _ in range(64): f.write(b'x' * (1 << 20))\nprint('won')",
    ),
    _disk(
        "a file with holes", code="import os; os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 1 << 40); print('won')"
    ),
    _disk(
        "reserved space",
        code="import os; os.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 1 << 29); print('won')",
    ),
    _disk(
        "many files",
        code="for n in range(1024):\n    with open(f'f{n}', 'wb') as f: f.write(b'x' * (4 << 20))\nprint('won')",
    ),
    _disk(
        "deleted files that are open",
        code="""import os, time
def fill():
    for n in range(50):
        fd = os.open('x', os.O_CREAT | os.O_RDWR); os.unlink('x')
        for _ in range(4): os.write(fd, b'x' * (1 << 20))
    time.sleep(3); print('won', flush=True)
for n in range(5):
    if os.fork() == 0: os.mkdir(str(n)); os.chdir(str(n)); fill(); os._exit(0)
for _ in range(5): os.wait()""",
    ),
    _disk(
        "files in a locked folder",
        code="""import os, time
def fill():
    os.mkdir('d'); fds = [os.open(f'd/{n}', os.O_CREAT | os.O_RDWR, 0) for n in range(50)]; os.chmod('d', 0)
    for fd in fds: os.write(fd, b'x' * (4 << 20))
    time.sleep(3); print('won', flush=True)
for n in range(5):
    if os.fork() == 0: os.mkdir(str(n)); os.chdir(str(n)); fill(); os._exit(0)
for _ in range(5): os.wait()""",
    ),
    _disk(
        "empty files",
        code="import os\nfor n in range(1_000_000):\n    os.close(os.open(f'f{n}', os.O_CREAT | os.O_WRONLY))\nprint('won')",
    ),
    _disk("empty folders", code="import os\nfor n in range(1_000_000): os.mkdir(f'd{n}')\nprint('won')"),
    _disk(
        "nested folders",
        code="import os\nfor n in range(1_000_000): os.mkdir('d'); os.chdir('d')\nprint('won')",
    ),
    _disk("links", code="import os\nfor n in range(1_000_000): os.symlink('x' * 200, f'l{n}')\nprint('won')"),
    _output("a GB", code="import sys\nfor _ in range(100_000): sys.stdout.write('x' * 10_000)"),
    _output("a GB of errors", code="import sys\nfor _ in range(100_000): sys.stderr.write('x' * 10_000)"),
    _output(
        "after the end",
        code="""import os, sys
if os.fork() == 0:
    os.setsid()
    while True: os.write(1, b'x' * 100)
os._exit(0)""",
        success="a process that was left writes on",
        outside=lambda trial: trial.output.end is CommandEnd.TIMED_OUT or trial.seconds > 15,
    ),
    _output(
        "one byte at a time",
        code="import os\nwhile True: os.write(1, b'x')",
        limits=replace(LIMITS, time_s=15.0),
    ),
)
