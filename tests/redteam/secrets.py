"""Attacks that read: secrets, variables, memory and descriptors of other processes, and files beside the folder."""

from functools import partial

from tests.redteam.attack import Attack

_read = partial(Attack, "reads", success="it reads a file or a process outside of its folder")

SECRETS = (
    _read("file beside", code="print('won', open('@PLACE@/secret').read())"),
    _read("symbolic link", code="import os; os.symlink('@PLACE@/secret', 'x'); print('won', open('x').read())"),
    _read("link to a folder", code="import os; os.symlink('@PLACE@', 'x'); print('won', open('x/secret').read())"),
    _read("hard link", code="import os; os.link('@PLACE@/secret', 'x'); print('won', open('x').read())"),
    _read("dot dot", code="print('won', open('../secret').read())"),
    _read("rename", code="import os; os.rename('@PLACE@/secret', 'x'); print('won', open('x').read())"),
    _read("the shell", code="import os; os.system('cat @PLACE@/secret && echo won')"),
    _read("root of the process", code="print('won', open('/proc/self/root@PLACE@/secret').read())"),
    _read("root of process 1", code="print('won', open('/proc/1/root@PLACE@/secret').read())"),
    _read("folder of another process", code="print('won', open('/proc/@VICTIM@/cwd/secret').read())"),
    _read("variables of another process", code="print('won', open('/proc/@VICTIM@/environ', 'rb').read())"),
    _read("command line of another process", code="print('won', open('/proc/@VICTIM@/cmdline', 'rb').read())"),
    _read("memory of another process", code="open('/proc/@VICTIM@/mem', 'rb').seek(4096); print('won')"),
    _read("descriptors of another process", code="import os; print('won', os.listdir('/proc/@VICTIM@/fd'))"),
    _read("variables of the parent", code="import os; print(open(f'/proc/{os.getppid()}/environ').read())"),
    _read("own variables", code="import os; print(dict(os.environ))"),
    _read(
        "memory by a call",
        code="""import ctypes
libc = ctypes.CDLL(None); b = ctypes.create_string_buffer(16)
class V(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
for line in open('/proc/@VICTIM@/maps'):
    v, w = V(ctypes.addressof(b), 16), V(int(line.split('-')[0], 16), 16)
    if libc.process_vm_readv(@VICTIM@, ctypes.byref(v), 1, ctypes.byref(w), 1, 0) > 0: print('won'); break""",
    ),
    _read(
        "descriptor by a call",
        code="""import ctypes, os
libc = ctypes.CDLL(None); pid = libc.syscall(434, @VICTIM@, 0)
for number in range(64):
    fd = libc.syscall(438, pid, number, 0)
    if fd >= 0: print('won')""",
    ),
    _read(
        "handle of a file",
        code="""import ctypes
libc = ctypes.CDLL(None); b = ctypes.create_string_buffer(200)
ctypes.memmove(b, (128).to_bytes(4, 'little'), 4); m = ctypes.c_int()
if libc.name_to_handle_at(-100, b'@PLACE@/secret', b, ctypes.byref(m), 0) == 0:
    if libc.open_by_handle_at(libc.open(b'/usr', 0), b, 0) >= 0: print('won')""",
    ),
    _read(
        "inherited descriptors",
        code="""import os
for n in range(3, 256):
    try: data = os.pread(n, 64, 0)
    except OSError: continue
    if b'the-secret' in data: print('won')""",
    ),
    _read("passwords", code="print('won', open('/etc/shadow').read())"),
    _read("users of the machine", code="print('won', open('/etc/passwd').read())"),
    _read("home of the user", code="import os; print('won', os.listdir('@HOME@/.'))"),
    _read("every folder", code="import os\nif sorted(os.listdir('/')) == @ROOT_ENTRIES@: print('won')"),
    _read("existence of a process", code="import os; os.stat('/proc/@VICTIM@'); print('won')"),
    _read("size and time of a file", code="import os; print('won', os.stat('@PLACE@/secret').st_size)"),
    _read("names beside", code="import os\nif 'secret' in os.listdir('@PLACE@'): print('won')"),
    _read("kernel memory", code="print('won', open('/dev/mem', 'rb').read(1))"),
    _read("log of the kernel", code="import ctypes\nif ctypes.CDLL(None).syscall(103, 10, None, 0) >= 0: print('won')"),
    _read("messages of the kernel", code="import os; os.read(os.open('/dev/kmsg', os.O_NONBLOCK), 9); print('won')"),
    _read("network of the machine", code="if len(open('/proc/net/tcp').readlines()) > 1: print('won')"),
    _read("python of the worker", code="import tentalis; print('won')"),
)
