"""Plays the benchmark's episodes with verifiers: `python episodes_verifiers.py URL EPISODES AT_ONCE`, in the
environment that has it. The tool starts the same Python program for each call, without a wall.

Prints one JSON object: `seconds` of all episodes, and their mean `reward`.
"""

import asyncio
import json
import subprocess
import sys
import time


def python(code: str) -> str:
    """Runs Python code.

    Args:
        code: The code; what it prints is returned.
    """
    return subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False).stdout


def main() -> None:
    import verifiers as vf
    from datasets import Dataset
    from openai import AsyncOpenAI

    url, episodes, at_once = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def correct(completion, answer, **kwargs):  # type: ignore[no-untyped-def]
        return float(answer in completion[-1]["content"])

    async def called(code: str) -> str:
        """Runs Python code.

        Args:
            code: The code; what it prints is returned.
        """
        return await asyncio.to_thread(python, code)

    called.__name__ = "python"
    rows = [{"question": "What is 6 * 7?", "answer": "42"}] * episodes
    environment = vf.ToolEnv(
        dataset=Dataset.from_list(rows), tools=[called], rubric=vf.Rubric(funcs=[correct]), max_turns=10
    )
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")

    rows_asked = environment.get_dataset()
    began = time.monotonic()
    results = environment.generate(rows_asked, client=client, model="base", max_concurrent=at_once)
    seconds = time.monotonic() - began
    rewards = results.reward
    print(json.dumps({"seconds": seconds, "reward": sum(rewards) / len(rewards), "n": len(rewards)}))


if __name__ == "__main__":
    main()
