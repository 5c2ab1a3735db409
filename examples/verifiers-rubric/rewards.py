"""Reward functions of a verifiers rubric: each takes what it needs of the row and the answer."""


def last_message(completion):
    return completion[-1]["content"].strip()


def names_answer(completion, answer):
    return 1.0 if answer.lower() in last_message(completion).lower() else 0.0


async def is_short(completion, info):
    words = len(last_message(completion).split())
    return min(1.0, info["most_words"] / max(1, words))


def is_sentence(state):
    text = last_message(state["completion"])
    return 0.5 * text[:1].isupper() + 0.5 * text.endswith(".")
