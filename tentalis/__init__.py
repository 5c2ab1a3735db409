"""Everything that people start or agents use: commands, gateway, workers, rewards, policies, the local stack.

In: a command line, Python calls, HTTP calls, records. Out: processes, answers, records.
Begin with `cli/main.py` (all commands) and `kafka/topology.py` (all applications and their topics). `tentalis.learn`
and the other names of `_PLACES` are imported at their first use, so that `import tentalis` loads nothing.
"""

from importlib import import_module

_PLACES = {
    "learn": "tentalis.python.learn",
    "learn_async": "tentalis.python.learn",
    "LearnedRun": "tentalis.python.learned_run",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module 'tentalis' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
