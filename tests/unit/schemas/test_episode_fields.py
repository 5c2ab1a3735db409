"""The fields of an episode: read from earlier records with their defaults, checked, and carried into the sample."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import schemas
from schemas import topics
from schemas.records import Attachment, Ending, Result, StepReward, TurnSpan, sample_of
from schemas.tensors import float32_bytes
from schemas.wire import avro
from schemas.wire.codec import Codec
from tests.support.loop_records import result, task

ROOT = Path(schemas.__file__).parent


def test_a_result_written_by_the_first_version_is_read_with_defaults() -> None:
    text = (ROOT / "versions/1/Result.avsc").read_text()
    first = avro.AvroSchema.parse(text)
    earlier = {field["name"] for field in json.loads(text)["fields"]}
    whole = result(task()).model_dump(mode="python")
    body = avro.write(first, {name: whole[name] for name in earlier})
    assert Result.model_validate(avro.read(first, avro.current("Result"), body)) == result(task())
    assert {name: whole[name] for name in whole if name not in earlier} == {
        "loss_mask": b"",
        "ending": "none",
        "turns": (),
        "step_rewards": (),
        "rewards": {},
        "wall": "",
        "rendered_turns": (),
        "attempts": 0,
        "attachments": (),
        "recorded_by": "unknown",
    }


def test_an_episode_survives_the_wire() -> None:
    made = result(
        task(),
        loss_mask=b"\1\0\1",
        ending=Ending.TURN_LIMIT,
        turns=(TurnSpan(start=0, end=1, finish_reason="stop"), TurnSpan(start=2, end=3)),
        step_rewards=(StepReward(start=0, end=1, parts={"call": 1.0}),),
        rewards={"reward": 0.5},
        wall="sandlock/0.9.0",
        rendered_turns=(1,),
        attempts=2,
        attachments=(
            Attachment(name="patch.diff", media_type="text/x-diff", sha256="ab" * 32, bytes=2**40, url="s3://b/ab"),
            Attachment(name="files.tar.gz", media_type="application/gzip", sha256="", bytes=7),
        ),
    )
    codec = Codec()
    value = codec.encode(topics.RESULTS, made)
    assert codec.decode(value, topic=topics.RESULTS, partition=0, offset=0) == made


def test_tokens_of_the_environment_are_outside_the_mask_of_the_sample() -> None:
    made = result(task(), loss_mask=b"\1\0\1", sampler_logprobs=float32_bytes([-1.0, 0.0, -0.1]))
    assert sample_of(made).loss_mask == b"\0\0\1\0\1"
    assert sample_of(result(task())).loss_mask == b"\0\0\1\1\1", "an empty mask: the policy chose all"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_mask": b"\1"}, "1 mask bytes for 3 response tokens"),
        ({"loss_mask": b"\1\2\1"}, "other than 0 and 1"),
        ({"turns": (TurnSpan(start=2, end=4),)}, r"tokens \[2, 4\) of 3"),
        ({"turns": (TurnSpan(start=2, end=1),)}, r"tokens \[2, 1\) of 3"),
        ({"step_rewards": (StepReward(start=0, end=9),)}, r"tokens \[0, 9\) of 3"),
    ],
)
def test_spans_and_masks_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        result(task(), **fields)
