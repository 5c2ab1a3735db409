"""Runs the red team against the walls of this machine: `make redteam`.

stderr has a line per attack that succeeded. The last line on stdout is one JSON object: for each wall, the attacks that
it held, the attacks that were run and the names of those that succeeded; or the reason why this machine lacks the wall.
The exit code is 1 if an attack succeeded behind a wall that is not known to (`known.py`), or one that is did not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from tentalis.agents.sandbox import NO_WALL, WALLS, Wall, wall_or_reason
from tentalis.agents.sandbox.no_wall import NoWall
from tests.redteam.report import PAGE, WallScore, page, score, write
from tests.support import ordinary_user

_HOURS = 3600.0
"""Seconds after which all attacks of an ordinary user have ended, or the machine is broken."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the attacks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make redteam", description=__doc__.splitlines()[0])
    parser.add_argument("--wall", action="append", choices=[*WALLS, NO_WALL], help="only this wall; may be repeated")
    parser.add_argument("--kind", action="append", default=[], help="only attacks of this kind; may be repeated")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, metavar="FILE", help=f"write {PAGE.name} or FILE")
    parser.add_argument("--ordinary-user", action="store_true", help="as root: run all as another user")
    options = parser.parse_args(arguments)
    if options.ordinary_user and os.geteuid() == 0:
        return _as_user([*(sys.argv[1:] if arguments is None else arguments)], options.write)
    scores: dict[str, WallScore] = {}
    missing: dict[str, str] = {}
    for name in options.wall or [*WALLS, NO_WALL]:
        found = NoWall() if name == NO_WALL else wall_or_reason(name)
        if isinstance(found, str):
            missing[name] = found
        else:
            scores[name] = scored(found, options.kind)
    if options.write:
        write(page(scores, missing), options.write)
    lines = {name: each.summary() for name, each in scores.items()}
    print(json.dumps(lines | {name: {"missing": reason} for name, reason in missing.items()}))
    return 1 if any(each.unexpected for each in scores.values()) else 0


def _as_user(arguments: list[str], page_file: Path | None) -> int:
    """Runs this command as an ordinary user, who may not write the page: it is copied."""
    if (reason := ordinary_user.why_not()) is not None:
        sys.exit(reason)
    with ordinary_user.home() as folder:
        own = folder / ordinary_user.TEMPORARY / "page.md"
        words = ["-m", "tests.redteam", *arguments, *(["--write", str(own)] if page_file else [])]
        done = ordinary_user.run_as_user(words, folder, _HOURS)
        sys.stdout.write(done.stdout)
        if page_file and own.exists():
            write(own.read_text(encoding="utf-8"), page_file)
    return done.returncode


def scored(wall: Wall, kinds: Collection[str] = ()) -> WallScore:
    """Runs attacks against a wall: those of some kinds, or all."""
    result = WallScore(wall.name)
    for name, result in score(wall, kinds):
        if found := result.achieved.get(name):
            print(f"{wall.name}: {name}: {'; '.join(found)}", file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
