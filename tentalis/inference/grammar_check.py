"""Compiles a grammar in a process of its own, because a thread that compiles cannot be ended.

Run as a program. In: JSON on stdin with `grammar`, llguidance's `limits`, `cpu_s` and `memory_bytes`, beyond which the
process is killed. Out: the reason why the grammar cannot be compiled, nothing if it can. It imports nothing else of
this project, so that it starts fast.
"""

import json
import resource
import sys


def main() -> None:
    """Reads the question from stdin and prints the answer."""
    asked = json.load(sys.stdin)
    _limit(resource.RLIMIT_CPU, asked["cpu_s"])
    _limit(resource.RLIMIT_AS, asked["memory_bytes"])
    _limit(resource.RLIMIT_CORE, 0)
    import llguidance

    limits = llguidance.LLParserLimits(**asked["limits"])
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), asked["grammar"], log_level=0, limits=limits)
    print(matcher.get_error())


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    main()
