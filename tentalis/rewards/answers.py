r"""Finds the final answer in a text, and compares answers: numbers exactly, LaTeX after normalisation.

An answer tag (`<answer>18</answer>`) holds the answer. Without one the last statement of an answer wins: `#### 18`,
`\boxed{18}`, "the answer is 18". Without such a statement, the last number of the text is its numeric answer.
"""

import re
from fractions import Fraction

_NUMBER = re.compile(
    r"""
    (?<![\w.])(?P<sign>[-−+]?)(?:(?:[$€£¥₹]|\\\$)\s?)?(?P<sign2>[-−]?)
    (?:
        \\[dt]?frac\{\s*(?P<ln>-?\d+)\s*\}\{\s*(?P<ld>\d+)\s*\}
      | (?P<whole>\d+)\s+(?P<mn>\d+)/(?P<md>\d+)(?![\d/])
      | (?P<n>\d{1,3}(?:,\d{3})+(?!\d)|\d+)\s?/\s?(?P<d>\d+)(?![\d/])
      | (?P<plain>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?P<exp>[eE][-+]?\d{1,3}(?!\w))?
    )
    """,
    re.VERBOSE,
)
_STATED = re.compile(r"(?:final\s+)?answer\s*(?:is|are|was|:|=|\bto\b[^.:=\n]{0,80}?\bis\b)\s*:?\s*", re.IGNORECASE)
_HASHES = re.compile(r"####\s*(.*)")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BRACE = re.compile(r"(?<!\\)[{}]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?=[^\s{])")

TOLERANCE = Fraction(1, 10**6)
MAX_CHARS = 65_536
"""Only the last characters of a longer text are read: an answer ends with its result."""
MAX_LATEX_CHARS = 1000
"""A longer LaTeX answer equals only a reference with the same characters."""
_MAX_DIGITS = 4000


def _value(match: re.Match[str]) -> Fraction | None:
    part = match.groupdict()
    if match.end() - match.start() > _MAX_DIGITS:
        return None
    negative = (part["sign"] in ("-", "−")) != bool(part["sign2"])
    try:
        if part["ld"] is not None:
            value = Fraction(int(part["ln"]), int(part["ld"]))
        elif part["md"] is not None:
            value = int(part["whole"]) + Fraction(int(part["mn"]), int(part["md"]))
        elif part["d"] is not None:
            value = Fraction(int(part["n"].replace(",", "")), int(part["d"]))
        else:
            value = Fraction(part["plain"].replace(",", "") + (part["exp"] or ""))
    except ZeroDivisionError:
        return None
    return -value if negative else value


def last_number(text: str) -> Fraction | None:
    r"""Returns the last number in a text: currency, thousands separators, decimals, exponents, `3/4`, `\frac{3}{4}`.

    >>> [str(last_number(t)) for t in ("7 or $1,234.50.", "1 1/2 cups", "it is -\\frac{3}{4}", "minutes: 10-3")]
    ['2469/2', '3/2', '-3/4', '3']
    """
    matches = list(_NUMBER.finditer(_tidied(text)))
    return next((value for match in reversed(matches) if (value := _value(match)) is not None), None)


def first_number(text: str) -> Fraction | None:
    """Returns the first number in a text."""
    return next((value for match in _NUMBER.finditer(_tidied(text)) if (value := _value(match)) is not None), None)


def _tidied(text: str) -> str:
    # A range or a difference ("10-3") is two numbers, not one and a negative one.
    text = text[-MAX_CHARS:].replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    return re.sub(r"(?<=\d)\s?([-–−])\s?(?=[\d$])", r" \1 ", text)


def boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}`, with nested braces; None if no box is closed.

    >>> boxed(r"so \boxed{1} or rather \boxed{\frac{1}{\sqrt{2}}}.")
    '\\frac{1}{\\sqrt{2}}'
    """
    text = text[-MAX_CHARS:]
    closing = _closing_braces(text)
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if text[start] != "{":  # \boxed 3
            return text[start:].split(maxsplit=1)[0].rstrip(".,;$")
        if start in closing:
            return text[start + 1 : closing[start]].strip()
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """The position of the closing brace of each opening brace that is closed. Braces after a backslash do not count."""
    closing, opened = dict[int, int](), list[int]()
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing


def stated_answer(text: str) -> str | None:
    """Returns the answer that the text states: in its answer tag (`tagged_answer`) if it has one, so that nothing
    outside the tag counts. The last statement wins, to the end of its line. Empty if the tag or the box is; None
    without a statement."""
    tagged = tagged_answer(text)
    inside = text if tagged is None else tagged
    statement = _last_statement(inside[-MAX_CHARS:])
    return tagged if statement is None else statement[1]


def latex_answer(text: str) -> str | None:
    r"""Returns the LaTeX answer of a text: in its answer tag (`tagged_answer`) if it has one, so that no box in a step
    counts. It is the last box, else the answer that is stated, else all that is in the tag. None without one.

    >>> [latex_answer(text) for text in (r"<step>\boxed{41}</step><answer>42</answer>", r"so \boxed{42}", "7")]
    ['42', '42', None]
    """
    tagged = tagged_answer(text)
    return boxed(text if tagged is None else tagged) or stated_answer(text)


def tagged_answer(text: str) -> str | None:
    """Returns what the last answer tag holds. One that is not closed holds the text up to the next tag, and counts if
    no closed one holds anything. Empty if none does; None without an opening tag.

    >>> [tagged_answer(text) for text in ("<answer>1</answer> <answer>2", "<answer>2<answer>", "<answer></answer>")]
    ['1', '2', '']
    >>> [tagged_answer(text) for text in ("2", "2</answer>")]
    [None, None]
    """
    text = text[-MAX_CHARS:]
    closed, unclosed, opened, any_opened = "", "", None, False
    for tag in _TAG.finditer(text):
        held = "" if opened is None else text[opened : tag.start()].strip()
        if tag.group(1):
            closed, opened = held or closed, None
        else:
            unclosed, opened, any_opened = held or unclosed, tag.end(), True
    if opened is not None:
        unclosed = text[opened:].strip() or unclosed
    return closed or unclosed if any_opened else None


def _last_statement(text: str) -> tuple[int, str] | None:
    """Returns the place of the last statement of an answer, and the answer."""
    found = [(match.start(), match.group(1).strip()) for match in _HASHES.finditer(text) if match.group(1).strip()]
    for match in _STATED.finditer(text):
        end = text.find("\n", match.end())
        rest = text[match.end() : end if end >= 0 else len(text)].strip()
        if rest:
            found.append((match.start(), rest))
    in_box = boxed(text)
    if in_box is not None:
        found.append((max(text.rfind("\\boxed"), text.rfind("\\fbox")), in_box))
    return max(found, key=lambda statement: statement[0]) if found else None


def final_number(text: str) -> Fraction | None:
    """Returns the final number of a text: the one that it states as its answer, else the last one from there on; the
    last one where it states nothing. Of a text with an answer tag only the tag counts. None without a number.

    >>> str(final_number("The answer is $1,200. She has 3 cats.")), str(final_number("6 * 3 = 18 eggs"))
    ('1200', '18')
    >>> final_number("<step>6 * 3 = 18</step><answer>none</answer>")
    """
    tagged = tagged_answer(text)
    text = (text if tagged is None else tagged)[-MAX_CHARS:]
    statement = _last_statement(text)
    if statement is None:
        return last_number(text)
    place, stated = statement
    # "the answer is 6 * 3 = 18 eggs": after the last equals sign; "18 eggs for 4 people": the first number there.
    value = first_number(stated.rpartition("=")[2])
    return last_number(text[place:]) if value is None else value


def same_number(value: Fraction, reference: Fraction, decimals: int | None = None) -> bool:
    """Returns True if a number equals the reference.

    The tolerance is 1e-6, and relative for large references. A reference without a finite decimal expansion (1/3) also
    equals its rounding to `decimals` places, if these are two or more.
    """
    if abs(value - reference) <= TOLERANCE * max(Fraction(1), abs(reference) / 1000):
        return True
    if decimals is None or decimals < 2 or _terminates(reference):
        return False
    return abs(value - reference) <= Fraction(1, 2 * 10**decimals)


def decimals_of(value: Fraction) -> int | None:
    """Returns the decimal places of a number, None if its decimal expansion is infinite."""
    if not _terminates(value):
        return None
    places = 0
    while value.denominator != 1:
        value, places = value * 10, places + 1
    return places


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


_LATEX_NOISE = re.compile(r"\\(?:left|right|displaystyle|[,!;: ])|(?<!\\)\$|\\\$|\^\{?\\circ\}?|\\degree|\\?%|\s+")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|textrm)\{([^{}]*)\}")
_SHORT_FRAC = re.compile(r"\\frac(\d|[a-zA-Z])(\d|[a-zA-Z])")
_HALF_FRAC = re.compile(r"\\frac(\d|[a-zA-Z])(?=\{)")
_SHORT_SQRT = re.compile(r"\\sqrt(\d|[a-zA-Z])")
_UNITS = re.compile(r"(?<=\d)\s*\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?$")
_SLASH = re.compile(r"^(-?)(\d+)/(\d+)$")
_NUMERIC = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?|-?\\frac\{-?\d+\}\{\d+\}")


def normalised(latex: str) -> str:
    r"""Returns a LaTeX answer in normal form: without spaces, sizes and units; `\dfrac` and `\frac12` rewritten.

    >>> normalised(r"\dfrac12 "), normalised(r"\left( 3, \tfrac{\pi}{2} \right)"), normalised(r"x = 5\text{ cm}")
    ('\\frac{1}{2}', '(3,\\frac{\\pi}{2})', '5')
    """
    text = latex.strip().rstrip(".").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("−", "-")
    text = _UNITS.sub("", text)
    text = _TEXT.sub(lambda match: match.group(1), text)
    text = _LATEX_NOISE.sub("", text)
    text = re.sub(r"^[a-zA-Z]=(?=.)", "", text)
    text = _HALF_FRAC.sub(r"\\frac{\1}", _SHORT_FRAC.sub(r"\\frac{\1}{\2}", text))
    text = _SHORT_SQRT.sub(r"\\sqrt{\1}", text)
    text = _SLASH.sub(r"\1\\frac{\2}{\3}", text)
    return text if "\\" in text else text.lower()


def same_latex(answer: str, reference: str) -> bool:
    """Returns True if two LaTeX answers are equal after normalisation, or as numbers.

    Tuples, intervals and lists are compared element by element. Algebra is not simplified.
    """
    if max(len(answer), len(reference)) > MAX_LATEX_CHARS:
        return answer.strip() == reference.strip()
    a, b = normalised(answer), normalised(reference)
    if a == b:
        return True
    if _is_numeric(a) and _is_numeric(b):
        x, y = last_number(a), last_number(b)
        return x is not None and y is not None and same_number(x, y, decimals_of(x))
    left, right = _elements(a), _elements(b)
    if len(left) != len(right) or len(left) < 2 or _brackets(a) != _brackets(b):
        return False
    return all(same_latex(x, y) for x, y in zip(left, right, strict=True))


def _brackets(text: str) -> str:
    return text[0] + text[-1] if text[0] in "([" and text[-1] in ")]" else ""


def _is_numeric(text: str) -> bool:
    return bool(text) and any(c.isdigit() for c in text) and _NUMERIC.fullmatch(text) is not None


def _elements(text: str) -> list[str]:
    if text[:1] in "([" and text[-1:] in ")]":
        text = text[1:-1]
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
