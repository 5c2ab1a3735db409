"""The phrases of German, French, Spanish, Portuguese and Chinese that approve of an answer or object to it.

The text is cut before it is matched, and no unlimited repetition is inside another one.
"""

from tentalis.signals.lexicon import Lexicon, about_the_answer, best_of, is_chinese, patterns
from tentalis.signals.requests import (
    CHINESE_REQUEST,
    FRENCH_REQUEST,
    GERMAN_REQUEST,
    PORTUGUESE_REQUEST,
    SPANISH_REQUEST,
)


def _marks(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GERMAN = Lexicon(
    marks=_marks(
        "der die das den dem ist sind war nicht nein ja danke dank falsch und ich du sie wir es ein eine einen "
        "kein keine "
        "bitte stimmt aber schon wieder noch mal richtig mit für auf von zu zum zur auch nur wie was warum wann "
        "wo mir mich "
        "dir dich hast hat habe kann kannst könntest soll sollte mach zeig gib doch sehr gut weiter genau immer "
        "alles jetzt "
        "perfekt klasse prima toll schlecht besser fehlt hilfreich funktioniert geht vielen super enttäuschend anders"
    ),
    thanks=patterns(
        r"^\W*(?:(?:ok|okay|gut|super|ah|ja|nein|alles klar|sehr gut|perfekt)\W{1,3})?(?:vielen |besten "
        r"|herzlichen |tausend )?dank\w*\b",
        r"^\W*ich (?:möchte|wollte|will) (?:dir|ihnen|euch|mich)[^.?!]{0,60}\b(?:dank\w*|bedank\w*)\b",
    ),
    praise=patterns(
        r"^\W*(?:super|perfekt|prima|klasse|toll|großartig|genau|stimmt|ausgezeichnet|wunderbar|fantastisch"
        r"|hervorragend|spitze|top|genial|einwandfrei)\b(?! nicht)",
        r"^\W*(?:das|es|sieht) (?:ist |war |hat |sieht |klingt )?(?:ja |mir |echt |wirklich |richtig |sehr |ganz "
        r"|genau |schon )*(?:gut|super|toll|klasse|perfekt|richtig|hilfreich|geholfen|großartig|spitze|prima"
        r"|genial)\b",
        r"^\W*(?:sehr |ziemlich |richtig |wirklich )?gut(?:e|er|es)? (?:punkte?|idee|antwort|arbeit|erklärung"
        r"|gemacht|erklärt)\b",
        r"^\W*(?:sehr|ziemlich|richtig|wirklich) gut\b",
        r"^\W*(?:jetzt |es |das )?(?:funktioniert|klappt|läuft|passt)(?: jetzt| so| gut| super| perfekt)*\W*(?:$"
        r"|[.,!])",
        r"^\W*du hast recht\b",
    ),
    declines=patterns(r"^\W*(?:nein|nö)\b[^.?!]{0,40}\b(?:danke|das war'?s|das ist alles|passt so|schon gut)\b"),
    doubt=patterns(
        r"\b(?:aber|jedoch|allerdings|leider|nicht|nichts|kein\w*|nie|falsch\w*|fehl\w*|immer noch|trotzdem|obwohl"
        r"|schlecht\w*|statt\w*|schade|vergessen|kaputt|nochmal|schon wieder)\b",
    ),
    no=patterns(r"^\W*(?:nein|nee|nö)\b(?=\s*[,.!:;-]|\s+(?:das|ich|du|es|so|nicht|die|der)\b)"),
    objections=patterns(
        r"^\W*(?:falsch|stimmt nicht|nicht (?:richtig|ganz|das|so|was)|quatsch|unsinn)\b",
        r"^\W*(?:bitte )?(?:mach|schreib|formulier|erklär|fass|geht|sag)\w* (?:es |das |die |den |\w{1,30} |bitte "
        r"|doch |auch |mir ){0,4}(?:kürzer|einfacher|länger|anders|neu|nochmal|noch mal|verständlicher|genauer"
        r"|besser|freundlicher|konkreter)\b",
        r"^\W*(?:bitte )?(?:kürzer|einfacher|länger|anders|nochmal|noch mal|noch einmal|genauer|konkreter"
        r"|ohne \w+)\b[^.?]{0,30}$",
    ),
    complaints=patterns(
        r"\b(?:das|es|die \w+|der \w+|dies|hier|so) (?:ist|war|sind|stimmt|geht|passt) (?:so |doch |leider |aber "
        r"|immer noch |überhaupt |gar )*(?:nicht|falsch|quatsch|unsinn|kaputt|schlecht)\b",
        r"\b(?:das|es) (?:ist|war) kein\w? ",
        r"\b(?:habe|hab|hatte) ich (?:dich |dir )?(?:nicht|doch|gar nicht)\b|\bich (?:habe|hab|hatte) (?:dich "
        r"|dir |doch |das |so )*(?:nicht|nie|anders|gesagt|gefragt|geschrieben|gebeten)\b",
        r"\bich meinte\b|\bmeinte ich\b|\b(?:eigentlich|doch|ich) wollte ich\b|\bich wollte (?:doch|eigentlich|nur"
        r"|aber|dass|ein|eine|einen|das|den|die|kein)\b",
        r"\bdu (?:hast|hattest|bist|sollst|solltest)\b[^.?!]{0,80}\b(?:nicht|kein\w*|vergessen|falsch\w*"
        r"|weggelassen|ausgelassen|ignoriert|übersehen|übersprungen|verwechselt|missverstanden|erfunden|zu viel"
        r"|zu wenig|gelöscht)\b(?!.{0,80}\?)",
        r"\b(?:immer noch|noch immer) (?:nicht|kein\w*|falsch|der|die|das|ein)\b",
        r"\b(?:funktioniert|geht|klappt|läuft|stimmt|passt|hilft|kompiliert) (?:so |das |es |mir |leider "
        r"|immer noch |noch |aber )*nicht\b(?!.{0,60}\?)",
        r"\bverstehe? (?:ich )?(?:es |das |dich |immer noch |leider |kaum |gar |noch )*(?:nicht|kaum|kein)\b"
        r"|\bverstehe (?:es |das )?kaum\b|\bschwer zu verstehen\b",
        r"\bzu (?:lang|kurz|kompliziert|viel|wenig|modern|technisch|allgemein|ungenau|förmlich|formell|vage"
        r"|einfach|schwer|umständlich|ausführlich|knapp|teuer|langsam|groß|klein)\w*\b(?!.{0,60}\?)",
        r"\b(?:versuch|probier|mach|prüf|schau|lies|rechne)\w* (?:es |das )?(?:bitte )?(?:noch ?mal|noch einmal"
        r"|erneut|neu)\b",
        r"\b(?:mag|will|brauche|möchte) (?:ich )?(?:\w{1,30} ){0,3}(?:nicht|kein\w*)\b(?!.{0,60}\?)"
        r"|\bgib mir (?:\w{1,30} ){0,2}(?:ander\w*|besser\w*)\b",
        r"\bkeine gute \w+\b|\bschäm dich\b",
        about_the_answer(
            r"das|es|dies|du|deine?|antwort|text|ergebnis|alles|was für eine?",
            r"nutzlos|unbrauchbar|enttäuschend|lächerlich|peinlich|scheiße|mist|dumm|blöd|unfähig|schlecht",
        ),
        r"\b(?:es fehl|da fehl|hier fehl)\w*\b|\bfehl(?:t|en) (?:noch|das|die|der|ein)\b"
        r"|\bich sehe (?:\w{1,30} ){0,5}nicht\b|\bwo (?:ist|sind|bleibt) (?:das|die|der|denn)\b",
        r"\bhätte(?:st)? [^.?!]{1,60}\bsollen\b|\bsollte(?:st|n)? [^.?!]{1,60}\b(?:nicht|kein\w*|statt)\b"
        r"|\bnicht \w+ing?\b, sondern\b|\bnicht [^.?!,]{1,40}, sondern\b",
        r"\b(?:hängt|stürzt ab|bricht ab|wirft|gibt) [^.?!]{0,40}\b(?:fehler|ewig|immer|absturz)\b",
        r"\b(?:das )?beantwortet (?:meine|die) frage nicht\b|\b(?:hör|lass) (?:auf|das)\b",
    ),
    conditions=patterns(
        r"\?|\b(?:wenn|falls|ob|damit|ich will, dass|ich möchte|könntest|kannst du|sobald)\b", GERMAN_REQUEST
    ),
)

_FRENCH = Lexicon(
    marks=_marks(
        "le la les des du un une et est pas je tu vous nous il elle on ne ce ça ces cette c'est n'est merci oui "
        "non que qui quoi "
        "pour avec dans sur plus très bien mais trop encore toujours faux mon ma mes ton ta tes votre vos s'il "
        "te plaît peux "
        "peut pouvez as ai avez suis être fait faire quel quelle comment pourquoi où quand bon bonne parfait "
        "super génial "
        "j'ai j'aime d'accord qu'est l'ai tous toutes aussi vrai juste raison voudrais continue décevant "
        "inutile nul t'es "
        "lance prenons"
    ),
    thanks=patterns(
        r"^\W*(?:(?:ok|okay|bon|bien|super|ah|oui|non|parfait|très bien|d'accord|génial)\W{1,3})?(?:un grand "
        r"|mille )?merci\w*",
        r"^\W*je (?:tiens à|voudrais|veux|vous|te) (?:te |vous )?remerci\w*",
    ),
    praise=patterns(
        r"^\W*(?:parfait|super|génial|excellent|bravo|formidable|impeccable|nickel|top|fantastique|magnifique"
        r"|exactement|exact|cool)e?\b(?! pas)",
        r"^\W*(?:c'est|c'était|ça) (?:est |était )?(?:vraiment |très |bien |tout à fait |absolument |plutôt "
        r"|déjà )*(?:bien|bon|parfait|génial|super|vrai|correct|exact|juste|utile|excellent|top|clair)e?\b(?! pas)",
        r"^\W*(?:très |vraiment )?(?:bons? points?|bonne (?:idée|réponse|explication)|bon travail|beau travail)\b",
        r"^\W*(?:très|vraiment) (?:bien|bon|bons|bonnes?|utile)\b",
        r"^\W*(?:ça|cela) (?:marche|fonctionne|m'a|m'aide)\b(?! (?:pas|toujours pas))",
        r"^\W*(?:ce que (?:tu|vous) dis?(?:tes)? est (?:la )?vrai\w*|(?:tu as|vous avez) (?:tout à fait "
        r"|bien )?raison|pas mal|j'adore|j'aime (?:bien|beaucoup))\b",
    ),
    declines=patterns(r"^\W*non\b[^.?!]{0,40}\b(?:merci|c'est bon|c'est tout|ça va|pas de souci|pas besoin)\b"),
    doubt=patterns(
        r"\b(?:mais|cependant|pourtant|malheureusement|dommage|faux|erreurs?|toujours pas|encore|manque|oublié"
        r"|sauf|mauvais\w*|plutôt que|au lieu)\b|(?<!\bn'hésite )\bpas\b(?! mal)|\bne\b",
    ),
    no=patterns(r"^\W*(?:non|nan)\b(?=\s*[,.!:;-]|\s+(?:ce|c'est|je|tu|il|pas|la|le|non)\b)"),
    objections=patterns(
        r"^\W*(?:faux|incorrect|pas (?:bon|ça|correct|exact|du tout|vraiment|ce que)|n'importe quoi)\b",
    ),
    complaints=patterns(
        r"\b(?:ce|c') ?n'?(?:est|était) pas (?!(?:mal|grave|un problème|la peine)\b)|\b(?:c'est|c'était"
        r"|est) (?:pas (?!(?:mal|grave)\b)|faux\b|incorrect|erroné|n'importe quoi|mal (?!e))",
        r"\bje (?:ne )?(?:t'ai|vous ai|t'avais|vous avais|l'ai|n'ai) pas (?:demandé|dit|parlé|voulu)"
        r"|\bje ne parlais pas\b|\bpas ce que (?:je|j')\b",
        r"\bje voulais (?!te remercier|vous remercier|savoir|te demander)|\bj'avais (?:dit|demandé)\b|\bje (?:t'"
        r"|vous )(?:ai|avais) (?:déjà )?(?:dit|demandé)\b|\bj'ai (?:dit|demandé)\b",
        r"\b(?:tu|vous|t')\s?(?:n'as|n'avez|n'es|ne|as|avez) (?:\w{1,30} ){0,3}(?:pas|oublié|ignoré|sauté|raté|inventé"
        r"|confondu|cassé|mal compris|supprimé|trop)\b(?!.{0,80}\?)|\b(?:as|avez) (?:modifié|changé|utilisé|fait"
        r"|pris) (?:la mauvaise|le mauvais|les mauvais\w*)\b",
        r"\b(?:toujours|encore) (?:pas|faux|la même erreur|une erreur|le même problème)\b|\bne (?:marche"
        r"|fonctionne|compile|passe|répond|va|sert|correspond) (?:toujours |même )?pas\b|\b(?:marche"
        r"|fonctionne) (?:toujours |même )?pas\b",
        r"\b(?:comprends|comprend|compris) (?:toujours |vraiment |rien |même )?(?:pas|rien)\b(?! (?:la|les?) "
        r"(?!réponse|explication|texte|code|exemple|fin|partie|suite|résultat|différence))|\b(?:du mal"
        r"|difficile) à (?:comprendre|suivre)\b",
        r"\btrop (?:de |long|court|compliqué|vague|technique|moderne|formel|général|simple|peu|cher|enlevé|lent"
        r"|grand|petit)\w*(?!.{0,60}\?)",
        r"\b(?:reformule|recommence|refais|réécris|réessaie|corrige-|raccourcis|simplifie)\w*\b"
        r"|\b(?:plus (?:simple|court|simplement|bref|clair|clairement|long|précis)"
        r"|autrement)\b(?=[^.?!]{0,30}(?:\?|$|s'il))|\bune autre (?:façon|manière|version|réponse)\b"
        r"|\bencore une fois\b",
        r"\bje n'aime pas\b|\bje ne veux pas\b|\bpas une bonne\b|\bmauvaise? (?:réponse|idée|partie)\b",
        about_the_answer(
            r"ça|cela|ce|c'est|c'était|tu|t'es|t'as|vous|ta|ton|tes|votre|réponse|texte|résultat|quel(?:le)?",
            r"nul|nulle|inutiles?|décevant|mauvaise?|stupide|pire|énervant|honte|ridicule|terrible|perte de temps"
            r"|déchet",
        ),
        r"\bil manque\b|\bje ne vois (?:pas|aucun)|\boù (?:est|sont) (?:le|la|les|donc|passé)\b|\baurait dû\b"
        r"|\baurais dû\b|\b(?:devait|devrait|devaient) (?:être|passer|rester|avoir)\b",
        r"\bplante\b|\berreur\b.{0,40}(?:encore|toujours)\b|\bsi tu ne peux pas\b|\bmal formé\b",
    ),
    conditions=patterns(
        r"\?|\b(?:si|je veux (?:que|bien|aussi)|il faut|pour que|afin|lorsque|quand|est-ce|peux-tu|pourrais"
        r"|je voudrais|on est d'accord|juste (?:comprendre|savoir))\b",
        FRENCH_REQUEST,
    ),
)

_SPANISH = Lexicon(
    marks=_marks(
        "el la los las un una unos es está están estás eso esto esta este ese esa y no sí gracias muy pero que "
        "qué cómo cuál "
        "por favor con para del al lo le te se mi tu su más otra otro vez bien mal yo tú usted puedes puede "
        "podrías quiero hay "
        "fue son eres soy ser estar tiene tienes razón cierto correcto genial perfecto cuándo dónde debería "
        "todas todos aún "
        "todavía sigue sin sobre también ahora dame haz hazlo súbelo continúa empieza vamos ejecuta buena bueno "
        "cuéntame "
        "sencillo demasiado pésimo inútil terrible malo entretenido añadir jueves has me"
    ),
    thanks=patterns(
        r"^\W*(?:(?:ok|okay|vale|bien|ah|sí|no|perfecto|genial|muy bien|bueno)\W{1,3})?(?:muchas |muchísimas "
        r"|mil )?graci\w+",
        r"^\W*(?:te lo agradezco|(?:quiero|quería|quisiera) (?:agradecer|darte las gracias)\w*)",
    ),
    praise=patterns(
        r"^\W*(?:perfecto|genial|excelente|estupendo|fantástico|fenomenal|increíble|exacto|exactamente|cierto"
        r"|correcto|verdad|buenísimo|maravilloso|de lujo)\b(?! no)",
        r"^\W*(?:(?:eso|esto|lo que dices|definitivamente eso) )?(?:es|está|fue|quedó|ha quedado) (?:muy "
        r"|totalmente |realmente |bastante |todo |la )*(?:bien|bueno|buenos|buena|perfecto|genial|cierto|correcto"
        r"|verdad|útil|claro|de gran ayuda|excelente)\b",
        r"^\W*(?:muy|bastante) (?:bien|bueno|buena|buenos|útil)\b|^\W*buen[oa]? (?:trabajo|punto|idea|respuesta"
        r"|explicación)\b",
        r"^\W*(?:eso |ya |ahora )?(?:funciona|funcionó|me ayudó|me sirvió|me sirve)\b(?! no)|^\W*me (?:encanta"
        r"|gusta)\b|^\W*(?:tienes|tiene) (?:toda la )?razón\b",
    ),
    declines=patterns(
        r"^\W*no\b[^.?!]{0,40}\b(?:gracias|está bien|eso es todo|nada más|hay problema|pasa nada|importa"
        r"|hace falta)\b",
    ),
    doubt=patterns(
        r"\b(?:pero|sin embargo|aunque|no|nunca|nada|error\w*|todavía|aún|falta\w*|mal|lamentablemente|lástima"
        r"|en vez|en lugar|olvid\w+|sigue)\b",
    ),
    no=patterns(r"^\W*no\b(?=\s*[,.!:;-])"),
    objections=patterns(
        r"^\W*(?:mal|incorrecto|falso|no es (?:correcto|cierto|verdad|así|eso|lo que)|te equivoc\w+"
        r"|estás equivocado)\b|\bno es (?:una? )?(?:correct\w|buen\w?|ciert\w|verdad|lo que|así|entretenid\w|útil"
        r"|divertid\w)",
    ),
    complaints=patterns(
        r"\b(?:eso|esto|esa|ese|la respuesta|está|es|estaba) (?:no (?:es|está|estaba|era|funciona|sirve|responde"
        r"|tiene)|(?:está|es|estaba) (?:mal|incorrect\w+|equivocad\w+|errónea?))\b",
        r"\bno (?:te|le|os) (?:pedí|dije|pregunté|he pedido|había pedido)\b|\bno era lo que\b|\bno me (?:refería"
        r"|refiero)\b|\b(?:en realidad|yo) (?:quería|pedí|dije|te pedí)\b|\bquería que\b|\b(?:te|ya te) (?:dije"
        r"|pedí|había dicho)\b|\blo que (?:pedí|quería|pregunté)\b",
        r"\bno (?:has|hiciste|\w{2,20}(?:aste|iste))\b(?!.{0,80}\?)|\b(?:olvidaste|te (?:olvidaste|dejaste|faltó"
        r"|saltaste|equivocaste|has)|ignoraste|omitiste|borraste|rompiste|inventaste|quitaste demasiado)\b"
        r"|\b\w{2,20}(?:aste|iste) (?:la|el|los|las) \w{1,20} (?:equivocad|incorrect)\w+",
        r"\b(?:sigue|siguen|todavía|aún) (?:sin|no|fallando|mal|habiendo|dando|saliendo)\b|\bno (?:funciona|sirve"
        r"|compila|arranca|carga|ayuda|responde)\b(?!.{0,60}\?)",
        r"\bno (?:lo |te |la )?(?:(?:entiendo|entendí|comprendo|comprendí)\b(?! (?:el|las?|los) (?!respuesta"
        r"|explicación"
        r"|texto|código|ejemplo|final|parte|resultado|diferencia))|(?:veo|encuentro)\b)|\bsin entender\w*\b"
        r"|\b(?:cuesta|difícil de|costando) entender\w*\b",
        r"\b(?:demasiad[oa]s?|muy (?:largo|corto|complicado|técnico|vago|formal|general))\b(?!.{0,60}\?)",
        r"\b(?:más (?:sencillo|simple|corto|breve|claro|largo|detallado))\b|\bde otra (?:forma|manera)\b"
        r"|\botra (?:forma|manera|versión|respuesta)\b|\b(?:rehaz|reescribe|rehazlo|corrígelo|acórtalo|resúmelo"
        r"|inténtalo de nuevo|hazlo (?:de nuevo|otra vez|más))\b",
        r"\bno me (?:gust|sirv|convenc|ayud)\w+|\bno quiero\b|\bquiero (?:\w{1,30} ){1,2}explícit\w+|\bmala respuesta\b"
        r"|\bno es una buena\b",
        about_the_answer(
            r"eso|esto|esta|ese|esa|eres|tú|tu|respuesta|texto|resultado|qué",
            r"inútil|pésim[oa]|terrible|mal[oa]|decepci\w{1,10}|vergüenza|ridículo|lo peor|basura|estúpid[oa]|tonto"
            r"|molesto"
            r"|perder el tiempo|pérdida de tiempo",
        ),
        r"\bfalta(?:n|ba|ban)? (?:el|la|los|las|un|una|más)\b|\bdónde está[n]? (?:el|la|los|las)\b|\b(?:debería"
        r"|deberían|debía|tenía que) (?:quedar|ser|estar|haber|ir|tener|decir|poner)\b(?!.{0,60}\?)|\bya (?:existe"
        r"|había|hay) (?:un|una)\b",
        r"\bse cuelga\b|\bmal formad\w+|\bno puedes dar\b",
    ),
    conditions=patterns(r"[?¿]|\b(?:si|cuando|quiero que|para que|hay que|puedes|podrías|quisiera)\b", SPANISH_REQUEST),
)

_PORTUGUESE = Lexicon(
    marks=_marks(
        "o os um uma uns é está estão isso isto esse essa este e não sim obrigado obrigada muito mas que como "
        "qual por favor com "
        "para do da dos das no na ao pelo pela mais outra outro vez bem mal eu você vocês me seu sua meu minha "
        "pode poderia quero "
        "tem têm foi são ser estar certo errado ótimo ótimos perfeito quando onde todos todas ainda também "
        "agora faz faça rode "
        "continue comece vamos bom boa conte sem sobre já aqui segue deixa precisa pra pronto erro resolva "
        "pessimo péssimo inútil "
        "dê execute atualize implementar corrija vc nao"
    ),
    thanks=patterns(
        r"^\W*(?:(?:ok|okay|certo|bem|bom|ah|sim|não|perfeito|ótimo|muito bom|beleza)\W{1,3})?(?:muito "
        r"|muitíssimo )?(?:obrigad\w+|valeu|agradeço|brigad\w+)",
        r"^\W*(?:eu )?quer(?:o|ia) (?:te |lhe )?agradecer\b",
    ),
    praise=patterns(
        r"^\W*(?:(?:que )?(?:perfeito|ótim[oa]s?|excelente|genial|maravilh\w+|incrível|fantástico|show|legal|exato"
        r"|exatamente|verdade|certo|correto|isso mesmo))\b(?! não)",
        r"^\W*(?:isso |ficou |está |tá |é |foi |agora )+(?:muito |realmente |bem |totalmente )*(?:bom|boa|bem"
        r"|perfeito|ótimo|certo|correto|verdade|útil|claro|excelente|legal)\b",
        r"^\W*(?:muito|bem) (?:bom|boa|bem|útil)\b|^\W*bo[am] (?:resposta|ideia|sugestão|trabalho|ponto)\b",
        r"^\W*(?:isso |agora )?(?:funcionou|deu certo|ajudou|resolveu|funciona)\b|^\W*(?:adorei|gostei)\b"
        r"|^\W*(?:você )?tem (?:toda a )?razão\b",
    ),
    declines=patterns(
        r"^\W*(?:não|nao)\b[^.?!]{0,40}\b(?:obrigad\w|está bom|é só isso|tem problema|há problema|importa)\b",
    ),
    doubt=patterns(
        r"\b(?:mas|porém|embora|contudo|não|nao|nunca|nada|erros?|ainda|falt\w+|errad\w+|infelizmente|pena|em vez"
        r"|esquec\w+|continua)\b",
    ),
    no=patterns(r"^\W*(?:não|nao)\b(?=\s*[,.!:;-])"),
    objections=patterns(
        r"^\W*(?:errado|incorreto|falso|(?:não|nao) (?:é|está|foi) (?:certo|correto|verdade|assim|isso|o que"
        r"|divertid\w)|você (?:errou|está errado))\b|\bnão é uma boa\b",
    ),
    complaints=patterns(
        r"\b(?:isso|isto|esse|essa|a resposta|está|tá|estava) (?:não (?:é|está|estava|era|foi|funciona|serve"
        r"|responde|tem)|(?:está|tá|estava|é) (?:errad|incorret|mal)\w*)\b",
        r"\b(?:não|nao) (?:te |lhe )?(?:pedi|disse|perguntei|falei|era (?:isso|desse|o que))\b"
        r"|\bna verdade\b[^.?!]{0,20}\b(?:queria|pedi|disse)\b|\b(?:eu|mas) (?:queria|pedi|disse"
        r"|quero)\b(?! (?:te )?(?:agradecer|saber))|\bqueria que\b|\b(?:te|já) (?:disse|pedi|falei)\b",
        r"\bvocê (?:não|nao|esqueceu|errou|ignorou|pulou|apagou|removeu (?:coisa )?demais|quebrou|inventou"
        r"|confundiu|deixou)\b(?!.{0,80}\?)|\b(?:acho que )?você removeu\b|\b(?:alterou|mudou|usou|atualizou"
        r"|fez) (?:a|o|os|as) \w{1,20} errad\w+|\b(?:a|o) \w{1,20} (?:errad|corret)[oa]\b(?=\s*(?:\.\.|$"
        r"|d[aoe]\b))",
        r"\b(?:ainda|continua|continuam) (?:não|nao|sem|com|dando|errad\w+)\b|\b(?:não|nao) (?:funciona|funcionou"
        r"|serve|compila|roda|ajuda|deu certo|responde)\b(?!.{0,60}\?)|\b(?:segue|deu|dá|tivemos|ocorreu"
        r"|apareceu) (?:o |um |este |esse |outro )?erro\b",
        r"\b(?:não|nao) (?:entendi|entendo|compreendo|vejo|achei|encontro)\b|\b(?:dificuldade|difícil) (?:de|para"
        r"|em) entender\b",
        r"\bdemais\b|\bmuito (?:texto|longo|curto|complicado|técnico|vago|formal|genérico)\b(?!.{0,60}\?)",
        r"\bmais (?:simples|curto|breve|claro|longo|detalhad\w)\b|\bde (?:outro jeito|outra forma|outra maneira)\b"
        r"|\boutr[oa] (?:jeito|forma|maneira|versão|resposta)\b|\b(?:refaça|reescreva|refaz|corrija isso|encurta"
        r"|resume isso|tente de novo|tenta de novo|explica\W)",
        r"\b(?:não|nao) gost(?:o|ei)\b|\b(?:não|nao) quero\b|\bquero exemplos\b|\bresposta ruim\b|\b(?:não"
        r"|nao) precisa \w+r\b",
        about_the_answer(
            r"isso|isto|esse|essa|este|esta|você|voce|vc|sua|seu|resposta|texto|resultado|que",
            r"inútil|péssim[oa]|horrível|ruim|decepcion\w{1,10}|vergonha|ridículo|o pior|lixo|burr[oa]|idiota"
            r"|perda de tempo",
        ),
        r"\bfalt(?:a|am|ou|aram|ando) (?:o|a|os|as|um|uma)\b|\bcadê\b|\bonde (?:está|estão|foi|foram)\b|\b(?:devia"
        r"|deveria|deviam|era para) (?:ficar|ser|estar|ter|ir|dizer)\b(?!.{0,60}\?)|\bjá (?:existe|havia|tem"
        r"|tinha) (?:um|uma)\b",
        r"\bmalformad\w+|\bnão consegue dar\b|\bantes de [^.,]{1,60}, (?:termine|faça|verifique|valide)\b",
    ),
    conditions=patterns(
        r"\?|\b(?:se|quando|quero que|para que|precisamos|você pode|poderia|gostaria)\b", PORTUGUESE_REQUEST
    ),
)

_CHINESE = Lexicon(
    marks=frozenset(),
    thanks=patterns(
        r"^\W*(?:(?:好的?呀?|嗯{1,3}|恩|哦了?|行|OK|ok|收到|明白了?|记下了|知道了|太好了|那"
        r"|啊)[，,。！! ]{0,3}){0,3}(?:真的|非常|太|十分|多)?(?:谢谢|感谢|多谢|谢了|谢啦|谢)",
        r"^.{0,12}(?:非常感谢|谢谢(?:你|您|了|啊|！|。|$)|多谢)",
        r"^我?想?(?:感谢|谢谢)",
    ),
    praise=patterns(
        r"^\W*(?:太(?:好|棒|赞|厉害|酷)了?|(?:很|真|挺|非常|特别|相当)(?:的)?(?:好|棒|赞|不错|有用|有帮助|清楚"
        r"|完美)(?!像|奇|多|笑|玩)|不错|完美|没错|说得(?:对"
        r"|好|很好)|正确|对的|搞定了|可以了|成功了|厉害|好极了|棒)",
        r"^\W*(?:这|那|你|听起来|看起来)[^，。？！]{0,12}(?:太(?:好|棒|赞)了|(?:很|真|挺|非常|也)(?:好|棒|不错"
        r"|有用|有帮助)(?!像)|说得(?:对|很好|不错)|没错)",
    ),
    declines=patterns(r"^\W*(?:不用了?|不客气|没事|没关系|不麻烦|没有(?:其它|其他|别的)?问题)"),
    doubt=patterns(
        r"但|不过|可是|然而|可惜|不(?!错|客气|用了|用担心|少|过)|没(?!问题|错|事|有(?:其它|其他|别的|什么)?问题)"
        r"|错(?<!不错)(?<!没错)|失败|报错|重新"
    ),
    no=patterns(r"^\W*(?:不[，,。！!]|不是[的啊吧，,。！!])"),
    objections=patterns(
        r"^\W*(?:不对(?!称|等)|错了?[，,。！!]|错误)",
    ),
    complaints=patterns(
        r"(?:不对(?!劲吗|称|等)|错了|搞错|弄错|改错|写错|理解错|推荐错|答错|不正确|不准确|有误|有问题(?!我|再|请|随时"
        r"|我再|的))(?!.{0,8}[？?吗])",
        r"我(?:说|问|要|想要|指|想问|需要)的(?:\w{0,8})?(?:是|不是)|我(?:根本|并)?没(?:有)?(?:让|叫|要|问|说)"
        r"|(?:其实|原本|本来)我?是?(?:想|要)"
        r"|不是我(?:要|想|问|说)|不是(?:这个|那个|这样|那样|那个)意思|答非所问",
        r"你(?:根本|并|又|还|都|连|怎么|一个[^，。]{0,8}都?|[^，。]{0,4})?(?:没(?:有)?(?:给|解释|更新|回答|说|写"
        r"|做|按|提|加|用|看|理解|改|考虑|包括|完成)?"
        r"|忘了?|漏了?|遗漏|忽略|忽视|删(?:掉|得)?(?:了|太)|乱|误解|编造|弄坏)(?!.{0,20}[？?吗])",
        r"(?:还是|仍然|依然|依旧|一直)(?:不|没|报|有错|卡|失败|错)|(?:不行|不管用|没用|没有用|不起作用|不能用"
        r"|用不了|打不开|报错|出错|无法运行|运行不了"
        r"|崩溃)(?!.{0,10}[？?吗])",
        r"(?:不明白|不太明白|不懂|看不(?:太)?懂|听不(?:太)?懂|没(?:看|听|太)?懂|不理解|搞不懂)",
        r"太(?:长|短|多|少|复杂|难|简单|笼统|啰嗦|贵|慢|现代|正式|专业|模糊|差|烂|笨|大|小)了?|(?:删|写|改|说"
        r"|用)得太",
        r"(?:简单|短|详细|具体|清楚|礼貌|正式|自然)(?:一)?(?:点|些)|换(?:一)?(?:个|种|条|家)|重(?:新)?(?:写|来|做"
        r"|答|生成)|再(?:试|写|来|做|想|检查"
        r"|回答)(?:一)?(?:次|遍|下)|改(?:成|为|一下)",
        r"(?:我)?不(?:太)?(?:喜欢|想要|满意|需要这)|(?:回答|答案|结果)(?:很|太|也)?(?:不好|不对|不行|差|有问题)"
        r"|没(?:有)?(?:什么)?帮助|一点(?:都|也)不"
        r"|别(?:再)?(?:用|写|加|说|改)|不要(?:用|写|加|说|改)|(?:而)?我要的是",
        r"(?:^|[，,。！!\s]|(?:你|这|那|真|太|很|好|让人|回答|答案).{0,4})(?:差劲|垃圾(?!分类|邮件|桶|箱|处理)|失望|丢人|笨|蠢"
        r"|差评|白痴|胡说|瞎(?:说|编)|敷衍|无语|什么玩意)",
        r"缺(?:少|了)|没看(?:到|见)|找不到|(?:不应该|不该)|应该.{1,20}(?:不是|而不是)|这不是.{1,20}(?:，|,)?(?:这"
        r"|而)?是|已经有.{1,20}了$|给不了",
    ),
    conditions=patterns(r"[？?]|吗|如果|要是|是否|能不能|可不可以|可以帮|怎么样", CHINESE_REQUEST),
)

_EUROPEAN = {"de": _GERMAN, "fr": _FRENCH, "es": _SPANISH, "pt": _PORTUGUESE}
READ = ("de", "en", "es", "fr", "pt", "zh")
"""The languages that the rules read."""


def lexicon_of(text: str) -> Lexicon | None:
    """The lexicon of a text's language; None for English, and for a language without a lexicon."""
    if is_chinese(text):
        return _CHINESE
    name = best_of(text, _EUROPEAN)
    return _EUROPEAN[name] if name else None
