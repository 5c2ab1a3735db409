"""Runs the whole set against the walls of this machine, and writes the page of the results."""

import os
import platform
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tentalis.agents.sandbox import NO_WALL, Wall
from tests.redteam.attack import Attack
from tests.redteam.episodes import CHEATS, KIND, reward_of
from tests.redteam.files import FILES
from tests.redteam.graders import OUTPUTS
from tests.redteam.known import is_expected, known
from tests.redteam.network import NETWORK
from tests.redteam.processes import PROCESSES
from tests.redteam.resources import RESOURCES
from tests.redteam.secrets import SECRETS
from tests.redteam.trial import successes
from tests.support import ROOT

ATTACKS: tuple[Attack, ...] = (*SECRETS, *FILES, *PROCESSES, *NETWORK, *RESOURCES, *OUTPUTS)
PAGE = ROOT / "docs" / "results" / "walls.md"
EPISODES_NEED_A_WALL = "the environment refuses to run without a wall"


@dataclass
class WallScore:
    """The score of a wall: attacks by their id, with what they achieved (empty: the wall held), and those not run."""

    wall: str
    achieved: dict[str, list[str]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """The ids of the attacks that succeeded."""
        return [name for name, found in self.achieved.items() if found]

    @property
    def unexpected(self) -> list[str]:
        """The ids of the attacks that succeeded and are not known to, and of those that are known to and did not."""
        if self.wall == NO_WALL:
            return []
        return [
            name for name, found in self.achieved.items() if not is_expected(self.wall, name, succeeded=bool(found))
        ]

    def summary(self) -> dict[str, object]:
        """Returns the score as the command prints it."""
        held = len(self.achieved) - len(self.failed)
        return {
            "wall": self.wall,
            "held": held,
            "of": len(self.achieved),
            "failed": self.failed,
            "unexpected": self.unexpected,
        }


def score(wall: Wall, kinds: Collection[str] = ()) -> Iterator[tuple[str, WallScore]]:
    """Runs attacks against a wall: those of some kinds, or all. Yields the id of each and the score so far."""
    scored, walled = WallScore(wall.name), wall.name != NO_WALL
    for attack in ATTACKS:
        if kinds and attack.kind not in kinds:
            continue
        if attack.harms and not walled:
            scored.not_run[attack.id] = attack.harms
        else:
            scored.achieved[attack.id] = successes(attack, wall)
        yield attack.id, scored
    for cheat in CHEATS if not kinds or KIND in kinds else ():
        name = f"{KIND}: {cheat}"
        if walled:
            scored.achieved[name] = [f"reward {found}"] if (found := reward_of(cheat, wall)) > 0 else []
        else:
            scored.not_run[name] = EPISODES_NEED_A_WALL
        yield name, scored


def page(scores: Mapping[str, WallScore], missing: Mapping[str, str]) -> str:
    """Returns the page of results."""
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    lines = [
        "# Walls: the score of the red team",
        "",
        "`make redteam ARGS='--ordinary-user --write'` writes this page. It runs each attack of `tests/redteam/` against each wall",
        f"of the machine ([walls](../concepts/environments.md#walls)). This run: Linux {platform.release().partition('-')[0]},",
        f"Python {platform.python_version()}, as {user}.",
        "",
        "An attack is code that a model could write. *Held*: it did not get what it wanted, and everything beside its folder is as",
        "before. The wall `none` shows which attacks succeed without one; those that would harm the machine are not run there.",
        "Results of disk, memory and fork bombs vary with the speed and the load of the machine.",
        "",
        "| wall | held | of | succeeded | not run |",
        "|---|---|---|---|---|",
    ]
    for each in scores.values():
        counts = (len(each.achieved) - len(each.failed), len(each.achieved), len(each.failed), len(each.not_run))
        lines.append(f"| {each.wall} | {' | '.join(map(str, counts))} |")
    lines += [f"| {name} | not on this machine: {reason} | | | |" for name, reason in missing.items()]
    lines += [
        "",
        "## Known successes",
        "",
        "`make redteam` fails if another attack succeeds, and if one of these no longer does (`tests/redteam/known.py`), unless it",
        "depends on the speed of the machine.",
        "",
        "| wall | attack | why it is accepted |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {attack} | {reason} |" for name in scores for attack, reason in known(name).items()]
    lines += [
        "",
        "## Each attack",
        "",
        f"| attack | success | {' | '.join(scores)} |",
        f"|---|---|{'---|' * len(scores)}",
    ]
    wanted = {attack.id: attack.success for attack in ATTACKS}
    wanted |= {f"{KIND}: {cheat}": "an unsolved task is rewarded" for cheat in CHEATS}
    for name, success in wanted.items():
        results = (_result(each, name) for each in scores.values())
        lines.append(f"| {name} | {success} | {' | '.join(results)} |")
    return "\n".join([*lines, ""])


def _result(scored: WallScore, name: str) -> str:
    if name in scored.not_run:
        return "not run"
    return "**succeeded**" if scored.achieved[name] else "held"


def write(text: str, path: Path) -> None:
    """Writes the page."""
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
