"""Rewards for word problems in the form of TRL's GRPO tutorials: the number, its form, the tags."""

import re

TAGS = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*", re.DOTALL)


def extract_xml_answer(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def extract_hash_answer(text):
    return text.split("####")[-1].strip().replace(",", "")


def correctness_reward(completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [
        1.0 if extract_xml_answer(response) == extract_hash_answer(right) else 0.0
        for response, right in zip(responses, answer, strict=True)
    ]


def integer_reward(completions, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [1.0 if extract_xml_answer(response).isdigit() else 0.0 for response in responses]


def xml_reward(completions, **kwargs):
    """The share of the four tags that stand exactly once, all of it only in the right order."""
    rewards = []
    for completion in completions:
        text = completion[0]["content"]
        found = sum(text.count(tag) == 1 for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"))
        rewards.append(1.0 if TAGS.fullmatch(text) else min(0.75, found / 4))
    return rewards
