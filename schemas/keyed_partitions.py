"""The number of partitions of the keyed topics: that of schemas/topics.yaml, or TENTALIS_KEYED_PARTITIONS.

It is read once, when `schemas.topics` is imported: all keyed topics, their dead letters and the changelogs have it.
"""

from collections.abc import Mapping

VARIABLE = "TENTALIS_KEYED_PARTITIONS"
MOST = 4096


class BadKeyedPartitions(ValueError):
    """A number of partitions that cannot be used. The message names the variable and what is allowed."""


def keyed_partitions(env: Mapping[str, str], default: int) -> int:
    """Returns the number of partitions of the keyed topics in an environment. Raises BadKeyedPartitions."""
    text = env.get(VARIABLE)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST):
        raise BadKeyedPartitions(f"{VARIABLE}={text}: give a number from 1 to {MOST}")
    return int(text)
