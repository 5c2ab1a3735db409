"""Phrases that approve of an answer, and phrases that object to it. Only the user's own words count."""

import re

from tentalis.signals.language import is_english
from tentalis.signals.languages import lexicon_of
from tentalis.signals.lexicon import Lexicon
from tentalis.signals.spoken import spoken

MAX_CHARS = 1500
"""Only this many characters of a message are read: a complaint comes before a pasted document."""

_FIRST_SENTENCES = 3


def _any(words: str) -> str:
    """A pattern for any one of the words; `_` stands for a space within a word."""
    return "(?:" + "|".join(word.replace("_", " ") for word in words.split()) + ")"


_PRAISE = _any(
    "perfect great excellent awesome wonderful brilliant lovely fantastic amazing exactly nice cool good right helpful "
    "what_i_needed what_i_wanted what_i_was_looking_for"
)
_THANKS = (
    rf"^\W*{_any('ok okay oh ah wow yes yep great good')}?[\s,.!]*(?:thanks|thank you|thx|ty\b|cheers)",
    r"^\W*(?:(?:that|this|it)(?:'s| is| was) |you(?:'re| are) )?"
    rf"(?:{_any('just exactly absolutely so really very')} )*{_PRAISE}\b",
    r"^\W*(?:it|that|this) (?:works|worked|helps|helped)\b",
    r"^\W*(?:got it|not bad|no problem|no worries|i love (?:it|this|that))\b",
    r"^\W*(?:(?:that|this|it)(?:'s| is| was) )?(?:a )?(?:really |very |pretty |quite )*(?:good|great|excellent|nice) "
    r"(?:idea|suggestion|answer|point|points|explanation|work|job)\b",
    r"^\W*(?:pretty|really|very) (?:good|nice|helpful)\b",
    r"^\s*(?:👍|❤|🙏)",
    r"^\W*no\W+(?:that(?:'s| is|'ll be| will be) (?:all|it|fine|everything|ok)|i(?:'m| am) (?:done|good|fine))\b",
    r"^\W*no\W+(?:thanks|thank|need|problem|worries|idea|nothing)\b",
)
_IRONY = r"^\W*(?:nice|good) try\b"

_THAT = "(?:that|this|it)"
_ANSWER = "(?:answer|reply|response|text|code|summary|version|solution|last|first|second)"
_YOURS = rf"(?:it|that|this|the {_ANSWER}|your {_ANSWER})"
_THING = "(?:it|that|this|the (?:code|test|tests|script|link|command|page|button))"
_WRONG = "(?:wrong|incorrect|false|not (?:true|right|correct))"
_NOT = "(?:doesn't|does not|didn't|did not)"
_NO_QUESTION = r"\b(?!.*\?)"
_YOU_DID = _any(
    "forgot missed ignored left skipped misunderstood misread made_it made_a_mistake made_an_error didn't did_not "
    "have_not haven't were_supposed were_asked"
)
_YOU_SPOILT = _any("broke broken lost deleted removed changed dropped made_up invented mixed_up confused repeated")
_REWORK = _any("redo undo revert rewrite rephrase reword fix correct change shorten simplify expand redraft make")
_TOO = _any("long short complicated vague wordy formal informal technical verbose simple brief generic rude detailed")
_HOW = _any("much far way a_bit a_little that's that_is that_was this_is it's it_is")
_STOP = r"(?:don't|do not|never|stop|avoid|no more)"
_DOING = _any(
    "use using write writing add adding put sound sounding repeat repeating say saying apologise apologising include "
    "including give bullet list lists bold"
)
_LAYOUT = r"(?:bullets?|bullet points|lists?|bold|markdown|headings|emojis?|tables?|code)"
_AGAIN = _any("try do write start redo check count look read calculate think guess")
_STATE = _any("nicer kinder briefer shorter clearer more less friendlier concise brief polite simpler longer fewer")

