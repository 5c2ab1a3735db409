"""The form of an answer: what a request may ask for, and what is wrong with it otherwise."""

from typing import Any

import pytest

from tentalis.inference.response_format import InvalidFormat, answer_grammar


def tool(name: Any, **parameters: Any) -> dict[str, Any]:
    function = {"name": name} | ({"parameters": parameters} if parameters else {})
    return {"type": "function", "function": function}


TOOLS = [tool("weather", type="object", properties={"city": {"type": "string"}}), tool("now")]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("response_format", "tools", "choice"),
    [
        (None, None, None),
        ({"type": "text"}, None, None),
        (None, TOOLS, None),
        (None, TOOLS, "auto"),
        (None, TOOLS, "none"),
    ],
)
def test_any_text(response_format: Any, tools: Any, choice: Any) -> None:
    assert answer_grammar(response_format, tools, choice) is None


@pytest.mark.parametrize(
    ("response_format", "tools", "choice", "calls", "answers"),
    [
        ({"type": "json_object"}, None, None, 0, 1),
        (SCHEMA, TOOLS, "none", 0, 1),
        (SCHEMA, TOOLS, "auto", 2, 1),
        (None, TOOLS, "required", 2, 0),
        (None, TOOLS, {"type": "function", "function": {"name": "now"}}, 1, 0),
        (SCHEMA, TOOLS, "required", 2, 0),
    ],
)
def test_the_choices_of_an_answer(response_format: Any, tools: Any, choice: Any, calls: int, answers: int) -> None:
    grammar = answer_grammar(response_format, tools, choice)
    assert grammar is not None
    start = next(line for line in grammar.splitlines() if line.startswith("start:"))
    assert (start.count("call"), start.count("answer")) == (calls, answers)


@pytest.mark.parametrize(
    ("response_format", "tools", "choice", "param", "message"),
    [
        ("json", None, None, "response_format", "must be an object"),
        ({"type": "xml"}, None, None, "response_format", "not 'xml'"),
        ({"type": "json_schema"}, None, None, "response_format", "json_schema.schema must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, None, None, "response_format", "must be an object"),
        (None, None, "required", "tool_choice", "has no tools"),
        (None, TOOLS, "any", "tool_choice", "must be none, auto, required"),
        (None, TOOLS, {"type": "function"}, "tool_choice", "must be none, auto, required"),
        (None, TOOLS, {"function": {"name": "x"}}, "tool_choice", "the tools are now, weather"),
        (None, [{"type": "function"}], "required", "tools", "function.name"),
        (None, [tool('a"b')], "required", "tools", "function.name"),
        (None, [tool("x" * 65)], "required", "tools", "function.name"),
        (None, [{"function": {"name": "x", "parameters": [1]}}], "required", "tools", "parameters of the tool x"),
    ],
)
def test_what_is_wrong_is_named(response_format: Any, tools: Any, choice: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidFormat, match=message) as caught:
        answer_grammar(response_format, tools, choice)
    assert caught.value.param == param
