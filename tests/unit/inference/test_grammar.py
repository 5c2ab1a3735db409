"""Grammars: the bytes of tokens, what compiles, and how long it may take."""

import asyncio
import json
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tentalis.inference import grammar as grammar_module
from tentalis.inference.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarFailed,
    GrammarsBusy,
    InvalidGrammar,
    token_bytes,
)
from tentalis.inference.response_format import answer_grammar
from tests.support.inference_lab import make_tokenizer

VOCABULARY = 352  # more ids than the tokenizer has, as in padded embeddings


def compiler(eos: frozenset[int] = frozenset({0, 2})) -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), VOCABULARY, eos)


def compiled(schema: Any, made: GrammarCompiler | None = None) -> Grammar:
    source = answer_grammar({"type": "json_schema", "json_schema": {"schema": schema}})
    assert source is not None
    return asyncio.run((made or compiler()).compile(source))


def accepts(found: Grammar, text: str) -> bool:
    """True if the text, token by token, is allowed and may end."""
    matcher = found.matcher()
    for token in [*make_tokenizer().encode(text), 2]:
        if not matcher.allowed()[token]:
            return False
        matcher.advance(token)
    return True


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": 1}', True),
        ('{"a":1,"b":"x"}', True),
        ('{"a": -12, "b": "é"}', True),
        ('{"a": 1.5}', False),
        ('{"b": "x"}', False),
        ('{"a": 1, "c": 2}', False),
        ('{"a": 1', False),
        ('{"a": 1}}', False),
        ('{\n"a": 1}', False),
        ("a", False),
    ],
)
def test_a_grammar_allows_the_texts_of_its_schema(text: str, valid: bool) -> None:
    assert accepts(compiled(OBJECT), text) is valid


def test_every_end_token_may_end_an_answer_and_no_other_special_token_is_allowed() -> None:
    matcher = compiled({"const": 1}).matcher()
    special = [0, 1, 2, *range(320, VOCABULARY)]
    assert not matcher.allowed()[special].any()
    matcher.advance(make_tokenizer().encode("1")[0])
    assert np.flatnonzero(matcher.allowed()).tolist() == [0, 2]


def test_samples_of_one_grammar_do_not_share_a_place() -> None:
    found = compiled(OBJECT)
    first, second = found.matcher(), found.matcher()
    first.advance(make_tokenizer().encode("{")[0])
    assert not np.array_equal(first.allowed(), second.allowed())
    assert np.array_equal(second.allowed(), found.matcher().allowed())


def test_the_bytes_of_a_byte_level_vocabulary_are_those_that_it_decodes() -> None:
    tokenizer = make_tokenizer()
    tokens, special = token_bytes(tokenizer, VOCABULARY)
    text = "Ärger 🙂\n\ttäglich; The quick brown fox"
    assert b"".join(tokens[token] for token in tokenizer.encode(text)) == text.encode()
    assert special == {0, 1, 2, *range(320, VOCABULARY)}


def test_the_bytes_of_pieces_with_byte_tokens() -> None:
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "▁fox": 2, "é": 3}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens, special = token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), 4)
    assert tokens[1:] == [b"\n", b" fox", "é".encode()] and special == {0}


def test_a_vocabulary_of_words_cannot_be_constrained() -> None:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "fox": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<unk>")
    with pytest.raises(InvalidGrammar, match="single bytes"):
        asyncio.run(GrammarCompiler(tokenizer, 2, frozenset({0})).compile('start: "f"\n'))


