"""The reward function of the benchmark `learn`, with TRL's signature: the style of the demo's users.

It runs in the process of reward functions of `tentalis learn` and, unchanged, in TRL's environment. Every training
answer is recorded with the time of its score: one line `SECONDS REWARD` (SECONDS since the epoch) in the file that its
row names.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tentalis.rewards.style_scorer import check_style


def score(
    completions: Sequence[Sequence[dict[str, str]]],
    completion_ids: Sequence[Sequence[int]],
    question: Sequence[str],
    limit: Sequence[int],
    record: Sequence[str],
    **_: Any,
) -> list[float]:
    """Returns 1 for each answer in the style, else 0.

    Args:
        question: column of the question.
        limit: column of the longest answer, in tokens: an answer of that length was cut off.
        record: column of the file of scored answers; "" for a held-out prompt, whose answers are not recorded.
    """
    rewards = []
    for completion, ids, asked, most, file in zip(completions, completion_ids, question, limit, record, strict=True):
        style = check_style(completion[0]["content"], asked, stopped=len(ids) < most)
        rewards.append(float(style.satisfied))
        if file:
            with Path(file).open("a", encoding="utf-8") as scored:
                scored.write(f"{time.time()} {rewards[-1]}\n")
    return rewards
