"""The calls that change rights, owners, times and attributes of files, answered from outside of the wall.

Landlock has no rules for them. So each such call stops here, and this process makes the change itself, if the file is
in the folder of the command. The file is opened first and then looked at, so that a command cannot exchange it between
the check and the change. All arguments are read once. No call is let through to the kernel with a path or a descriptor
that was only looked at.
"""

import ctypes
import errno
import os
import re
import stat
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from sandlock import ExceptionPolicy, NotifAction
from sandlock.handler import Handler, HandlerCtx

from tentalis.agents.sandbox.syscall_filter import FLAG_REQUESTS

AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
_RIGHTS = 0o777
"""Bits of a mode that a command may set: no set-user-id, set-group-id or sticky bit."""
_UNCHANGED = 0xFFFFFFFF
_RLIMIT_LOCKS = 10
_TIMES = 32
"""Bytes of the two timespecs of utimensat."""
_LONGEST_PATH = 4096
_PAGE = 4096
_ATTRIBUTE_CALLS = (
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
FILE_CALLS = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchown", "fchownat", "utimensat"),
    *_ATTRIBUTE_CALLS,
)
"""The answered calls that change files. A wall that cannot answer them must deny them."""
_libc = ctypes.CDLL(None, use_errno=True)


class AnsweredCall(Handler):  # type: ignore[misc]  # sandlock has no types
    """Answers one system call of a command with what a function returns. An error of the function is the call's."""

    on_exception = ExceptionPolicy.DENY_EPERM

    def __init__(self, answer: Callable[[HandlerCtx], NotifAction]) -> None:
        self._answer = answer

    def handle(self, ctx: HandlerCtx) -> NotifAction:
        """See sandlock's Handler."""
        try:
            return self._answer(ctx)
        except OSError as error:
            return NotifAction.errno(error.errno or errno.EPERM)


class FileAttributes:
    """Changes rights and times of files in one folder for the commands that run there."""

    def __init__(self, folder: Path) -> None:
        self._inside = f"{folder.resolve()}/"

    def answers(self) -> Mapping[str, AnsweredCall]:
        """Returns the answer to each system call, by its name."""
        return {
            "chmod": AnsweredCall(lambda ctx: self._chmod(ctx, AT_FDCWD, ctx.args[0], ctx.args[1])),
            "fchmodat": AnsweredCall(lambda ctx: self._chmod(ctx, *ctx.args[:3])),
            "fchmodat2": AnsweredCall(lambda ctx: self._chmod(ctx, *ctx.args[:4])),
            "fchmod": AnsweredCall(lambda ctx: self._chmod(ctx, ctx.args[0], 0, ctx.args[1])),
            "chown": AnsweredCall(lambda ctx: _chown(*ctx.args[1:3])),
            "lchown": AnsweredCall(lambda ctx: _chown(*ctx.args[1:3])),
            "fchown": AnsweredCall(lambda ctx: _chown(*ctx.args[1:3])),
            "fchownat": AnsweredCall(lambda ctx: _chown(*ctx.args[2:4])),
            "utimensat": AnsweredCall(self._utimensat),
            "ioctl": AnsweredCall(_ioctl),
            # Its mode is in memory, where no filter sees a set-user-id bit. Programs then use the older calls.
            "openat2": AnsweredCall(lambda ctx: NotifAction.errno(errno.ENOSYS)),
            # Tools that copy attributes accept that a file system has none, and not that they are refused.
            **{name: AnsweredCall(_no_attributes) for name in _ATTRIBUTE_CALLS},
        }

    def _chmod(self, ctx: HandlerCtx, folder: int, path: int, mode: int, flags: int = 0) -> NotifAction:
        if _signed(flags) & AT_SYMLINK_NOFOLLOW:
            return NotifAction.errno(errno.EOPNOTSUPP)
        opened = self._opened(ctx, folder, path, flags)
        try:
            # Without its owner's rights to the folder itself, no further command could begin in it.
            kept = stat.S_IRWXU if f"{_handle(opened).readlink()}/" == self._inside else 0
            _handle(opened).chmod(mode & _RIGHTS | kept)
        finally:
            os.close(opened)
        return NotifAction.returns(0)

    def _utimensat(self, ctx: HandlerCtx) -> NotifAction:
        folder, path, times, flags = ctx.args[:4]
        wanted = None
        if times:
            wanted = ctx.read(times, _TIMES)
            if wanted is None:
                return NotifAction.errno(errno.EFAULT)
        opened = self._opened(ctx, folder, path, flags)
        try:
            if _libc.utimensat(opened, b"", wanted, AT_EMPTY_PATH) != 0:
                return NotifAction.errno(ctypes.get_errno())
        finally:
            os.close(opened)
        return NotifAction.returns(0)

    def _opened(self, ctx: HandlerCtx, folder: int, path: int, flags: int) -> int:
        """Opens the file that a call names, as a handle without rights to its content. `path`: address of the path, 0
        for the descriptor `folder` itself. Raises OSError, PermissionError for a file outside of the folder."""
        text = b""
        if path:
            text = _path_at(ctx, path)
            if not text and not _signed(flags) & AT_EMPTY_PATH:
                raise FileNotFoundError(errno.ENOENT, "an empty path")
        at = _signed(folder)
        base = os.open(f"/proc/{ctx.pid}/cwd" if at == AT_FDCWD else f"/proc/{ctx.pid}/fd/{at}", os.O_PATH)
        if not text:
            return self._checked(base)
        # glibc changes a file without following links by the path of its descriptor. Here, self is this process.
        text = re.sub(rb"^/proc/(?:thread-)?self(?=/)", b"/proc/%d" % ctx.pid, text)
        try:
            follow = 0 if not _signed(flags) & AT_SYMLINK_NOFOLLOW else os.O_NOFOLLOW
            return self._checked(os.open(text, os.O_PATH | follow, dir_fd=base))
        finally:
            os.close(base)

    def _checked(self, opened: int) -> int:
        if f"{_handle(opened).readlink()}/".startswith(self._inside):
            return opened
        os.close(opened)
        raise PermissionError(errno.EPERM, "outside of the folder")


