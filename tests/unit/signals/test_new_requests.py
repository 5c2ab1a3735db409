"""New requests with words of complaints, each beside a complaint that looks like it."""

import pytest

from tentalis.signals.phrases import correction


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ("Nenne mir drei schlechte Angewohnheiten.", "Die Antwort ist echt schlecht."),
        ("Gib mir ein besseres Wort für nett.", "Gib mir ein besseres Beispiel."),
        ("Was sind die Folgen von zu wenig Schlaf", "Was für ein Mist."),
        ("Mein Drucker funktioniert nicht.", "Mein Code funktioniert nicht."),
        ("Quel est le pire film de l'histoire", "Quelle honte"),
        ("Traduis: le film est nul.", "C'est vraiment nul."),
        ("Donne une autre façon de dire bonjour.", "Donne-moi une autre réponse."),
        ("Je ne comprends pas les fractions.", "Je ne comprends pas la réponse."),
        ("Ahora escribe un poema malo.", "Tu respuesta es muy mala."),
        ("Escribe un resumen más corto de Don Quijote.", "Escribe un resumen más corto."),
        ("Qué es lo peor de vivir en Madrid", "Qué respuesta tan mala."),
        ("No entiendo las fracciones.", "No entiendo el código."),
        ("Qual é o pior vírus da história", "Isso é o pior."),
        ("Conte uma piada idiota.", "Sua resposta é idiota."),
        ("Me dê outra forma de dizer bom dia.", "Me dê outra resposta."),
        ("缺少维生素C会得什么病", "缺少了结尾"),
        ("解释一下对称加密和不对称加密的区别", "不对，是四个"),
        ("写一篇关于春天的作文，简单一点", "写一个短一点的版本"),
        ("我的手机打不开了", "我问的是电话是多少，不对"),
        ("垃圾分类有哪些好处", "真垃圾"),
    ],
)
def test_a_new_request_is_no_complaint(request_: str, complaint: str) -> None:
    assert correction(request_) is None
    assert correction(complaint) is not None