_OBJECTIONS = (
    # A plain "no" in reply to a statement.
    rf"^\W*(?:{_any('hm hmm hmmm uh um er well sorry but oh')}\W+)?(?:no|nope|nah)\b"
    r"(?=\s*[,.!:;-]|\s+(?:it|that|this|i|you|not|the)\b)",
    rf"^\W*(?:{_WRONG}|not (?:quite|really))\b(?!\s*\?)",
    r"^\W*wrong \w+\W*$",
    r"^\W*not [\w\s]{1,25}, [\w\s]{1,25}\W*$",
    r"^[^,?]{1,40}, (?:and )?not (?:an? |the |in |on |at |by |to )?\w+\W*$",
    r", i mean(?:t)?\W*$",
    rf"\b{_THAT} (?:makes no|{_NOT} make(?: any)?) sense\b",
    rf"\b{_THAT} {_NOT} (?:help|answer|work|match|fit|compile|run|look right){_NO_QUESTION}",
    rf"\b(?:{_THAT}|your {_ANSWER})(?:'s| is| was)(?: \w+)? (?:{_WRONG}|not (?:what|how|the|valid|in|an?)|useless)\b",
    rf"\b{_THAT} (?:isn't|wasn't|ain't) (?:\w+ )?(?:right|correct|true|what|how|the|valid|it|quite)\b",
    rf"\b{_THAT} (?:can't|cannot|can not) be (?:right|correct|true)\b",
    r"\bnot what i (?:asked|wanted|meant|said|need|had in mind)",
    r"\bare you (?:really )?sure\s*\?",
    r"\bi (?:said|meant|wanted|told you|asked (?:you )?for)\b(?!.*\bto ask\b)",
    r"^\W*actually,? (?:it(?:'s| is| was)|that(?:'s| is)|the|they|he|she|there)\b",
    rf"\byou {_YOU_DID}\b",
    r"\byou (?:got .{1,30} wrong|used .{1,40} instead)\b",
    rf"\byou(?:'ve| have)? {_YOU_SPOILT}{_NO_QUESTION}",
    rf"\b{_THING}(?: still)? (?:{_NOT} work|won't|will not|fails|crashes|breaks|throws){_NO_QUESTION}",
    r"\bstill (?:not|wrong|broken|fails|failing|doesn't|too)\b",
    r"\bshould(?:n't| not) be (?:in )?(?:there|here|in|on)\b",
    r"\b(?:is|are|was) not an? \w+\W*$",
    # What an answer did in place of what was asked.
    r"^\W*you\b[^.?!]{1,80}, not (?:the|a|an|in|on|at|to|from|with|for|my|our)\b(?!.*\?)",
    r"\byou(?:'re| are) not \w+ing\b(?!.*\?)",
    r"\byou (?:seem to be|keep|kept|are still|'re still) [^.?!]{0,60}\b(?:wrong|again|same|still|instead)\b",
    r"\b(?:wrong|incorrect) (?:file|files|place|part|line|one|version|function|branch|answer|format|way)\b(?!.*\?)",
    r"\bwe (?:want|need) an? [^.?!,]{1,40}, not\b",
    r"\bi (?:actually|just|only|really|specifically) (?:said|meant|mean|wanted|asked)\b(?!.*\bto ask\b)",
    r"\b(?:although|but|though)\b[^.?!]{1,60}\bi (?:want|need|wanted|needed|asked)\b",
    # What is wrong with it.
    r"^(?!.*\?)(?:.{0,60}\b)?(?:is|are|seems?|looks?|appears?)(?: like| to be| still)?\b[^.?!]{0,60}"
    r"\b(?:malform\w+|malformat\w+|empty|missing|broken|incorrect|misspel\w+|cut off|duplicated|outdated|truncated"
    r"|irrelevant|pointless)\b",
    r"\b(?:looks|seems) like [^.?!]{1,60}\b(?:still|hasn't|isn't|doesn't|didn't|wasn't|aren't|not|never|wrong)\b",
    rf"\b{_THAT} (?:doesn't|does not|didn't) (?:seem|look|sound) (?:right|correct|good|like)\b",
    rf"\b{_THAT} (?:doesn't|does not|didn't) (?:actually )?"
    r"(?:seem to be|capture|cover|include|contain|address|explain)\b",
    rf"^\W*{_THAT}(?:'s| is| was) not \w+\W*$",
    r"\bi (?:don't|do not|can't|cannot) (?:really )?see (?:the|any|that|those|these|it|where|how)\b(?!.*\?)",
    r"\bwhere did you (?:get|find|see) (?:that|this|it|the)\b",
    r"\b(?:thats?|that's|that is|it's|this is) (?:just )?(?:irrelevant|nonsense|rubbish|garbage|disappointing)\b",
    r"^\W*you (?:suck|are (?:useless|terrible|stupid|dumb|awful|hopeless))\b|\bfor shame\b|\bshame on you\b",
    r"\b(?:not|n't) (?:quite |really |at all )?sure what (?:you|that|this) mean",
    r"\b(?:hard|difficult) (?:time )?(?:to (?:understand|follow)|understanding|following)\b",
    r"\bi (?:still )?(?:don't|do not) (?:get it|understand)\b|\byou don't (?:know|understand)\b",
    r"\bif you (?:can't|cannot|won't)\b[^.?!]{0,40}\b(?:advice|answer|help)\b",
    r"\bbe more careful\b",
)
_CHANGES = (
    rf"\b{_AGAIN} (?:it |that |this )?(?:again|over)\W*$",
    rf"^\W*(?:please )?(?:(?:a )?(?:bit|little|lot) )?{_STATE}\b[\w\s]{{0,30}}\W*$(?<!\?)",
    r"^\W*(?:please )?(?:explain|say|write|put|phrase|describe|format) (?:it|that|this) (?!to\b|for\b|down\b)\w+",
    rf"^\W*(?:please )?{_REWORK} {_YOURS}\b",
    rf"\b(?:can|could|would|will) you (?:please )?{_REWORK} {_YOURS}\b",
    rf"^\W*(?:{_HOW} )*too {_TOO}{_NO_QUESTION}",
    rf"^\W*(?:please )?{_STOP} {_DOING}\b",
    rf"^\W*(?:please )?(?:without|no) (?:\w+ )?{_LAYOUT}\b",
    r"^\W*(?:please )?use (?:\w+ ){1,4}(?:in (?:it|there)|instead)\b",
    rf"^\W*(?:please )?be (?:\w+ )?{_STATE}\b",
    r"^(?:one|two|three|\d+) (?:sentences?|words?|lines?|paragraphs?)(?: only)?,? please\W*$",
    r"\b(?:simpler|shorter|longer|clearer|nicer|friendlier|more detail(?:ed)?),? please\b",
    r"\bi (?:don't|do not|didn't|did not) (?:like|want|understand) (?:this|that|it|the way|how|a word|your|what you)\b",
    r"\bi(?:'m| am) [^.?!]{1,40}, (?:i|as i) (?:told you|said)\b",
    r"\bgive me (?:an?)? ?(?:different|better|another) (?:one|version|answer|way|example|solution)\b",
    r"^\W*too (?:much|many) \w+\b(?!.*\?)",
    r"\bthere is no need to \w+",
    r"^\W*stop \w+ing\b(?!.*\?)",
    r"\bmore simply\b|\bin simpler (?:words|terms)\b",
)
_AFTER_PRAISE = re.compile(
    r"\s*(?:$|[.,!;:)…–—\-]|[\U0001F300-\U0001FAFF❤]|(?:thanks|thank|job|work|answer|one|summary|explanation|example"
    r"|idea|list|plan|advice|info|so much|very much|much|a lot|again|for (?:the|that|this|your|it|all|now|me)|man|mate"
    r"|now|fine|well|great|perfectly|me|us|you|everyone|that|this|it|and|here|is (?:all|it)|will|needed)\b)",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\b(?:but|however|not|no|never|nothing|none|nobody|still|wrong|errors?|except|although|though|unfortunately|another"
    r"|fail\w*|broke\w*|crash\w*|ruin\w*|delet\w*|lost|useless|waste\w*|worse|instead|missing|forgot|ignor\w*|idiot|joke"
    r"|again and again|third time|second time|one more time|hours?|same (?:mistake|problem)|confus\w*|apart from)\b"
    r"|n't\b|🙄|😒|🤦|👎|/s\b",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?…])\s+|\n+|(?<=[。！？])")
