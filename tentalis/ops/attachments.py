"""Finds the attachments of a task's results on the log: files that its episodes left in the store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from schemas import topics
from schemas.records import Attachment, Result
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.reader import decoded
from tentalis.service.settings import Settings


class NoSuchAttachment(Exception):
    """No attachment, or several, have a name or a sha256; the message names what there is."""


@dataclass(frozen=True, slots=True)
class AttachedFile:
    """An attachment of a result."""

    sample_index: int
    result_id: str
    file: Attachment

    def row(self) -> dict[str, Any]:
        """Returns the fields as a command prints them."""
        return {"sample": self.sample_index, "result": self.result_id} | self.file.model_dump()


def attached_files(settings: Settings, task_id: str) -> list[AttachedFile]:
    """Returns the attachments of a task's results, in the order of the log. Raises NoSuchTopic."""
    codec, seen = make_codec(settings), dict[str, Result]()
    stored = (each for each in read_to_end(settings, topics.RESULTS) if each.key == task_id)
    for _, record in decoded(stored, codec):
        if isinstance(record, Result):
            seen.setdefault(record.result_id, record)
    results = seen.values()
    return [AttachedFile(made.sample_index, made.result_id, each) for made in results for each in made.attachments]


def chosen_file(files: Sequence[AttachedFile], name: str) -> Attachment:
    """Returns the stored attachment with this name, or whose sha256 begins with it. Raises NoSuchAttachment."""
    named = [each.file for each in files if each.file.name == name or each.file.sha256.startswith(name)]
    stored = {each.sha256: each for each in named if each.url is not None}
    if len(stored) == 1:
        return next(iter(stored.values()))
    if stored:
        digests = ", ".join(sorted(each[:12] for each in stored))
        raise NoSuchAttachment(f"several contents are named {name!r}: name one by its sha256: {digests}")
    if named:
        raise NoSuchAttachment(
            f"{name} has {named[0].bytes:,} bytes and is not stored: it was larger than the worker's limit "
            "(TENTALIS_ATTACHMENT_BYTES)"
        )
    known = ", ".join(sorted({each.file.name for each in files})) or "none; is TENTALIS_ATTACHMENTS set for the worker?"
    raise NoSuchAttachment(f"the task has no attachment {name!r}; it has {known}")
