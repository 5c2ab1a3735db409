"""Precision and recall of the rules for next messages, hints and side calls, on messages that others wrote.

BENCH_HALF (held): the half of the set that is reported: held, seen or all. Detectors may be mended by `seen` only.
BENCH_SHOW=1 prints each case that the rules get wrong, of the half `seen` only.
`make bench B=judge` measures a model on the messages on which the rules are silent.
"""

import os
import sys

from tests.bench.lab import log, report
from tests.bench.signals_set import Case, cases, gives_hint, kappa, matrix, predicted, scores, second_labels


def figures(of: list[Case]) -> dict[str, object]:
    """The figures of some cases, as the last line has them."""
    said = [(case.label, predicted(case)) for case in of if case.kind == "next"]
    calls = [(case.label, predicted(case)) for case in of if case.kind == "call"]
    hints = [(case.row["hint"], gives_hint(case)) for case in of if case.kind == "next"]
    return {
        "plus": scores(said, 1),
        "minus": scores(said, -1),
        "side": scores(calls, "side"),
        "hint": scores(hints, True),
        "n": len(of),
    }


def labellers(messages: list[Case]) -> dict[str, float]:
    """The agreement of the two labellers on the messages that both have labelled."""
    second = second_labels()
    pairs = [(case.label, second[case.id]) for case in messages if case.id in second]
    return {"n": len(pairs), "agree": sum(one == other for one, other in pairs), "kappa": round(kappa(pairs), 3)}


def main() -> None:
    half = os.environ.get("BENCH_HALF", "held")
    if half not in ("held", "seen", "all"):
        sys.exit(f"BENCH_HALF={half}: held, seen or all")
    chosen = [case for case in cases() if half == "all" or case.seen == (half == "seen")]
    messages = [case for case in chosen if case.kind == "next"]
    for line in matrix((case.label, predicted(case)) for case in messages):
        log(line)
    groups = {f"{case.lang} {case.origin}" for case in messages}
    for group in sorted(groups):
        of = [case for case in messages if f"{case.lang} {case.origin}" == group]
        said = [(case.label, predicted(case)) for case in of]
        log(f"{group:16} n {len(of):3}  +1 {scores(said, 1)}  -1 {scores(said, -1)}")
    if os.environ.get("BENCH_SHOW"):
        for case in chosen:
            if case.seen and predicted(case) != case.label:
                text = case.row["next"] if case.kind == "next" else case.row["request"]["messages"][-1]["content"]
                log(f"{case.id}: labelled {case.label}, said {predicted(case)}: {' '.join(text.split())[:160]}")
    everything = [case for case in cases() if case.kind == "next"]
    report(**figures(chosen), labellers=labellers(everything))


if __name__ == "__main__":
    main()
