"""Reward functions that go wrong, each in its way. Run in processes of their own."""

import asyncio
import ctypes
import os
import time


def raises(completion):
    least = 0
    return len(completion) / least  # line 11


def nan(completion):
    return float("nan")


def word(completion):
    return "good"


def wrong_length(completions):
    return [1.0, 2.0]


def greedy(completion):
    return len(bytearray(3 << 30))  # line 27


def leaves(completion):
    raise SystemExit("enough")  # line 31


def changes(completions, solution):
    solution.append("more")
    return [1.0]


def imports_torch(completion):
    import torch

    return torch.tensor([0.5, 1.0]).mean() - 0.5


def prints_a_gigabyte(completion):
    print("before")
    for _ in range(1024):
        print("x" * (1 << 20))
    return 1.0


def moody(completion):
    if completion == "hangs":
        while True:
            time.sleep(0.01)  # line 55
    if completion == "crashes":
        ctypes.string_at(0)  # line 57
    if completion == "exits":
        os._exit(3)
    if completion == "raises":
        raise ValueError("a bad\nmood")  # line 61
    return 0.5


async def moody_coroutine(completion):
    if completion == "sleeps":
        await asyncio.sleep(100)  # line 67
    if completion == "blocks":
        time.sleep(100)  # noqa: ASYNC251 - line 69
    if completion == "meets":
        await BOTH.wait()
    await asyncio.sleep(0.05)
    return 0.5


def own_loop(completion):
    return asyncio.run(moody_coroutine(completion))


class Rubric:
    """As verifiers has it."""

    def __init__(self):
        self.funcs, self.weights = [brief, parsed], [1.0, 0.5]
        self.class_objects = {"parser": str.upper}


def brief(completion):
    return -0.5


def parsed(parser, completion, answer):
    return float(parser(completion) == answer)


rubric = Rubric()
BOTH = asyncio.Barrier(2)
