"""Memory that RocksDB frees is returned to the system."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from pathlib import Path
from streams.runtime.malloc import give_back_large_blocks

libc, big, block = ctypes.CDLL(None), 16 * 2**20, 2**20
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "told":
    assert give_back_large_blocks()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc.free(libc.malloc(big))  # from here on glibc puts blocks up to this size on the heap, unless it was told
before, blocks = resident(), [libc.malloc(block) for _ in range(64)]
for each in blocks:
    ctypes.memset(each, 1, block)
for each in blocks[:-1]:
    libc.free(each)
print(round((resident() - before) / 2**20))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_large_blocks_go_back_when_they_are_freed_and_not_when_the_last_one_is() -> None:
    left = {
        how: int(subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, check=True).stdout)
        for how in ("told", "not told")
    }
    assert left["told"] <= 4 < 32 <= left["not told"]
