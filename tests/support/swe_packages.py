"""Ten small packages, each with a defect: the repositories of the instances in `swe_tasks`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """`module`: the corrected source. `right` in it is `wrong` in the base commit. `shown`: tests of the base commit;
    `hidden`: tests that the correction adds."""

    name: str
    issue: str
    module: str
    right: str
    wrong: str
    shown: str
    hidden: str

    @property
    def defective(self) -> str:
        """The source of the base commit."""
        assert self.module.count(self.right) == 1
        return self.module.replace(self.right, self.wrong)


PACKAGES = (
    Package(
        "roman",
        "to_roman(4) gives IIII, and it should be IV. The same for 9, 40, 90, 400 and 900.",
        '''"""Roman numerals."""

VALUES = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)


def to_roman(number):
    """Returns a number from 1 to 3999 as a Roman numeral."""
    if not 1 <= number <= 3999:
        raise ValueError(f"no Roman numeral for {number}")
    text = ""
    for value, letters in VALUES:
        while number >= value:
            text += letters
            number -= value
    return text
''',
        """    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"),
    (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
""",
        """    (1000, "M"), (500, "D"), (100, "C"), (50, "L"), (10, "X"), (5, "V"), (1, "I"),
""",
        """def test_sums():
    assert to_roman(3) == "III" and to_roman(1666) == "MDCLXVI"


def test_range():
    with pytest.raises(ValueError):
        to_roman(0)
""",
        """@pytest.mark.parametrize(("number", "text"), [(4, "IV"), (90, "XC"), (1994, "MCMXCIV")])
def test_differences(number, text):
    assert to_roman(number) == text
""",
    ),
    Package(
        "slugs",
        "slugify('a -- b') gives 'a----b'. Several separators in a row should be one dash, and none at the ends.",
        '''"""Texts for addresses."""

import re


def slugify(text):
    """Returns a text in small letters with dashes in the place of everything else."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
''',
        """re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")""",
        """re.sub(r"[^a-z0-9]", "-", text.lower())""",
        """def test_words():
    assert slugify("Two Words") == "two-words"
""",
        """def test_several_separators():
    assert slugify("a -- b") == "a-b"


def test_ends():
    assert slugify(" (a) ") == "a"
""",
    ),
    Package(
        "intervals",
        "merge([(1, 2), (2, 3)]) should be [(1, 3)]: intervals that touch are one.",
        '''"""Closed intervals."""


def merge(intervals):
    """Returns intervals in order, without overlaps."""
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
''',
        "begin <= merged[-1][1]",
        "begin < merged[-1][1]",
        """def test_overlap():
    assert merge([(4, 6), (1, 5)]) == [(1, 6)]


def test_inside():
    assert merge([(1, 9), (2, 3)]) == [(1, 9)]
""",
        """def test_touching():
    assert merge([(1, 2), (2, 3), (5, 6)]) == [(1, 3), (5, 6)]
""",
    ),
    Package(
        "recent",
        "A cache of the class Recent drops an entry that was just read. Reading must count as use.",
        '''"""A cache of a few entries."""

from collections import OrderedDict


class Recent:
    """Keeps the entries that were used last."""

    def __init__(self, size):
        self.size = size
        self.entries = OrderedDict()

    def get(self, key, default=None):
        """Returns an entry, which is a use of it."""
        if key not in self.entries:
            return default
        self.entries.move_to_end(key)
        return self.entries[key]

    def put(self, key, value):
        """Adds an entry, and drops the one that was used longest ago."""
        self.entries[key] = value
        self.entries.move_to_end(key)
        if len(self.entries) > self.size:
            self.entries.popitem(last=False)
''',
        """        self.entries.move_to_end(key)
        return""",
        """        return""",
        """def test_size():
    cache = Recent(2)
    for each in "abc":
        cache.put(each, each)
    assert cache.get("a") is None and cache.get("c") == "c"
""",
        """def test_reading_is_a_use():
    cache = Recent(2)
    cache.put("a", 1)
    cache.put("b", 2)
    assert cache.get("a") == 1
    cache.put("c", 3)
    assert cache.get("a") == 1 and cache.get("b") is None
""",
    ),
    Package(
        "rows",
        "split_row loses quotation marks: a doubled mark in a quoted field stands for one mark.",
        '''"""Rows of comma-separated values."""


def split_row(line):
    """Returns the fields of a row; a field in quotation marks may have commas and doubled marks."""
    fields, field, quoted, at = [], "", False, 0
    while at < len(line):
        sign = line[at]
        if quoted and line[at : at + 2] == '""':
            field += '"'
            at += 1
        elif sign == '"':
            quoted = not quoted
        elif sign == "," and not quoted:
            fields.append(field)
            field = ""
        else:
            field += sign
        at += 1
    return [*fields, field]
''',
        """        if quoted and line[at : at + 2] == '""':
            field += '"'
            at += 1
        elif sign == '"':""",
        """        if sign == '"':""",
        """def test_plain():
    assert split_row("a,,b") == ["a", "", "b"]


def test_quoted():
    assert split_row('"a,b",c') == ["a,b", "c"]
""",
        """def test_doubled_marks():
    assert split_row('"say ""hi"", now",x') == ['say "hi", now', "x"]
""",
    ),
    Package(
        "months",
        "days(1900, 2) gives 29. Years that 100 divides are leap years only if 400 divides them.",
        '''"""The lengths of months."""

LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_leap(year):
    """Returns True for a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days(year, month):
    """Returns the number of days in a month."""
    return LENGTHS[month - 1] + (month == 2 and is_leap(year))
''',
        "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
        "year % 4 == 0",
        """def test_months():
    assert [days(2023, month) for month in (1, 2, 4)] == [31, 28, 30]


def test_leap_year():
    assert days(2024, 2) == 29
""",
        """@pytest.mark.parametrize(("year", "length"), [(1900, 28), (2100, 28), (2300, 28)])
def test_centuries(year, length):
    assert days(year, 2) == length
""",
    ),
    Package(
        "lines",
        "wrap('ab cd', 5) gives two lines, but the text fits into one line of 5 characters.",
        '''"""Breaks texts into lines."""


def wrap(text, width):
    """Returns lines of at most `width` characters; a longer word has a line of its own."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines
''',
        "len(longer) <= width",
        "len(longer) < width",
        """def test_two_lines():
    assert wrap("one two", 4) == ["one", "two"]


def test_long_word():
    assert wrap("a enormous b", 3) == ["a", "enormous", "b"]
""",
        """def test_a_line_may_be_full():
    assert wrap("ab cd ef", 5) == ["ab cd", "ef"]
""",
    ),
    Package(
        "shares",
        "split(100, [1, 1, 1]) gives 33, 33, 33: a cent is lost. The first shares should get what is left over.",
        '''"""Splits amounts."""


def split(amount, weights):
    """Returns whole shares of an amount by weights; their sum is the amount."""
    total = sum(weights)
    shares = [amount * weight // total for weight in weights]
    for index in range(amount - sum(shares)):
        shares[index] += 1
    return shares
''',
        """    for index in range(amount - sum(shares)):
        shares[index] += 1
""",
        "",
        """def test_even():
    assert split(90, [1, 1, 1]) == [30, 30, 30]


def test_weights():
    assert split(100, [3, 1]) == [75, 25]
""",
        """def test_nothing_is_lost():
    assert split(100, [1, 1, 1]) == [34, 33, 33]
    assert sum(split(101, [2, 3, 7])) == 101
""",
    ),
    Package(
        "order",
        "ordered() leaves out tasks that need each other in a circle. It should raise ValueError.",
        '''"""Orders tasks."""


def ordered(needs):
    """Returns tasks so that each comes after what it needs. Raises ValueError for a circle."""
    done, waiting = [], sorted(needs)
    while waiting:
        ready = [task for task in waiting if all(each in done for each in needs[task])]
        if not ready:
            raise ValueError(f"a circle: {waiting}")
        done += ready
        waiting = [task for task in waiting if task not in ready]
    return done
''',
        """        if not ready:
            raise ValueError(f"a circle: {waiting}")
""",
        """        if not ready and len(waiting) == 1:
            break
        if not ready:
            waiting = waiting[1:]
""",
        """def test_order():
    assert ordered({"b": ["a"], "a": [], "c": ["b"]}) == ["a", "b", "c"]
""",
        """def test_circle():
    with pytest.raises(ValueError):
        ordered({"a": ["b"], "b": ["a"]})


def test_itself():
    with pytest.raises(ValueError):
        ordered({"a": ["a"]})
""",
    ),
    Package(
        "layers",
        "merged(base, other) changes base: a later call sees values of an earlier one. It must copy.",
        '''"""Merges settings."""


def merged(base, other):
    """Returns settings of both mappings; those of `other` win, and mappings in them are merged."""
    result = {key: merged(value, {}) if isinstance(value, dict) else value for key, value in base.items()}
    for key, value in other.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result
''',
        "{key: merged(value, {}) if isinstance(value, dict) else value for key, value in base.items()}",
        "base",
        """def test_merge():
    assert merged({"a": {"b": 1}}, {"a": {"c": 2}, "d": 3}) == {"a": {"b": 1, "c": 2}, "d": 3}
""",
        """def test_base_is_kept():
    base = {"a": {"b": 1}}
    merged(base, {"a": {"b": 2}})["a"]["c"] = 3
    assert base == {"a": {"b": 1}}


def test_copies_are_deep():
    base = {"a": {"b": {}}}
    merged(base, {})["a"]["b"]["c"] = 1
    assert base == {"a": {"b": {}}}
""",
    ),
)
