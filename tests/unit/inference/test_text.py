"""Streaming text: multi-byte characters, stop strings, and nothing lost or said twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.inference.text import TextStream
from tests.support.inference_lab import make_tokenizer

TOKENIZER = make_tokenizer()


def pieces(text: str, stop: tuple[str, ...] = (), include_stop: bool = False) -> tuple[list[str], TextStream]:
    stream = TextStream(TOKENIZER, stop, include_stop)
    found = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        found.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    return [*found, stream.finish()], stream


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    found, stream = pieces(text)
    assert "".join(found) == stream.text == TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False))


def test_half_a_character_is_held_back() -> None:
    found, _ = pieces("a🦑b")
    assert [piece for piece in found if piece] == ["a", "🦑", "b"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_text(include: bool) -> None:
    found, stream = pieces("The capital of France is Paris. And more", ("is Par", "And"), include)
    assert stream.stopped_by == "is Par"
    assert "".join(found) == "The capital of France " + ("is Par" if include else "")


def test_what_could_become_a_stop_string_is_released_when_it_does_not() -> None:
    found, stream = pieces("abcabd", ("abcabc",))
    assert "".join(found) == "abcabd"
    assert stream.stopped_by is None
    assert found[0] == ""  # "a" could still have been the beginning of the stop string


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab .", max_size=30), st.text(alphabet="ab .", min_size=1, max_size=4))
def test_a_stop_string_never_appears_and_the_text_before_it_does(text: str, stop: str) -> None:
    found, stream = pieces(text, (stop,))
    expected, hit, _ = text.partition(stop)
    assert "".join(found) == expected
    assert stream.stopped_by == (stop if hit else None)
