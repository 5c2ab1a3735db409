"""The position of a record on the log, and its text form."""

import re
from typing import NamedTuple

_WRITTEN = re.compile(r"([a-zA-Z0-9._-]+)\[(\d{1,9})\]@(\d{1,18})", re.ASCII)


class RecordPlace(NamedTuple):
    """A position on a topic.

    >>> str(RecordPlace.parse("tentalis.tasks.v1.dlq[3]@17"))
    'tentalis.tasks.v1.dlq[3]@17'
    """

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @classmethod
    def parse(cls, text: str) -> "RecordPlace":
        """Parses TOPIC[PARTITION]@OFFSET. Raises ValueError for anything else."""
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a place on a topic: write TOPIC[PARTITION]@OFFSET as in `dlq list`")
        return cls(match[1], int(match[2]), int(match[3]))
