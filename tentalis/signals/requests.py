"""The beginnings of sentences that ask for something new, by language.

They are questions, statements about something of the user's, and requests for a text or a fact. What such a sentence
says of quality ("write a bad poem", "which is the worst film") is not about the answer before it. A sentence that
refers to that answer ("give me a shorter version", "why did you ...") is not one of these.
"""

_START = r"^\W*(?:\w{1,12},? )?"


def _begin(question: str, own: str, verbs: str, new: str, answer: str) -> str:
    """A pattern for the beginning of a new request.

    Args:
        question: words that begin a question, also one without a question mark.
        own: words that begin a statement about something of the user's, not about what they work on together.
        verbs: imperatives that ask for something.
        new: what follows them when it is something new: an indefinite article, a number, a colon, a question.
        answer: references to the answer or to its author; with one of them the request is not new.
    """
    # No reference to the answer comes anywhere after the beginning.
    return rf"(?:^\W*(?:{question})\b|{_START}(?:{own})|{_START}(?:{verbs})(?:{new}))(?!.*(?:{answer}))"


GERMAN_REQUEST = _begin(
    question=r"was(?! für ein| soll| ein)|wer|wem|wen|wie|wieso|weshalb|warum|wann|woher|wohin|welche[rsmn]?"
    r"|wo (?:ist|sind"
    r"|gibt|kann|liegt|wohnt|finde)|woran|worin|wodurch|wofür|(?:mit|bei|für|in|aus|an) (?:welche[rsmn]?|wem|was)",
    own=r"(?:mein|unser)\w{0,2} (?!frage|anweisung|aufgabe|bitte|vorgabe|anforderung|wunsch|text|code|tests?\b"
    r"|projekt|datei"
    r"|build|skript|programm|branch|repo)\w",
    verbs=r"schreibe?|dichte|hilf|plane?|mache?|bereite?|jetzt|nun|nenne?|erkläre?|beschreibe?|übersetze?|erzähle?"
    r"|gib|zeige?|liste|fasse?|formuliere?|"
    r"erfinde|entwirf|erstelle?|empfiehl|vergleiche?|sag|(?:ich|wir) (?:brauchen?|suchen?|möchten?|will|wollen)",
    new=r"(?: mir| uns| bitte| doch| mal| jetzt| nun){0,3}"
    r"(?: (?:ein\w{0,2}|kein\w{0,2}|zwei|drei|vier|fünf|sechs|zehn|\d{1,4}|etwas|ins|auf|in|bei|beim|dabei)\b"
    r"|[^.?!]{0,40}:"
    r"|,? (?:warum|wie|was|wo|welche\w?|wann|wer|ob)\b)",
    answer=r", (?:nicht (?!zu)|kein)|\b(?:du|dein\w{0,2}|das (?:so|nicht|hier|ist so)|dies(?:er|e|es)? (?:antwort"
    r"|text|fassung)|hier|oben|so nicht)\b"
    r"|\b(?:ander|besser|kürzer|länger|einfacher|genauer|klarer|konkreter|neue)\w{0,2}(?: \w{1,25})?\W*$"
    r"|\b(?:antwort|fassung|version|erklärung|zusammenfassung)\W*$",
)
FRENCH_REQUEST = _begin(
    question=r"qu(?:i|e|oi)|qu'est-ce|quel(?:le)?s? (?:est|sont|était|\w{2,20}(?! !| ?$))|comment|pourquoi|où"
    r"|combien|quand"
    r"|(?:à|de|dans|avec|pour|en) (?:qui|quoi|quel(?:le)?s?)",
    own=r"(?:mon|ma|mes|notre|nos) (?!question|demande|consigne|instruction|texte|code|tests?\b|projet|fichier"
    r"|build|script"
    r"|programme|branche|dépôt)\w",
    verbs=r"écri(?:s|vez)|aide|aidez|prépare|planifie|fais|faites|maintenant|rédige|compose|donne|donnez|tradui(?:s"
    r"|sez)|expliquez?|racontez?|décri(?:s|vez)|citez?|listez?"
    r"|résumez?|inventez?|imaginez?|calculez?|nommez?|proposez?|trouvez?|dis|dites|compare|je (?:veux|cherche)",
    new=r"(?:-moi|-nous)?(?: (?:un|une|des|deux|trois|quatre|cinq|dix|\d{1,4}|le|la|les|en|à|ce que|ce qu'|pourquoi"
    r"|comment"
    r"|combien|quand|où|qui|quel\w{0,3})\b| l'|[^.?!]{0,40}:)",
    answer=r", pas (?!trop)|\b(?:tu|vous|ta|ton|tes|votre|vos|t'as|ça|cela|ceci|ci-dessus)\b|\bl'(?:explication"
    r"|exemple)\W*$"
    r"|\b(?:réponse|version|explication|façon|manière)(?: (?:plus |moins |très |trop )?\w{1,20})?\W*$"
    r"|\b(?:plus|moins) \w{1,25}\W*$|\bexplicites?\b|\bau lieu\b",
)
SPANISH_REQUEST = _begin(
    question=r"qué (?!.*\btan\b|vergüenza|mal|pena|asco|horror|horrible|desastre|tont|estúpid|decepci|basura)"
    r"|(?:por|para|de|en|con|a)"
    r" (?:qué|quién|cuál|cuánt[oa]s?|dónde)|quién(?:es)?|cuál(?:es)?|cuánt[oa]s?|cómo|cuándo|dónde",
    own=r"(?:mis?|nuestr[oa]s?) (?!pregunta|petición|instrucci|texto|código|pruebas?\b|tests?\b|proyecto|archivo"
    r"|build|script"
    r"|programa|rama|repo)\w",
    verbs=r"escrib[ea]|ayúda(?:me|nos)|planea|planifica|prepara|ahora|redacta|compón|da(?:me|nos)|di(?:me|nos)"
    r"|explic(?:a|ame)|explícame|cuent(?:a|ame)|cuéntame|resume"
    r"|traduce|enumera|describe|descríbeme|nombra|genera|inventa|recomiénda(?:me)?|compara|busca|haz(?:me)?|calcula"
    r"|(?:quiero|necesito|busco|queremos|necesitamos)",
    new=r"(?: (?:\w{2,15}[aei]r|a|con|un|una|unos|unas|dos|tres|cuatro|cinco|diez|\d{1,4}|otr[oa]|el|la|los|las|al"
    r"|en|qué|por qué|cómo|cuándo"
    r"|dónde|quién|cuál)\b|[^.?!]{0,40}:)",
    answer=r", no (?:una?|el|la|de) |\b(?:tú|tu|tus|usted|eso|esto|ese|esa|aquí|arriba|has|hiciste|\w{2,20}(?:aste"
    r"|iste))\b"
    r"|\b(?:respuesta|versión|forma|manera|explicación)(?: (?:más |menos |muy )?\w{1,20})?\W*$"
    r"|\b(?:más|menos) \w{1,25}\W*$|\bexplícit\w{1,3}\b|\ben (?:vez|lugar) de\b",
)
PORTUGUESE_REQUEST = _begin(
    question=r"o que|(?:por|para|de|em|com|a) (?:que|quem|qual|quais|quant[oa]s?|onde)|quem|qual|quais|quant[oa]s?|como"
    r"|quando|por ?quê?|onde (?:está|estão|fica|ficam|há|posso)",
    own=r"(?:o |a )?(?:meus?|minhas?|noss[oa]s?) (?!pergunta|pedido|instruç|texto|código|testes?\b|projeto|arquivo"
    r"|build|script"
    r"|programa|branch|repo)\w",
    verbs=r"escrev[ea]|(?:me )?ajude|planeje|prepare|agora|redija|componha|(?:me )?dê|me de|(?:me )?diga"
    r"|expli(?:que|ca)|cont[ea]|resum[ae]|traduz(?:a)?|list[ea]"
    r"|descrev[ae]|cite|gere|invente|recomende|compare|calcule|faça|crie|(?:eu )?(?:quero|preciso(?: de)?"
    r"|precisamos(?: de)?|procuro)",
    new=r"(?:-me)?(?: (?:\w{2,15}[aei]r|com|uma?|uns|umas|dois|duas|três|quatro|cinco|dez|\d{1,4}|outr[oa]|o|a|os"
    r"|as|ao|para o|em|por que"
    r"|como|quando|onde|quem|qual)\b|[^.?!]{0,40}:)",
    answer=r", não (?:uma?|o|a|de) |\b(?:você|voce|vc|teu|tua|isso|isto|esse|essa|aqui|acima)\b"
    r"|\b(?:resposta|versão|forma|jeito|maneira|explicação)(?: (?:mais |menos |muito )?\w{1,20})?\W*$"
    r"|\b(?:mais|menos) \w{1,25}\W*$|\bexplícit\w{1,3}\b|\bem vez de\b",
)
CHINESE_REQUEST = (
    r"^(?!.*我(?:说|问|要|想要|指|想问|需要)的)(?:"
    # A question word.
    r".*(?:(?<!为)什么(?!玩意|意思|帮助|用)|哪(?:些|个|里|种|家|一)|怎么(?!又|还|没|不|回事|搞|会|都|这|那)|如何|多少"
    r"|为什么(?!.{0,6}(?:还|又|你|没)))"
    # Something of the user's.
    r"|\W*我(?:家|们家|老板|女儿|儿子|孩子|妈|爸|朋友|今天|昨天|最近|的(?!问题|意思|代码|要求|话|需求|指令|文件|测试|项目))"
    # A request for a text or a fact.
    r"|\W*(?:请|现在|再|接着|麻烦)?(?:你)?(?:帮我|给我|为我|帮忙|教我)?(?:再)?"
    r"(?:(?:写|画|讲|编|说|推荐|介绍|列|列出|列举|生成|设计|翻译|举|出|找|创作|做|准备|安排|制定)"
    r"(?:一|两|二|三|四|五|六|十|几|个|下|成|出|\d)"
    r"|(?:解释|介绍|讲讲|说说|说明|描述|翻译|分析|比较|总结|推荐|讲解|讲述)(?:一下|为什么)?(?![得的清详，,。！!]|一下|$))"
    r"(?!.{0,30}(?:版本|刚才|上面|你|这|那|回答|答案|换|的\W*$)))"
)
