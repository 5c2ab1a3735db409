"""The form of a language's phrases, and the recognition of a text's language. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tentalis.text.words import FUNCTION_WORDS, words

_HAN = re.compile(r"[\u4e00-\u9fff]")
_NOT_CHINESE = re.compile(r"[\u3040-\u30ff\uac00-\ud7af]")
_MIN_HAN = 0.3
_SHARED = frozenset(
    ("no", "me", "a", "i", "in", "so", "on", "an", "do", "as", "am", "was", "will", "all", "per", "son")
)
"""English function words that are words of other languages too."""


@dataclass(frozen=True, slots=True)
class Lexicon:
    """The phrases of one language.

    `marks` are frequent words by which the language is recognised. `thanks`, `praise` and `declines` ("No, that's all")
    are matched at the beginning of a message, `doubt` is searched after them. `no` is the word that objects at the
    beginning of a sentence. A sentence is a complaint if one of `objections` begins it, or one of `complaints` is in it
    and none of `conditions`: a question, a wish, a condition or a new request speaks of what is to come.
    """

    marks: frozenset[str]
    thanks: re.Pattern[str]
    praise: re.Pattern[str]
    declines: re.Pattern[str]
    doubt: re.Pattern[str]
    no: re.Pattern[str]
    objections: re.Pattern[str]
    complaints: re.Pattern[str]
    conditions: re.Pattern[str]

    def complains(self, sentence: str) -> bool:
        """True if a sentence objects to an answer."""
        no = self.no.match(sentence)
        if no is not None and not self._courteous(sentence, no.end()):
            return True
        if self.objections.match(sentence):
            return True
        return self.complaints.search(sentence) is not None and self.conditions.search(sentence) is None

    def _courteous(self, sentence: str, at: int) -> bool:
        rest = sentence[at:].lstrip(" ,.!:;-，。！")
        return self.praise.match(rest) is not None or self.thanks.match(rest) is not None


def patterns(*alternatives: str) -> re.Pattern[str]:
    """One pattern for any of the alternatives."""
    return re.compile("|".join(f"(?:{alternative})" for alternative in alternatives), re.IGNORECASE)


def about_the_answer(references: str, words: str) -> str:
    """A pattern for words that scold the answer.

    They are among the first three words of a clause, or come soon after a reference to the answer or its author. No
    question mark follows them.
    """
    return (
        r"(?:(?:^|[,;:(–—-]|\b(?:und|aber|et|mais|y|pero|e|mas) )\W{0,4}(?:[\w']{1,15} ){0,2}"
        rf"|\b(?:{references})\b[^.?!,]{{0,30}}[ '])(?:{words})\b(?!.{{0,60}}\?)"
    )


def is_chinese(text: str) -> bool:
    """True if a text is written in Chinese: Han characters, and no signs of Japanese or Korean."""
    letters = sum(char.isalpha() for char in text)
    return not _NOT_CHINESE.search(text) and len(_HAN.findall(text)) > _MIN_HAN * max(letters, 1)


def best_of(text: str, lexicons: Mapping[str, Lexicon]) -> str | None:
    """The name of the lexicon whose marks a text has most of, if they outnumber those of English; else None."""
    said = [word.replace("’", "'") for word in words(text)]
    counts = {name: sum(word in lexicon.marks for word in said) for name, lexicon in lexicons.items()}
    best = max(counts.values(), default=0)
    english = sum(word.partition("'")[0] in FUNCTION_WORDS and word not in _SHARED for word in said)
    names = [name for name, count in counts.items() if count == best]
    return names[0] if best > english and len(names) == 1 else None
