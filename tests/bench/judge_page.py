"""The figures of judge models on the labelled messages on which the rules are silent, and the page that shows them."""

import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path

from tests.bench.signals_set import Case, cases, matrix, predicted, scores
from tests.support import ROOT

FOLDER = ROOT / "docs" / "results" / "judge"
_BARE = re.compile(r"(?<![\d.+−-])[+−-]?[01](?!\d|\.\d)")
_GRADES = {"-1": -1, "−1": -1, "0": 0, "1": 1, "+1": 1}


@dataclass(frozen=True)
class Verdict:
    """A judge's verdict of the case `id`. `said`: 1, 0 or -1, None if the product cannot read the answer. `text`: the
    end of the answer, None if none came in time."""

    id: str
    said: int | None
    text: str | None
    seconds: float

    @property
    def line(self) -> str:
        """The verdict as a line of its file."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @property
    def bare(self) -> int | None:
        """The verdict if a grade without a box counted: the last bare grade of the answer."""
        return self.said if self.said is not None else bare_grade(self.text or "")


def bare_grade(text: str) -> int | None:
    """Returns the last 1, 0 or -1 that stands alone in a text, None without one.

    >>> bare_grade("The grade is -1."), bare_grade("I give it a 1"), bare_grade("In 2010, 1.5 of 10")
    (-1, 1, None)
    """
    found = _BARE.findall(text)
    return _GRADES[found[-1]] if found else None


def read(path: Path) -> list[Verdict]:
    """The verdicts of a file, none if it does not exist."""
    if not path.exists():
        return []
    return [Verdict(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def by_chance(hits: int, said: int, labelled: int, n: int) -> float:
    """The probability that `said` messages drawn at random from `n`, of which `labelled` have the label, hold at least
    `hits` with it.

    >>> by_chance(0, 3, 2, 10), round(by_chance(2, 2, 2, 4), 3)
    (1.0, 0.167)
    """
    ways = sum(comb(labelled, k) * comb(n - labelled, said - k) for k in range(hits, min(said, labelled) + 1))
    return ways / comb(n, said)


def of_label(pairs: Sequence[tuple[int, int | None]], label: int) -> dict[str, float | None]:
    """Precision and recall of a label, the precision of chance, and the probability that chance finds as many."""
    hits = sum(one == other == label for one, other in pairs)
    said = sum(other == label for _, other in pairs)
    labelled = sum(one == label for one, _ in pairs)
    return {
        **scores(pairs, label),
        "said": said,
        "chance": round(labelled / len(pairs), 3),
        "p": float(f"{by_chance(hits, said, labelled, len(pairs)):.2g}"),
    }


def figures(path: Path) -> dict[str, object]:
    """The figures of the judge whose verdicts are in a file. `plus` and `minus`: of the messages that it judged, `with`
    those of all messages of the held half, with its verdict where the rules are silent and it has judged."""
    known = {case.id: case for case in cases() if case.kind == "next" and not case.seen}
    verdicts = read(path)
    found: dict[str, object] = {
        "model": path.stem,
        "n": len(verdicts),
        "read": sum(each.said is not None for each in verdicts),
        "bare": sum(each.bare is not None for each in verdicts),
        "no_answer": sum(each.text is None for each in verdicts),
        "seconds": statistics.median(each.seconds for each in verdicts) if verdicts else None,
    }
    if not verdicts:
        return found
    for name, said in (("read", {v.id: v.said for v in verdicts}), ("bare", {v.id: v.bare for v in verdicts})):
        pairs = [(int(known[id].label), grade) for id, grade in said.items()]
        both = together(list(known.values()), said)
        found |= {
            f"{name}_plus": of_label(pairs, 1),
            f"{name}_minus": of_label(pairs, -1),
            f"{name}_with": {"plus": scores(both, 1), "minus": scores(both, -1)},
        }
    return found


def together(held: Sequence[Case], said: dict[str, int | None]) -> list[tuple[int, int]]:
    """(label, grade) of each message: the rules' grade, and the judge's where they are silent."""
    return [(int(case.label), int(predicted(case)) or said.get(case.id) or 0) for case in held]


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _section(path: Path) -> str:
    found = figures(path)
    known = {case.id: case for case in cases()}
    held = [case for case in known.values() if case.kind == "next" and not case.seen]
    rules = [(int(case.label), int(predicted(case))) for case in held]
    lines = [
        f"## {path.stem}",
        "",
        f"{found['n']} messages judged, {found['seconds']} s each (median, several at a time). The product could read "
        f"{found['read']} answers. A grade without a box stood in {found['bare']}. {found['no_answer']} answers did "
        "not come within the time, or were cut off.",
        "",
        "| on the messages where the rules are silent | said | precision | by chance | recall | p |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in (("read", "as the product reads it"), ("bare", "if a bare grade counted")):
        for sign, label in (("plus", "+1"), ("minus", "-1")):
            row = found[f"{name}_{sign}"]
            assert isinstance(row, dict)
            cells = (row["said"], row["precision"], row["chance"], row["recall"], row["p"])
            lines.append(f"| {label}, {title} | " + " | ".join(map(_cell, cells)) + " |")
    lines += [
        "",
        "| all messages of the held half | precision +1 | recall +1 | precision -1 | recall -1 |",
        "|---|---|---|---|---|",
    ]
    rows: list[tuple[str, list[tuple[int, int]]]] = [("rules alone", rules)]
    verdicts = read(path)
    rows.append(("with the judge, as the product reads it", together(held, {v.id: v.said for v in verdicts})))
    rows.append(("with the judge, if a bare grade counted", together(held, {v.id: v.bare for v in verdicts})))
    for title, pairs in rows:
        plus, minus = scores(pairs, 1), scores(pairs, -1)
        four = (plus["precision"], plus["recall"], minus["precision"], minus["recall"])
        lines.append(f"| {title} | " + " | ".join(map(_cell, four)) + " |")
    lines += ["", "If a bare grade counted:", ""]
    lines += matrix((known[v.id].label, v.bare or 0) for v in verdicts)
    return "\n".join(lines)


PAGE = """# The bundled models as judges of the next message

Made by `make bench B=judge`; `BENCH_MODEL=qwen2.5-coder-1.5b` adds another model. The model is asked only where the
rules are silent, on the held half of the labelled messages ([signals](../../concepts/signals.md)), with the product's
prompt: one vote, temperature 0, at most {tokens} tokens of answer and {chars} characters of each text. Each file of
this folder has the verdicts of one model.

"By chance" is the precision of a judge that guesses: the label's share of these messages. p is the probability that as
many random guesses hold as many right ones or more (hypergeometric). "If a bare grade counted" reads the last 1, 0 or
-1 that stands alone where the box is missing; the product does not.

{sections}
"""


def write(tokens: int, chars: int) -> None:
    """Writes the page from the existing files."""
    sections = "\n\n".join(_section(path) for path in sorted(FOLDER.glob("*.jsonl")))
    (FOLDER / "README.md").write_text(PAGE.format(tokens=tokens, chars=chars, sections=sections), encoding="utf-8")
