"""Chat messages on the log: what was replaced by a note, and what only reads like one."""

import json
from typing import Any

import pytest

from tentalis.inference.chat_messages import KEPT_IMAGE_BYTES, as_sent, normalised, unspoken, was_shortened

LONG = "A" * (KEPT_IMAGE_BYTES + 1)
TEXT = {"type": "text", "text": "left out: 5 characters"}


@pytest.mark.parametrize(
    ("part", "shortened"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + LONG}}, True),
        ({"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}, True),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, False),
        ({"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}, False),
        ({"type": "text", "text": "See data:image/png;left-out,7 characters"}, False),
        ({"type": "text", "text": json.dumps({"data": "left out: 7 characters"})}, False),
    ],
)
def test_only_data_that_was_replaced_counts_as_shortened(part: dict[str, Any], shortened: bool) -> None:
    messages = [{"role": "user", "content": [TEXT, part]}]
    sent, _ = as_sent(normalised(messages), unspoken({}, messages))
    assert was_shortened(sent) is shortened
    assert (sent == messages) is not shortened
