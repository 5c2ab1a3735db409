"""The labelled next messages and calls of `tests/golden/next_messages.jsonl`, and what the product says of them."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from schemas.records import Message
from tentalis.gateway.calls.housekeeping import side_sign
from tentalis.opd.hints import rule_hint
from tentalis.signals import TOOL_ROLES, AnsweredTurn, detect, event_of, shows_success
from tentalis.signals.phrases import correction
from tentalis.signals.spoken import spoken
from tests.support import ROOT

PATH = ROOT / "tests" / "golden" / "next_messages.jsonl"
SECOND = ROOT / "tests" / "golden" / "next_messages_second.json"
LABELS = (1, 0, -1)


@dataclass(frozen=True)
class Case:
    """A labelled next message (`label` 1, 0 or -1, `hint`) or a labelled call (`label` "main" or "side")."""

    kind: str
    id: str
    base: str
    lang: str
    label: Any
    row: dict[str, Any]

    @property
    def seen(self) -> bool:
        """True for the half by which detectors may be mended. Translations of a message are in the same half."""
        return hashlib.sha256(self.base.encode()).digest()[0] % 2 == 0

    @property
    def origin(self) -> str:
        """`tool`, `translated`, `corpus` (utterances of a chat-bot corpus), `written` (for this set) or `dialogue`."""
        if self.row.get("role") == "tool":
            return "tool"
        if self.row["source"].startswith("written for this set"):
            return "written"
        if "translated" in self.row["source"]:
            return "translated"
        return "corpus" if "nlp.js" in self.row["source"] else "dialogue"


def cases() -> list[Case]:
    """All cases, in the order of the file."""
    rows = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
    return [Case(row["kind"], row["id"], row["base"], row["lang"], row["label"], row) for row in rows]


def second_labels() -> dict[str, int]:
    """The second labeller's labels of a sample of the next messages, by the id of the case."""
    found: dict[str, int] = json.loads(SECOND.read_text(encoding="utf-8"))
    return found


def predicted(case: Case) -> int | str:
    """What the rules say: 1, 0 or -1 of a next message, "main" or "side" of a call."""
    row = case.row
    if case.kind == "call":
        messages = [Message(role=m["role"], content=m["content"]) for m in row["request"]["messages"]]
        return "side" if side_sign(messages, row["request"]) else "main"
    event = event_of(row["role"], row["next"])
    assert event is not None
    if detect(AnsweredTurn(row["question"], row["answer"]), event):
        return -1
    return 1 if shows_success(event) else 0


def gives_hint(case: Case) -> bool:
    """True if the rule hinter makes a hint of a next message."""
    row = case.row
    if row["role"] in TOOL_ROLES or correction(row["next"]) is None:
        return False
    return rule_hint(spoken(row["next"])) is not None


def share(right: int, of: int) -> float | None:
    """A share, rounded; None of nothing."""
    return round(right / of, 3) if of else None


def scores(pairs: Iterable[tuple[Any, Any]], positive: Any) -> dict[str, float | None]:
    """Precision and recall of one label in (label, predicted) pairs."""
    pairs = list(pairs)
    hit = sum(label == said == positive for label, said in pairs)
    return {
        "precision": share(hit, sum(said == positive for _, said in pairs)),
        "recall": share(hit, sum(label == positive for label, _ in pairs)),
    }


def matrix(pairs: Iterable[tuple[Any, Any]]) -> list[str]:
    """Rows of the confusion matrix, as lines of a table."""
    counts = Counter(pairs)
    lines = ["| labelled | +1 | unknown | -1 |", "|---|---|---|---|"]
    for label, name in zip(LABELS, ("+1", "unknown", "-1"), strict=True):
        lines.append(f"| {name} | " + " | ".join(str(counts[label, said]) for said in LABELS) + " |")
    return lines


def kappa(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Cohen's kappa of two labellers: their agreement beyond chance, as a share of what chance leaves.

    >>> kappa([(1, 1), (0, 0), (1, 0), (0, 1)])
    0.0
    """
    pairs = list(pairs)
    first, second = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    agreed: float = sum(one == other for one, other in pairs) / len(pairs)
    chance: float = sum(first[label] * second[label] for label in first) / len(pairs) ** 2
    return (agreed - chance) / (1 - chance)
