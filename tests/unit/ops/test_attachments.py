"""Which file of a task's results is fetched, and what is said if it is none."""

import pytest

from schemas.records import Attachment
from tentalis.ops.attachments import AttachedFile, NoSuchAttachment, chosen_file


def attached(name: str, sha256: str, url: str | None = "s3://bucket/a") -> AttachedFile:
    return AttachedFile(0, "result", Attachment(name=name, media_type="text/plain", sha256=sha256, bytes=7, url=url))


FILES = [
    attached("patch.diff", "aa11"),
    attached("patch.diff", "aa11"),
    attached("tests.out", "bb22"),
    attached("tests.out", "bc33"),
    attached("large.bin", "", None),
]


def test_a_file_is_chosen_by_its_name_or_its_sha256() -> None:
    assert chosen_file(FILES, "patch.diff") == FILES[0].file, "the same content of two samples is one"
    assert chosen_file(FILES, "bc") == FILES[3].file


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.out", "name one by its sha256: bb22, bc33"),
        ("large.bin", "7 bytes and is not stored"),
        ("else", "no attachment 'else'; it has large.bin, patch.diff, tests.out"),
    ],
)
def test_what_cannot_be_fetched_is_said(name: str, said: str) -> None:
    with pytest.raises(NoSuchAttachment, match=said):
        chosen_file(FILES, name)