_BARE = re.compile(
    r"\b(?:(do|does|did|is|was|are|were|has|have|had|could|would|should)nt|(that|what)(s)|(you)(re))\b", re.IGNORECASE
)
_THANKED = re.compile(
    rf"^\W*{_any('ok okay oh ah wow yes yep great good')}?[\s,.!]*(?:thanks|thank (?:yo)?u+|thx|cheers)(?![a-z])",
    re.IGNORECASE,
)


def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)


_APPROVALS, _COMPLAINTS, _IRONIC = _compiled(_THANKS), _compiled((*_OBJECTIONS, *_CHANGES)), re.compile(_IRONY, re.I)


def _plain(text: str) -> str:
    """The text with straight apostrophes, also where a contraction was written without one ("doesnt")."""
    text = text.replace("’", "'")
    return _BARE.sub(lambda found: f"{found[1]}n't" if found[1] else f"{found[2]}'{found[3]}", text)


def thanks(message: str) -> bool:
    """True if a message begins with thanks or praise, or by saying that nothing more is needed.

    >>> [thanks(text) for text in ("Great, thanks!", "No, that's all.", "Not bad.", "Nice try, but no.", "Why?")]
    [True, True, True, False, False]
    """
    text = _plain(message[:MAX_CHARS])
    return _IRONIC.match(text) is None and any(pattern.match(text) for pattern in _APPROVALS)


