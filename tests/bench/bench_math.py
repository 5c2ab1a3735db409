"""Agreement of the verifiers `math` and `math_verify` on the reference answers of MATH, written in other forms.

BENCH_MATH (required): a JSON-lines file with an `answer` per line, such as MATH-500. Each form rewrites the answers to
which it applies, to an equal answer or to a different one.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from schemas.records import Verifier
from tentalis.rewards.functions.errors import FunctionError
from tentalis.rewards.math_verify import MathVerifyVerifier
from tentalis.rewards.mathematics import BoxedMathVerifier
from tests.bench.lab import log, report
from tests.support.stream_records import make_result, make_task

_FRAC = re.compile(r"\\d?frac\{(\d+)\}\{(\d+)\}")
_ROOT = re.compile(r"(?<![\d}])(\d*)\s?\\sqrt\{(\d+)\}")
_SUM = re.compile(r"([\w^]+(?:\\(?:pi|sqrt\{\d+\}))?)\s?\+\s?([\w^]+(?:\\(?:pi|sqrt\{\d+\}))?)")
_PRODUCT = re.compile(r"(\([^(),]+\))(\([^(),]+\))")
_INTEGER = re.compile(r"-?\d+")
_PAIR = re.compile(r"(?:\\left)?\(\s*([^(),]+),\s*([^(),]+?)\s*(?:\\right)?\)")

Form = Callable[[str], str | None]


def everywhere(pattern: re.Pattern[str], rewrite: Callable[[re.Match[str]], str | None]) -> Form:
    """Returns a form for answers that match the pattern as a whole; it gives None for the others."""

    def form(answer: str) -> str | None:
        found = pattern.fullmatch(answer)
        return None if found is None else rewrite(found)

    return form


def _decimal(match: re.Match[str]) -> str | None:
    value = Fraction(int(match[1]), int(match[2]))
    text = f"{float(value):.6f}".rstrip("0")
    return text if Fraction(text) == value else None


def _other_pair(match: re.Match[str]) -> str | None:
    return None if match[1].strip() == match[2].strip() else f"({match[2]},{match[1]})"


EQUAL: dict[str, Form] = {
    "as it is": lambda answer: answer,
    "a/b": everywhere(_FRAC, lambda m: f"{m[1]}/{m[2]}"),
    "a fraction as a decimal": everywhere(_FRAC, _decimal),
    "a fraction not reduced": everywhere(_FRAC, lambda m: rf"\frac{{{3 * int(m[1])}}}{{{3 * int(m[2])}}}"),
    "an integer as a fraction": everywhere(_INTEGER, lambda m: rf"\frac{{{2 * int(m[0])}}}{{2}}"),
    "an integer as a sum": everywhere(_INTEGER, lambda m: f"{int(m[0]) - 3}+3"),
    "a root not reduced": everywhere(_ROOT, lambda m: rf"\sqrt{{{int(m[1] or 1) ** 2 * int(m[2])}}}" if m[1] else None),
    "a sum in another order": everywhere(_SUM, lambda m: f"{m[2]}+{m[1]}"),
    "a product in another order": everywhere(_PRODUCT, lambda m: f"{m[2]}{m[1]}"),
}
DIFFERENT: dict[str, Form] = {
    "an integer plus one": everywhere(_INTEGER, lambda m: str(int(m[0]) + 1)),
    "a fraction upside down": everywhere(_FRAC, lambda m: rf"\frac{{{m[2]}}}{{{m[1]}}}" if m[1] != m[2] else None),
    "another root": everywhere(_ROOT, lambda m: rf"{m[1]}\sqrt{{{int(m[2]) + 1}}}"),
    "a pair in another order": everywhere(_PAIR, _other_pair),
    "a sum as a difference": everywhere(_SUM, lambda m: f"{m[1]}-{m[2]}"),
}


def main() -> None:
    path = os.environ.get("BENCH_MATH") or sys.exit("set BENCH_MATH to a JSON-lines file with an `answer` per line")
    answers = [json.loads(line)["answer"] for line in Path(path).read_text("utf-8").splitlines()]
    rule, library = BoxedMathVerifier(), MathVerifyVerifier()
    seconds: list[float] = []

    def right(scorer: BoxedMathVerifier | MathVerifyVerifier, answer: str, reference: str) -> bool | None:
        task = make_task(environment="math", verifier=Verifier(name="math", data=json.dumps({"answer": reference})))
        begun = time.monotonic()
        try:
            reward = scorer.verify(task, make_result(task, text=rf"\boxed{{{answer}}}")).reward
        except FunctionError as error:
            log(f"unknown: {error}")
            return None
        if scorer is library:
            seconds.append(time.monotonic() - begun)
        return None if reward is None else reward == 1.0

    right(library, "x+1", "1+x")  # starts the process
    seconds.clear()
    figures = {}
    for equal, forms in ((True, EQUAL), (False, DIFFERENT)):
        for name, form in forms.items():
            pairs = [(new, answer) for answer in answers if (new := form(answer)) is not None]
            found = [(right(rule, *pair), right(library, *pair), pair) for pair in pairs]
            figures[name] = {
                "equal": equal,
                "n": len(pairs),
                "math": sum(ours is equal for ours, _, _ in found),
                "math_verify": sum(theirs is equal for _, theirs, _ in found),
            }
            log(f"{name}: {figures[name]}")
            for _, theirs, pair in found:
                if theirs is not equal:
                    log(f"  math_verify says {theirs}: {pair[0]!r} for {pair[1]!r}")
    library.close()
    seconds.sort()
    report(
        forms=figures,
        name=library.name,
        p50_ms=round(1000 * seconds[len(seconds) // 2], 2),
        max_s=round(seconds[-1], 2),
    )


if __name__ == "__main__":
    main()
