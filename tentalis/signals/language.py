"""Recognises the messages that the rules can read: those in English. Pure."""

from tentalis.text.words import FUNCTION_WORDS, words

_LONG = 6
_MIN_FUNCTION_WORDS = 0.15


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FOREIGN = _word_set(
    "der das ist nicht nein danke falsch und ich du sie kein keine bitte stimmt aber schon wieder noch mal richtig "
    "eso esta está estás mal gracias por favor pero que el los las una muy bien otra vez así incorrecto "
    "merci pas est les des je vous c'est faux non oui encore trop mais bon ça ce une sur plaît "
    "obrigado obrigada não isso errado muito mas ainda grazie sbagliato è sono questo quello ancora troppo "
    "nie dobrze dziękuję źle niet goed dank fout maar het een tack fel det är bu değil yanlış teşekkürler"
)
"""Frequent words of other languages that are rare in English."""
_ENGLISH_TOO = frozenset(("no", "me", "a", "i", "in", "so", "on", "an", "do", "as", "am", "was", "will", "all", "per"))
"""English function words that are words of other languages too."""


def is_english(message: str) -> bool:
    """True if the message looks like English. A short message without any foreign sign counts as English.

    >>> [is_english(text) for text in ("That's wrong.", "Nein, das ist falsch.", "No, eso está mal.", "Paris!")]
    [True, False, False, True]
    """
    letters = [char for char in message if char.isalpha()]
    if sum(not char.isascii() for char in letters) > 0.2 * len(letters):
        return False
    said = words(message)
    english = sum(word.partition("'")[0] in FUNCTION_WORDS for word in said)
    foreign = sum(word in _FOREIGN for word in said)
    if foreign and foreign >= english - sum(word in _ENGLISH_TOO for word in said):
        return False
    return len(said) < _LONG or english >= _MIN_FUNCTION_WORDS * len(said)