def accepts(message: str) -> bool:
    """True if a message shows that the answer did its job: thanks or praise, and no doubt after it.

    >>> [accepts(text) for text in ("Great, thanks!", "It works.", "Great, another error.", "Perfect numbers?")]
    [True, True, False, False]
    """
    said = spoken(message)
    text = _plain(said[:MAX_CHARS])
    lexicon = lexicon_of(text)
    if lexicon is not None:
        return _accepts_in(lexicon, text)
    if not thanks(text) or not is_english(text):
        return False
    thanked = _THANKED.match(text)
    if thanked is not None and _DOUBT.search(text) is None:
        return _complaint(text[thanked.end() :]) is None
    found = max((match.end() for pattern in _APPROVALS if (match := pattern.match(text))), default=0)
    rest = text[found:]
    return (
        _AFTER_PRAISE.match(rest) is not None
        and _DOUBT.search(rest) is None
        and "?" not in _SENTENCE_END.split(text)[0]
        and (" " in text.strip() or len(said) == len(message.strip()))
    )


def correction(message: str) -> str | None:
    """The sentence of a message that calls the answer before it wrong or asks for a change; None if there is none.

    Only the first three sentences of the user's own words count. A message that begins with thanks is a correction only
    if "but" follows.
    """
    text = _plain(spoken(message)[:MAX_CHARS]).strip()
    lexicon = lexicon_of(text)
    if lexicon is not None:
        return _correction_in(lexicon, text)
    if not is_english(text):
        return None
    if thanks(text):
        _, but, text = text.partition(" but ")
        if not but:
            return None
    return _complaint(text)


def _complaint(text: str) -> str | None:
    """The first of the first sentences that complains in English."""
    for sentence in _SENTENCE_END.split(text)[:_FIRST_SENTENCES]:
        if any(pattern.search(sentence) for pattern in _COMPLAINTS):
            return sentence
    return None


def _accepts_in(lexicon: Lexicon, text: str) -> bool:
    """`accepts`, in a language other than English."""
    thanked = lexicon.thanks.match(text)
    found = thanked or lexicon.praise.match(text)
    if found is None or lexicon.doubt.search(text, found.end()) or lexicon.complains(text[found.end() :]):
        return False
    return thanked is not None or "?" not in re.split(r"[.!,;。！，]", text[found.end() :].replace("？", "?"))[0]


def _correction_in(lexicon: Lexicon, text: str) -> str | None:
    """`correction`, in a language other than English. Thanks and praise are a complaint only if a doubt follows."""
    found = lexicon.thanks.match(text) or lexicon.praise.match(text) or lexicon.declines.match(text)
    if found is not None and lexicon.doubt.search(text, found.end()) is None:
        return None
    for sentence in _SENTENCE_END.split(text)[:_FIRST_SENTENCES]:
        if lexicon.complains(sentence):
            return sentence
    return None
