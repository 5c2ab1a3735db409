"""Planned rollouts that are not there as they were planned: what each of them is called."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from schemas import topics
from schemas.digest import with_digest
from schemas.records import PlanRow, Rollout
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import Stored
from tentalis.ops.forget.core import redacted_rollout
from tentalis.service.settings import Settings
from tests.support.trainer_lab import rollout
from trainer.data import fetch
from trainer.data.fetch import find_problems

CODEC = Codec()
MADE = {name: rollout(name) for name in ("there", "missing", "forgotten", "altered", "twice", "moved")}


def row(planned: Rollout, partition: int = 0, offset: int = 0) -> PlanRow:
    return PlanRow(
        rollout_id=planned.rollout_id,
        digest=planned.digest,
        partition=partition,
        offset=offset,
        n_tokens=planned.n_tokens,
        rl=True,
        opd=False,
        rank=0,
        micro_batch=0,
    )


def on_topic(monkeypatch: pytest.MonkeyPatch, content: Sequence[Rollout | bytes | None]) -> None:
    """The records on partition 3 of the rollouts topic; None is a tombstone."""

    def read(*_: Any, **__: Any) -> Iterator[Stored]:
        for offset, each in enumerate(content):
            value = CODEC.encode(topics.ROLLOUTS, each) if isinstance(each, Rollout) else each
            key = each.key if isinstance(each, Rollout) else "key"
            yield Stored(topics.ROLLOUTS, 3, offset, 0, key, value, ())

    monkeypatch.setattr(fetch, "read_to_end", read)


def test_missing_forgotten_and_forged_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    other_content = MADE["altered"].model_copy(update={"reward": -1.0})
    other_digest = with_digest(MADE["twice"].model_copy(update={"reward": -1.0}))
    on_topic(
        monkeypatch,
        [
            MADE["there"],
            MADE["there"],  # before compaction
            MADE["forgotten"],
            redacted_rollout(MADE["forgotten"]),  # its content is not removed yet
            other_content,
            MADE["twice"],
            other_digest,
            MADE["moved"],
            None,
            b"no record",
        ],
    )
    unreadable: list[str] = []
    places: dict[str, tuple[int, int]] = {}
    problems = find_problems(Settings(), CODEC, map(row, MADE.values()), unreadable, places)
    assert {(problem.kind, problem.rollout_id.partition("/")[0]) for problem in problems} == {
        ("missing", "missing"),
        ("forgotten", "forgotten"),
        ("forged", "altered"),
        ("forged", "twice"),
    }
    assert len(problems) == 4, "each is said once"
    details = {problem.rollout_id.partition("/")[0]: problem.detail for problem in problems}
    assert "no longer on the topic (planned from" in details["missing"]
    assert f"has digest {other_digest.digest}, the plan names {MADE['twice'].digest}" in details["twice"]
    assert "does not match its digest" in details["altered"]
    assert places == {"there/0": (3, 1), "moved/0": (3, 7)}, "only what a replay may train on"
    (passed_over,) = unreadable
    assert f"{topics.ROLLOUTS}[3]@9" in passed_over