class OwnLimits:
    """Lets a process of a command change its own limits, but for the mark by which the command is found later.

    The limits of another process of this user may be the worker's. `marked`: the shell that begins the command sets the
    mark; each later change of that limit is refused.
    """

    def __init__(self, marked: bool) -> None:
        self._lock = threading.Lock()
        self._awaited = marked

    def answer(self) -> AnsweredCall:
        """Returns the answer to `prlimit64`."""
        return AnsweredCall(self._prlimit)

    def _prlimit(self, ctx: HandlerCtx) -> NotifAction:
        pid, limit, changed = ctx.args[:3]
        if pid not in (0, ctx.pid):
            return NotifAction.errno(errno.EPERM)
        if changed and limit & 0xFFFFFFFF == _RLIMIT_LOCKS:
            with self._lock:
                if not self._awaited:
                    return NotifAction.errno(errno.EPERM)
                self._awaited = False
        return NotifAction.continue_()


class Leader:
    """The first process of a command, which ends with everything that it started when it is killed.

    Its id is learnt from its first `chdir`, which is let through.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid: int | None = None
        self._killed = self._ended = False

    def answer(self) -> AnsweredCall:
        """Returns the answer to `chdir`."""
        return AnsweredCall(self._chdir)

    def _chdir(self, ctx: HandlerCtx) -> NotifAction:
        with self._lock:
            if self._pid is None:
                self._pid = ctx.pid
            return NotifAction.kill(9, self._pid) if self._killed else NotifAction.continue_()

    def kill(self) -> None:
        """Kills the command. Does nothing after `ended`."""
        with self._lock:
            self._killed = True
            if self._pid is not None and not self._ended:
                # The process may have left its group, which then is empty or holds others of the command.
                for kill in (os.killpg, os.kill):
                    try:
                        kill(self._pid, 9)
                    except ProcessLookupError:
                        continue  # it ended by itself

    def ended(self) -> None:
        """Notes that the command has ended: its id may belong to another process now."""
        with self._lock:
            self._ended = True


def _path_at(ctx: HandlerCtx, address: int) -> bytes:
    """Returns the path at an address of the calling process, each byte read once. Raises OSError."""
    path = b""
    while len(path) < _LONGEST_PATH:
        # A path may end at the last byte that the process may read, so no read goes beyond a page.
        part = ctx.read(address + len(path), _PAGE - (address + len(path)) % _PAGE)
        if part is None:
            raise OSError(errno.EFAULT, "no path")
        named, end, _ = cast(bytes, part).partition(b"\0")
        path += named
        if end:
            break
    if len(path) >= _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, "a path that is too long")
    return path


def _handle(opened: int) -> Path:
    return Path(f"/proc/self/fd/{opened}")


def _chown(owner: int, group: int) -> NotifAction:
    """Allows what changes nothing: a command may only name its own user and group."""
    same = owner & _UNCHANGED in (_UNCHANGED, os.geteuid()) and group & _UNCHANGED in (_UNCHANGED, os.getegid())
    return NotifAction.returns(0) if same else NotifAction.errno(errno.EPERM)


def _ioctl(ctx: HandlerCtx) -> NotifAction:
    """Lets every request through but those that change flags or versions of a file: the request is in a register."""
    return NotifAction.errno(errno.EPERM) if ctx.args[1] & 0xFFFFFFFF in FLAG_REQUESTS else NotifAction.continue_()


def _no_attributes(ctx: HandlerCtx) -> NotifAction:
    return NotifAction.errno(errno.EOPNOTSUPP)


def _signed(value: int) -> int:
    """Returns the int that a 64-bit argument holds in its lower half."""
    return int(struct.unpack("i", struct.pack("I", value & 0xFFFFFFFF))[0])
