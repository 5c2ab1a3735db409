"""Runs the red team against the walls of this machine: `make redteam`.

stderr has a line per attack that succeeded. The last line on stdout is one JSON object: for each wall, the attacks that
it held, the attacks that were run and the names of those that succeeded; or the reason why this machine lacks the wall.
The exit code is 1 if an attack succeeded behind a wall.
"""

from __future__ import annotations

import argparse
import json
import sys

from tentalis.agents.sandbox import NO_WALL, WALLS, Wall, wall_or_reason
from tentalis.agents.sandbox.no_wall import NoWall
from tests.redteam.report import WallScore, page, score, write


def main() -> int:
    """Runs the attacks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make redteam", description=__doc__.splitlines()[0])
    parser.add_argument("--wall", action="append", choices=[*WALLS, NO_WALL], help="only this wall; may be repeated")
    parser.add_argument("--write", action="store_true", help="write docs/results/walls.md")
    options = parser.parse_args()
    scores: dict[str, WallScore] = {}
    missing: dict[str, str] = {}
    for name in options.wall or [*WALLS, NO_WALL]:
        found = NoWall() if name == NO_WALL else wall_or_reason(name)
        if isinstance(found, str):
            missing[name] = found
        else:
            scores[name] = scored(found)
    if options.write:
        write(page(scores, missing))
    lines = {name: each.summary() for name, each in scores.items()}
    print(json.dumps(lines | {name: {"missing": reason} for name, reason in missing.items()}))
    return 1 if any(each.failed for name, each in scores.items() if name != NO_WALL) else 0


def scored(wall: Wall) -> WallScore:
    """Runs all attacks against a wall."""
    result = WallScore(wall.name)
    for name, result in score(wall):
        if found := result.achieved.get(name):
            print(f"{wall.name}: {name}: {'; '.join(found)}", file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
