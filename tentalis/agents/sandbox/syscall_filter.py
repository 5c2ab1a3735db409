"""The seccomp filters of commands: BPF programs for x86-64. Pure.

The namespaces of bubblewrap hide files, processes and networks. Its filter denies what they leave open: new namespaces,
memory that belongs to no process, sockets of other families than those that a network namespace confines, and files
that the worker could not handle, such as named pipes. sandlock has a filter of its own, which does not look at the
arguments of calls: the second filter here denies what only those tell.
"""

import errno
import struct
from collections.abc import Iterable, Sequence

FLAG_REQUESTS = (0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40047602, 0x40086604, 0x40046604)
"""Requests of ioctl that change flags or versions of a file: FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR, FS_IOC_SETVERSION and
EXT4_IOC_SETVERSION, with their 32-bit forms."""
_TERMINAL_REQUESTS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""
_DENIED = {
    # Trees of mounts, and other namespaces.
    **{"mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308},
    **{"open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433},
    **{"mount_setattr": 442, "open_tree_attr": 467, "fanotify_init": 300, "quotactl": 179, "quotactl_fd": 443},
    # Memory that belongs to no process, so that no limit counts it.
    **{"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240},
    # Other processes, also the one that supervises the command.
    **{"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438, "kcmp": 312},
    # Large parts of the kernel that commands do not need.
    **{"bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426},
    **{"io_uring_register": 427, "add_key": 248, "request_key": 249, "keyctl": 250, "syslog": 103, "vhangup": 153},
    # The machine.
    **{"kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176},
    **{"reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "sethostname": 170, "setdomainname": 171},
    **{"settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "iopl": 172, "ioperm": 173},
    # Named pipes and devices: a worker that opens one would wait for ever.
    **{"mknod": 133, "mknodat": 259, "name_to_handle_at": 303, "open_by_handle_at": 304, "file_setattr": 469},
}
"""Numbers of the denied calls by name, as in asm/unistd_64.h."""
_UNSUPPORTED = {
    **{"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "setxattrat": 463},
    **{"removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "removexattrat": 466},
}
"""Tools that copy attributes accept that a file system has none, and not that they are refused."""
_ABSENT = {"clone3": 435, "openat2": 437}
"""Their flags are in memory, which a filter does not see. Programs then use the older calls."""
_CLONE, _OPEN, _CREAT, _OPENAT, _IOCTL, _PRCTL, _SOCKET, _MMAP = 56, 2, 85, 257, 16, 157, 41, 9
_MODES = {90: 1, 91: 1, 268: 2, 452: 2}
"""chmod, fchmod, fchmodat and fchmodat2, each with the place of its mode."""

_NEW_NAMESPACES = 0x7E020000
_CREATES = 0o100 | 0o20000000
"""O_CREAT and the bit of O_TMPFILE: only then the mode of an open call counts."""
_SET_ID = 0o6000
_SHARED_ANONYMOUS = 0x21
_PR_SET_DUMPABLE = 4
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6."""

_X86_64 = 0xC000003E
_X32 = 0x40000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def bubblewrap_filter() -> bytes:
    """Returns the program for bubblewrap, an array of `struct sock_filter`."""
    lines: list[Instruction] = []
    for calls, code in ((_DENIED, errno.EPERM), (_UNSUPPORTED, errno.EOPNOTSUPP), (_ABSENT, errno.ENOSYS)):
        for number in calls.values():
            lines += _of(number, [_refuse(code)])
    lines += _of(_CLONE, _if_any(0, _NEW_NAMESPACES, errno.EPERM))
    for number, place in _MODES.items():
        lines += _of(number, _if_any(place, _SET_ID, errno.EPERM))
    lines += _of(_IOCTL, _if_one_of(1, (*FLAG_REQUESTS, *_TERMINAL_REQUESTS), errno.EPERM))
    lines += _of(_PRCTL, _if_one_of(0, (_PR_SET_DUMPABLE,), errno.EPERM))
    lines += _of(_SOCKET, [*_if_one_of(0, _FAMILIES, 0)[:-1], _refuse(errno.EAFNOSUPPORT)])
    return _program([*lines, *_set_id_files(), *_shared_memory()])


def sandlock_filter() -> bytes:
    """Returns the program for sandlock, an array of `struct sock_filter`. It is as short as it can be: each call of a
    command runs through it. It lets `openat2` through, which sandlock itself needs."""
    return _program([*_set_id_files(), *_shared_memory()])


def _set_id_files() -> list[Instruction]:
    """Refuses to make a file with the set-user-id or the set-group-id bit."""
    lines = _of(_CREAT, _if_any(1, _SET_ID, errno.EPERM))
    for number, flags in ((_OPEN, 1), (_OPENAT, 2)):
        created = [_argument(flags), (_ANY_BIT, 1, 0, _CREATES), _end(_ALLOW)]
        lines += _of(number, [*created, *_if_any(flags + 1, _SET_ID, errno.EPERM)])
    return lines


def _shared_memory() -> list[Instruction]:
    """Refuses memory that is shared and has no file: no limit counts what of it is unmapped but for a page."""
    both = (_AND, 0, 0, _SHARED_ANONYMOUS), (_EQUAL, 0, 1, _SHARED_ANONYMOUS)
    return _of(_MMAP, [_argument(3), *both, _refuse(errno.ENOMEM)])


def _program(lines: Sequence[Instruction]) -> bytes:
    """Returns the lines as a program. Calls of another architecture than x86-64 kill the process."""
    begin: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _X86_64),
        _end(_KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        _end(_KILL),
    ]
    return b"".join(struct.pack("<HBBI", *line) for line in [*begin, *lines, _end(_ALLOW)])


def _of(number: int, block: Sequence[Instruction]) -> list[Instruction]:
    """Returns a block for one call. A call that runs through the block is allowed."""
    allowed = [*block, _end(_ALLOW)]
    return [(_EQUAL, 0, len(allowed), number), *allowed]


def _if_any(place: int, bits: int, code: int) -> list[Instruction]:
    return [_argument(place), (_ANY_BIT, 0, 1, bits), _refuse(code)]


def _if_one_of(place: int, values: Iterable[int], code: int) -> list[Instruction]:
    """Refuses a call whose argument is one of the values. The code 0 allows it instead. A last line allows the rest."""
    end = _refuse(code) if code else _end(_ALLOW)
    lines = [_argument(place)]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), end]
    return [*lines, _end(_ALLOW)]


def _argument(place: int) -> Instruction:
    """Loads the lower half of an argument."""
    return _LOAD, 0, 0, _ARGUMENTS + 8 * place


def _refuse(code: int) -> Instruction:
    return _end(_ERRNO | code)


def _end(answer: int) -> Instruction:
    return _RETURN, 0, 0, answer