def test_a_model_without_an_end_token_cannot_be_constrained() -> None:
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InvalidGrammar, match="no end token"):
        asyncio.run(GrammarCompiler(tokenizer, VOCABULARY, frozenset()).compile('start: "f"\n'))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "regex"),
        ({"$ref": "https://example.org/schema.json"}, "example.org"),
        ({"$ref": "#/$defs/absent"}, "absent"),
        ({"if": {"type": "object"}, "then": False}, "if"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum|maximum|Unsatisfiable"),
        ({"enum": ["\ud800"]}, ""),
    ],
)
def test_a_schema_that_cannot_be_served_is_refused_with_the_reason(schema: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidGrammar, match=f"(?i){problem}") as caught:
        compiled(schema)
    assert len(str(caught.value)) <= 600 and "\n" not in str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, Any] = {
    "long": {"enum": ["x" * 300_000]},
    "deep": nested(300),
    "counts": {"type": "string", "minLength": 900_000, "maxLength": 1_000_000},
    "nested counts": {"type": "string", "pattern": "^((a{1,300}){1,300}){1,300}$"},
    "ambiguous": {"type": "string", "pattern": "^(.*a.{400}|.*b.{400}|.*c.{400})$"},
    "alternatives": {"anyOf": [{"type": "object", "properties": {f"p{n}": nested(20)}} for n in range(200)]},
    "many items": {"type": "array", "minItems": 100_000, "items": {"type": "integer"}},
    "intersections": {"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in range(60, 80)]},
    "references": {
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
}


def test_a_schema_that_no_text_satisfies_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="no text"):
        compiled(HOSTILE["references"])


def test_a_compilation_that_takes_too_long_is_ended() -> None:
    with pytest.raises(InvalidGrammar, match="2 s of CPU time"):
        compiled({"allOf": [{"type": "string", "pattern": f"^.*a.{{{n}}}$"} for n in range(60, 100)]})


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_or_costs_little(name: str) -> None:
    """Compilation and 20 tokens: no more CPU time in this process than one bounded compilation, whatever the schema."""
    made = compiler()
    compiled({"type": "integer"}, made)  # reads the vocabulary
    began = time.process_time()
    try:
        matcher = compiled(HOSTILE[name], made).matcher()
        for _ in range(20):
            matcher.advance(int(np.flatnonzero(matcher.allowed())[-1]))
    except (InvalidGrammar, GrammarFailed, RecursionError):
        pass
    assert time.process_time() - began < 1


def test_a_grammar_that_takes_too_long_fails_the_samples_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (found := compiled({"type": "string"})).matcher(), found.matcher()
    first.allowed()
    monkeypatch.setattr(grammar_module, "_CPU_S", 0.0)
    monkeypatch.setattr(grammar_module, "_CPU_S_PER_TOKEN", 0.0)
    for matcher in (first, second):
        with pytest.raises(GrammarFailed, match="CPU time for 0 tokens"):
            matcher.allowed()


def test_one_grammar_is_compiled_at_a_time_and_a_kept_one_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made, inside, most = compiler(), 0, 0

    def slow(source: str) -> str:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.3)
        inside -= 1
        return source

    monkeypatch.setattr(made, "_compiled", slow)
    monkeypatch.setattr(grammar_module, "_WAIT_S", 0.5)

    async def all_at_once() -> list[Any]:
        await made.compile("kept")
        begun = [asyncio.create_task(made.compile(str(number))) for number in range(3)]
        await asyncio.sleep(0.05)
        await asyncio.wait_for(made.compile("kept"), 0.05)
        return await asyncio.gather(*begun, return_exceptions=True)

    found = asyncio.run(all_at_once())
    assert [type(each) for each in found] == [Grammar, GrammarsBusy, GrammarsBusy]
    assert most == 1


def test_grammars_are_compiled_once_and_the_oldest_are_dropped() -> None:
    made = compiler()
    first = compiled({"const": 0}, made).compiled
    assert compiled({"const": 0}, made).compiled is first
    for number in range(1, 9):
        last = compiled({"const": number}, made).compiled
    assert compiled({"const": 8}, made).compiled is last
    assert compiled({"const": 0}, made).compiled is not first


def test_a_grammar_has_a_largest_size() -> None:
    with pytest.raises(InvalidGrammar, match="accepts at most 262,144"):
        compiled({"enum": [json.dumps(["x" * 300_000])]})
