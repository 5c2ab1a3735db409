"""Words and sentences: enough English to distinguish an answer from an echo, deterministic and fast.

The stemmer is deliberately light (inflection and the commonest derivations, a few irregular forms): it only has to let
"baking" answer a question about "bake", not to be right about etymology.
"""

import re
from functools import lru_cache

_WORD = re.compile(r"[^\W_]+(?:['’.,-][^\W_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|\n+")


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Closed-class words: prose needs them, a list of keywords has none.
FUNCTION_WORDS = _word_set(
    """
    a an the this that these those there here i me my mine myself you your yours yourself he him his himself
    she her hers herself it its itself we us our ours ourselves they them their theirs themselves who whom
    whose which what when where why how am is are was were be been being do does did doing have has had having
    will would shall should can could may might must ought and or but nor so yet if then than as because since
    while although though unless until whether for of to in on at by from with without within into onto upon
    about above below over under between among through during before after against along around across behind
    beside besides beyond near off out up down per via not no yes any some all both each every either neither
    other another such own same only just also too very more most less least much many few several one once
    again ever never always often sometimes usually let lets s t ll ve re d m don isn aren wasn weren doesn
    didn won wouldn couldn shouldn haven hasn hadn like
    """
)

# Open-class words that do not name a subject: phrases of questions, and filler of assistants.
_FILLER = _word_set(
    """
    tell explain describe give name list say show write suggest recommend want need know think mean get got
    make made go use used try keep help please thank thanks ask asked question answer good great better best
    nice well thing things way ways kind sort type lot lots bit simple simply easy easily quick quickly short
    brief briefly sentence word words okay ok sure course certainly absolutely really happy glad assist wonder
    someone something anything everything people person important different actually basically generally
    """
)

_IRREGULAR = {
    "children": "child",
    "men": "man",
    "women": "woman",
    "feet": "foot",
    "teeth": "tooth",
    "mice": "mouse",
    "geese": "goose",
    "leaves": "leaf",
    "lives": "life",
    "knives": "knife",
    "slept": "sleep",
    "ate": "eat",
    "eaten": "eat",
    "grew": "grow",
    "grown": "grow",
    "wrote": "write",
    "written": "write",
    "drank": "drink",
    "drunk": "drink",
    "ran": "run",
    "froze": "freeze",
    "frozen": "freeze",
    "began": "begin",
    "begun": "begin",
    "flew": "fly",
    "flown": "fly",
    "spoke": "speak",
    "spoken": "speak",
    "taught": "teach",
    "bought": "buy",
    "built": "build",
    "felt": "feel",
    "learnt": "learn",
    "rose": "rise",
    "risen": "rise",
    "fell": "fall",
    "fallen": "fall",
    "swam": "swim",
    "died": "die",
    "dying": "die",
    "lying": "lie",
    "tying": "tie",
}

# (suffix, replacement): the first match wins; at least three letters must remain.
_SUFFIXES = (
    ("ically", "ic"),
    ("ization", "ize"),
    ("isation", "ise"),
    ("fulness", "ful"),
    ("iness", "y"),
    ("ations", ""),
    ("ation", ""),
    ("ingly", ""),
    ("ments", ""),
    ("ness", ""),
    ("ment", ""),
    ("ings", ""),
    ("ions", ""),
    ("iest", "y"),
    ("ies", "y"),
    ("ied", "y"),
    ("ier", "y"),
    ("ily", "y"),
    ("sses", "ss"),
    ("ing", ""),
    ("ion", ""),
    ("est", ""),
    ("ers", ""),
    ("ed", ""),
    ("er", ""),
    ("es", ""),
    ("ly", ""),
    ("al", ""),
    ("s", ""),
)


def words(text: str) -> list[str]:
    """The words of a text, lower case: letters and digits, with apostrophes, hyphens and decimals inside.

    >>> words("It's 3.5 km, well-known.")
    ["it's", '3.5', 'km', 'well-known']
    """
    return [word.lower().replace("’", "'") for word in _WORD.findall(text)]


def sentences(text: str) -> list[str]:
    """The sentences (or lines) of a text.

    >>> sentences('Why? Because "I say so." Fine')
    ['Why?', 'Because "I say so.', 'Fine']
    """
    return [part.strip() for part in _SENTENCE_END.split(text) if part and part.strip()]


@lru_cache(maxsize=65536)
def stem(word: str) -> str:
    """The light stem of a lower-case word.

    >>> [stem(w) for w in ("baking", "bakes", "cities", "running", "healthier", "photos", "this")]
    ['bak', 'bak', 'citi', 'run', 'healthi', 'photo', 'this']
    """
    word = word.removesuffix("'s").removesuffix("'")
    word = _IRREGULAR.get(word, word)
    if not word.isalpha() or len(word) < 4 or word.endswith(("ss", "us", "is")):
        return word
    for suffix, replacement in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)] + replacement
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] not in "aeiouls":
        word = word[:-1]
    if len(word) > 3 and word[-1] == "e":
        word = word[:-1]
    if len(word) > 3 and word[-1] == "y" and word[-2] not in "aeiou":
        word = word[:-1] + "i"
    return word


def is_function_word(word: str) -> bool:
    """True if a lower-case word belongs to a closed class; for a contraction the first part decides."""
    return word.partition("'")[0] in FUNCTION_WORDS


def content_stems(text: str) -> set[str]:
    """The stems of a text's subject: no function words, no filler. Parts of hyphenated words count too."""
    parts = [part for word in words(text) for part in (word.split("-") if "-" in word else (word,)) if part]
    return {stem(part) for part in parts if not is_function_word(part) and part not in _FILLER}


def all_stems(text: str) -> set[str]:
    """The stems of all words except function words, filler included."""
    return {stem(word) for word in words(text) if not is_function_word(word)}
