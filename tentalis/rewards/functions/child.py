"""The process of reward functions: loads them, then scores the calls that it reads until its input ends.

Run by `process.py` as `python -m tentalis.rewards.functions.child REQUESTS REPLIES TRACES`, three file descriptors. In:
the targets, then calls, pickled. Out: JSON. Standard output and error are the functions' own. Synchronous functions run
in the main thread, one call after another, so that they may use signals and their own event loops; if all functions
are coroutines, calls run at the same time.
"""

import asyncio
import faulthandler
import inspect
import json
import os
import pickle
import queue
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tentalis.rewards.functions import frames, traceback_text
from tentalis.rewards.functions.arguments import Call, Logged, arguments
from tentalis.rewards.functions.targets import BadFunctionName, LoadedFunction, functions_of, is_file, module_of, split
from tentalis.rewards.functions.values import BadValue, Returned, listed, numbers, read, read_text

MAX_PARTS, MAX_NAME = 64, 100


def main() -> None:
    """Runs the process."""
    requests, replies, traces = (int(text) for text in sys.argv[1:4])
    for descriptor in (requests, replies, traces):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=traces, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=traces, all_threads=True)
    first = frames.read(requests)
    if first is None:
        return
    setup = pickle.loads(first)
    _limit_memory(setup["memory_mb"])
    folders = [Path(folder) for folder in setup["folders"]]
    sys.path[:0] = [str(folder) for folder in folders]
    functions = _load(setup["targets"], setup["form"], folders, replies)
    if functions is None:
        return
    calls: queue.SimpleQueue[tuple[int, float, bytes]] = queue.SimpleQueue()
    scoring = _Scoring(functions, folders, replies, setup["returns"])
    together = all(each.signature.coroutine for each in functions)
    runner = asyncio.Runner()
    loop = runner.get_loop()

    def receive() -> None:
        while (frame := frames.read(requests)) is not None:
            number, limit, call = pickle.loads(frame)
            if together:
                asyncio.run_coroutine_threadsafe(scoring.score(number, call, limit), loop)
            else:
                calls.put((number, limit, call))
        # Scoring has ended, or has given this process up: end at once, with everything that the functions started.
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=receive, name="calls", daemon=True).start()
    if together:
        loop.run_forever()
    while True:
        number, _, call = calls.get()
        scoring.score_in_turn(number, call, runner)


def _limit_memory(megabytes: int) -> None:
    """Limits the memory that the process can write to. Mapped libraries, such as torch's, do not count."""
    limit = megabytes << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(targets: Sequence[str], form: str, folders: Sequence[Path], replies: int) -> list[LoadedFunction] | None:
    """Returns the functions, after a reply that describes them; None after a reply with the error."""
    functions: list[LoadedFunction] = []
    described: list[dict[str, Any]] = []
    for number, target in enumerate(targets):
        try:
            where, name = split(target)
            module = module_of(where)
            found = list(functions_of(module, where, name, form))
        except BadFunctionName as error:
            _reply(replies, {"error": {"where": "", "message": str(error), "traceback": ""}})
            return None
        except BaseException as error:  # noqa: BLE001 - the user's module may fail in any way; the parent reports it
            _reply(replies, {"error": _failure(error, [*folders, *([Path(where).parent] if is_file(where) else [])])})
            return None
        functions += found
        described += [_described(each, number, getattr(module, "__file__", None)) for each in found]
    _reply(replies, {"functions": described})
    return functions


def _described(function: LoadedFunction, target: int, file: str | None) -> dict[str, Any]:
    signature = function.signature
    return {
        "name": function.name,
        "target": target,
        "convention": signature.convention,
        "columns": sorted(signature.columns),
        "required": sorted(signature.required),
        "optional": sorted(signature.optional),
        "everything": signature.everything,
        "coroutine": signature.coroutine,
        "messages": function.messages,
        "place": function.place,
        "weight": function.weight,
        "file": file,
    }


