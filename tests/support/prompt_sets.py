"""Folders of prompts as `tentalis learn` prepares them."""

from collections.abc import Sequence
from pathlib import Path

from tentalis.agents.scenarios.prompt_file import Prompt, PromptWriter
from tentalis.agents.scenarios.prompts import HELD_OUT, TRAINED, PromptSet


def prompts(count: int, text: str = "q") -> list[Prompt]:
    return [Prompt((("user", f"{text}{number}"),), {"answer": number}, number + 1) for number in range(count)]


def written(folder: Path, trained: Sequence[Prompt], held_out: int | Sequence[Prompt] = 1, seed: int = 0) -> Path:
    """Writes a prepared folder; `held_out`: a number of the prompts, or other prompts."""
    folder.mkdir(exist_ok=True)
    digests = {}
    for name, given_prompts in ((TRAINED, trained), *(() if isinstance(held_out, int) else ((HELD_OUT, held_out),))):
        with PromptWriter(folder, name) as writer:
            for prompt in given_prompts:
                writer.add(prompt.as_line())
        digests[name] = writer.sha256
    count = held_out if isinstance(held_out, int) else len(held_out)
    PromptSet(seed, 4, 32, 0.7, digests[TRAINED], len(trained), count, digests.get(HELD_OUT)).write(folder)
    return folder
