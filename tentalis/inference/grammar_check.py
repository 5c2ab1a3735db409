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
    resource.setrlimit(resource.RLIMIT_CPU, (asked["cpu_s"], asked["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance

    limits = llguidance.LLParserLimits(**asked["limits"])
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), asked["grammar"], log_level=0, limits=limits)
    print(matcher.get_error())


if __name__ == "__main__":
    main()
