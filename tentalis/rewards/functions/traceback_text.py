"""Tracebacks of the user's code: the frames of the function's files, without those that called it."""

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

_OURS = Path(__file__).resolve().parent
_FAULT_FRAME = re.compile(r'^[ \t]*File "(?P<file>[^"\n]+)", line (?P<line>\d+) in ', re.MULTILINE)
MAX_CHARS = 4_000


def where(error: BaseException, folders: Sequence[Path]) -> str:
    """Returns `file:line` of the innermost frame in one of the folders, else of the innermost frame, else ''."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    frames = [[(frame.filename, frame.lineno or 0) for frame in _frames(each)] for each in _chain(error)]
    inside = [[place for place in places if _within(place[0], folders)] for places in frames]
    for places in [*inside, *frames]:
        if places:
            file, line = places[-1]
            return f"{file}:{line}"
    return ""


def text(error: BaseException) -> str:
    """Returns the traceback from the user's first frame on, cut in the middle if it is long."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    each: traceback.TracebackException | None = shown
    while each is not None:
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if not _is_ours(frame.filename)])
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    whole = "".join(shown.format()).rstrip()
    half = MAX_CHARS // 2
    return whole if len(whole) <= MAX_CHARS else f"{whole[:half]}\n  ...\n{whole[-half:]}"


def summary(error: BaseException) -> str:
    """Returns the type and message of an error in one line."""
    try:
        message = " ".join(str(error)[:MAX_CHARS].split())
    except Exception:  # noqa: BLE001 - an exception of the user's, whose text may fail in any way
        message = "(its text cannot be made)"
    name = type(error).__name__
    return f"{name}: {message[:400]}" if message else name


def where_in_fault(dump: str, folders: Sequence[Path]) -> str:
    """Returns `file:line` of the innermost frame in one of the folders, from a dump of Python's fault handler."""
    for found in _FAULT_FRAME.finditer(dump):
        if _within(found["file"], folders):
            return f"{found['file']}:{found['line']}"
    return ""


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an error and those that it was raised from: the cancellation within a time-out has the user's frames."""
    found = [error]
    inner = error.__cause__ or error.__context__
    while inner is not None and inner not in found:
        found.append(inner)
        inner = inner.__cause__ or inner.__context__
    return found


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]


def _is_ours(file: str) -> bool:
    return file.startswith("<frozen importlib") or Path(file).parent == _OURS


def _within(file: str, folders: Sequence[Path]) -> bool:
    return not file.startswith("<") and any(Path(file).is_relative_to(folder) for folder in folders)