class _Scoring:
    """Scores calls by all functions and replies."""

    def __init__(
        self, functions: Sequence[LoadedFunction], folders: Sequence[Path], replies: int, returns: Returned
    ) -> None:
        self._functions, self._folders, self._replies, self._returns = functions, folders, replies, returns

    def score_in_turn(self, number: int, call: bytes, runner: asyncio.Runner) -> None:
        """Scores one call in the main thread; coroutines of the same call run at the same time, afterwards."""
        loop = runner.get_loop()
        values: dict[int, dict[str, Any]] = {}
        for index, each in enumerate(self._functions):
            if not each.signature.coroutine:
                values[index] = self._value(each, call, lambda coroutine: loop.run_until_complete(coroutine))
        waiting = [index for index, each in enumerate(self._functions) if each.signature.coroutine]
        if waiting:
            found = loop.run_until_complete(_gathered([self._awaited(self._functions[i], call) for i in waiting]))
            values.update(zip(waiting, found, strict=True))
        _reply(self._replies, {"number": number, "values": [values[index] for index in sorted(values)]})

    async def score(self, number: int, call: bytes, limit: float) -> None:
        """Scores one call by coroutines, within a time limit."""
        values = await _gathered([self._within(each, call, limit) for each in self._functions])
        _reply(self._replies, {"number": number, "values": values})

    async def _within(self, function: LoadedFunction, call: bytes, limit: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(limit) as timeout:
                return await self._awaited(function, call)
        except TimeoutError as error:
            assert timeout.expired(), "an error of the function's own is in its value"
            return {"error": {**_failure(error, self._folders), "late": True}}

    def _value(self, function: LoadedFunction, call: bytes, run: Any) -> dict[str, Any]:
        """Returns the value of one function, or its error."""
        given = _Given(function, call)
        try:
            returned = function.call(**given.arguments)
            if inspect.isawaitable(returned):
                returned = run(_await(returned))
            returned = listed(returned, function.signature.convention)
        except BaseException as error:  # noqa: BLE001 - the user's function may fail in any way; the parent reports it
            return {"error": _failure(error, self._folders)}
        return self._read(function, returned, given)

    async def _awaited(self, function: LoadedFunction, call: bytes) -> dict[str, Any]:
        """Returns the value of one coroutine function, or its error; cancellation is passed on."""
        given = _Given(function, call)
        try:
            returned = listed(await function.call(**given.arguments), function.signature.convention)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's function may fail in any way; the parent reports it
            return {"error": _failure(error, self._folders)}
        return self._read(function, returned, given)

    def _read(self, function: LoadedFunction, returned: Any, given: "_Given") -> dict[str, Any]:
        try:
            if self._returns == "text":
                return {"text": read_text(returned, function.signature.convention), "changed": given.changed()}
            value = read(returned, function.signature.convention)
            parts = {**value.parts, **numbers(given.logged.metrics), **numbers(given.logged.extras)}
            if len(parts) > MAX_PARTS:
                raise BadValue(f"it returned {len(parts)} parts: at most {MAX_PARTS} can be recorded")
            if any(len(name) > MAX_NAME for name in parts):
                raise BadValue(f"it returned a part whose name is longer than {MAX_NAME} characters")
        except BadValue as error:
            return {"error": {"where": function.place, "message": str(error), "traceback": ""}}
        return {"reward": value.reward, "parts": parts, "changed": given.changed()}


class _Given:
    """The arguments of one call of one function, made anew from the pickled call."""

    def __init__(self, function: LoadedFunction, call: bytes) -> None:
        self.logged = Logged()
        self._function, self._call = function, call
        self.arguments = self._made()

    def _made(self) -> dict[str, Any]:
        call = pickle.loads(self._call)
        assert isinstance(call, Call)
        function = self._function
        made = arguments(function.signature, call, messages=function.messages, logged=self.logged)
        return made | dict(function.given)

    def changed(self) -> list[str]:
        """Returns the names of the arguments that the function has changed."""
        before = self._made()
        return sorted(
            name
            for name, value in self.arguments.items()
            if not callable(value) and name not in self._function.given and _text(value) != _text(before[name])
        )


def _text(value: Any) -> str:
    return json.dumps(value, default=repr)


async def _await(awaitable: Any) -> Any:
    return await awaitable


async def _gathered(coroutines: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*coroutines))


def _failure(error: BaseException, folders: Sequence[Path]) -> dict[str, Any]:
    return {
        "where": traceback_text.where(error, folders),
        "message": traceback_text.summary(error),
        "traceback": traceback_text.text(error),
    }


def _reply(replies: int, reply: dict[str, Any]) -> None:
    frames.write(replies, json.dumps(reply).encode())


if __name__ == "__main__":
    main()
