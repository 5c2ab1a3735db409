"""Makes the edits of a turn: a program that runs behind the agent's wall.

Reads JSON from its input: `edits`, a list of `path`, `search` and `replace`, in order. A search text must be in the
file once; an empty one makes a new file. Writes a line for each edit, and ends with 1 if one was not made.
"""

import json
import os
import sys
from pathlib import Path


def edited(path: str, search: str, replace: str) -> str:
    """Makes one edit. Returns the reason why it cannot be made, or an empty text."""
    if not search:
        if os.path.lexists(path):
            return "the file exists: an empty SEARCH makes a new file"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            file.write(replace)
        return ""
    with Path(path).open(encoding="utf-8", newline="") as file:
        text = file.read()
    found = text.count(search)
    if found != 1:
        return f"the SEARCH text is in the file {found} times: it must be there once, with all its spaces"
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        file.write(text.replace(search, replace))
    return ""


def main() -> int:
    """Makes all edits. Returns 1 if one was not made."""
    failed = 0
    for edit in json.load(sys.stdin)["edits"]:
        try:
            reason = edited(edit["path"], edit["search"], edit["replace"])
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "strerror", None) or error)
        failed += bool(reason)
        print(f"{edit['path']}: {reason or 'edited'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
