"""Plays the faults and reports them: `make drill`.

stderr has a line per fault as it is played. The last line on stdout is one JSON object: the number of faults, and of
those that were silent (nobody named them), in a wrong state (another exit code or state than documented), stuck (the
way back of the page did not lead back) or lost something (problems that the verifier found, in all).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.drill.fault import FAULTS, Fault, Sight
from tests.drill.sites import SITES, Site
from tests.support import ROOT
from tests.support.transcript import commands_of, transcripts

PAGES = ROOT / "docs" / "operations"


@dataclass
class Result:
    """The result of playing a fault. Each finding is a description, empty if there is none."""

    fault: Fault
    seconds: float = 0.0
    seen: Sight = field(default_factory=Sight)
    silent: str = ""
    wrong_state: str = ""
    stuck: str = ""

    @property
    def sound(self) -> bool:
        return not (self.silent or self.wrong_state or self.stuck)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def compare(result: Result, seen: Sight) -> None:
    """Compares what was seen with what should be."""
    wanted = result.fault.sees
    result.seen = seen
    if " ".join(wanted.says.split()) not in " ".join(seen.says.split()):
        result.silent = f"nobody says {wanted.says!r}: {seen.says[-2000:]}"
    if (seen.code, seen.state) != (wanted.code, wanted.state):
        result.wrong_state = f"{seen.state or f'exit {seen.code}'} instead of {wanted.state or f'exit {wanted.code}'}"


def looks(fault: Fault) -> list[Path]:
    """Returns the runbooks that look at this fault: they have a transcript of its name, and are not its page."""
    runbooks = sorted((PAGES / "runbooks").glob("*.md"))
    return [page for page in runbooks if page != PAGES / fault.page and fault.name in transcripts(page)]


def play(fault: Fault, site: Site) -> Result:
    """Plays one fault: it breaks something, is seen and looked at by runbooks, is mended by its page, and everything
    works again."""
    result, began = Result(fault), time.monotonic()
    try:
        acts = fault.play(site)
        compare(result, next(acts))
        for runbook in looks(fault):
            site.shell.follow(commands_of(runbook, fault.name))
        site.shell.follow(commands_of(PAGES / fault.page, fault.name))
        if next(acts, None) is not None:
            raise AssertionError(f"{fault.name} yields twice")
    except Exception:  # noqa: BLE001 - reported; the next fault is played all the same
        result.stuck = traceback.format_exc()
    result.seconds = time.monotonic() - began
    return result


def play_site(name: str, faults: Sequence[Fault], folder: Path) -> tuple[list[Result], list[str]]:
    """Plays the faults of a site; the results, and what the verifier found at the end."""
    results: list[Result] = []
    folder.mkdir(parents=True)
    site = SITES[name](folder)
    try:
        say(f"{name}: {len(faults)} faults")
        site.open()
        for each in faults:
            results.append(result := play(each, site))
            say(f"{name}: {'ok  ' if result.sound else 'FAIL'} {result.seconds:5.1f} s  {each.name} ({each.page})")
            for problem in filter(None, (result.silent, result.wrong_state, result.stuck)):
                say(f"     {problem}")
        lost = site.lost()
        for problem in lost:
            say(f"{name}: LOST {problem}")
        return results, lost
    finally:
        site.close()


def play_all(faults: Sequence[Fault], folder: Path, jobs: int) -> tuple[list[Result], list[str]]:
    """Plays `jobs` sites at a time; the results in the order of the sites, and what the verifier found."""
    here = {name: [each for each in faults if each.site == name] for name in SITES}
    results: list[Result] = []
    lost: list[str] = []
    with ThreadPoolExecutor(jobs) as pool:
        played = [pool.submit(play_site, name, some, folder / name) for name, some in here.items() if some]
        for each in played:
            done, found = each.result()
            results += done
            lost += found
    return results, lost


def table(results: Sequence[Result], lost: Sequence[str], report: dict[str, int]) -> str:
    """The report as a page of docs/results."""
    rows = [
        f"| {one.fault.name} | {one.fault.sees.state or f'exit {one.fault.sees.code}'} | {one.fault.sees.says} "
        f"| [{one.fault.page}](../operations/{one.fault.page}) | {'ok' if one.sound else 'FAIL'} | {one.seconds:.0f} |"
        for one in results
    ]
    return "\n".join(
        [
            "# The drill",
            "",
            "The output of `make drill`: each fault was executed on a real broker, seen as the second and third column",
            "say, and mended with the commands of its page. At the end the verifier read the topics.",
            "",
            "| fault | is seen as | message has | way back | | seconds |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "```",
            json.dumps(report),
            "```",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", dest="part", default="", metavar="REGEX", help="only faults that it finds in SITE/NAME")
    parser.add_argument("--jobs", type=int, default=2, help="sites that are played at a time")
    parser.add_argument("--report", type=Path, help="file for the table")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    options = parser.parse_args()
    faults = [each for each in FAULTS.values() if re.search(options.part, f"{each.site}/{each.name}")]
    folder = Path(tempfile.mkdtemp(prefix="tentalis-drill-"))
    began = time.monotonic()
    results, lost = play_all(faults, folder, options.jobs)
    report = {
        "faults": len(results),
        "silent": sum(bool(one.silent) for one in results),
        "lost": len(lost),
        "stuck": sum(bool(one.stuck) for one in results),
        "wrong_state": sum(bool(one.wrong_state) for one in results),
    }
    sound = len(results) == len(faults) > 0 and not any(count for what, count in report.items() if what != "faults")
    say(f"{len(results)} faults in {time.monotonic() - began:.0f} s")
    if options.keep or not sound:
        say(f"logs and data are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if options.report:
        options.report.write_text(table(results, lost, report), encoding="utf-8")
    print(json.dumps(report))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
