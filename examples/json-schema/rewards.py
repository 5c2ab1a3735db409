"""A reward for answers that are JSON of a given schema. A code block around the JSON is removed."""

import json

from jsonschema import Draft202012Validator


def without_code_block(text):
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text[:-3].partition("\n")[2]
    return text


def schema_reward(completions, schema, **kwargs):
    """0 for no JSON; 0.2 for JSON; the rest is divided by the number of errors plus one."""
    rewards = []
    for completion, expected in zip(completions, schema, strict=True):
        try:
            value = json.loads(without_code_block(completion[0]["content"]))
        except ValueError:
            rewards.append(0.0)
            continue
        errors = list(Draft202012Validator(expected).iter_errors(value))
        rewards.append(0.2 + 0.8 / (1 + len(errors)))
    return rewards
