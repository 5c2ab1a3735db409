"""Planned rollouts that are not there as they were planned: what each of them is called."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from schemas import topics
from schemas.codec import Codec
from schemas.digest import with_digest
from schemas.records import PlanRow, Rollout
from tentalis.config import Settings
from tentalis.forget.core import husk
from tentalis.kafka import Stored
from tests.trainer_lab import rollout
from trainer import fetch
from trainer.fetch import examine

CODEC = Codec()
MADE = {name: rollout(name) for name in ("there", "missing", "forgotten", "altered", "twice", "moved")}


def row(of: Rollout, partition: int = 0, offset: int = 0) -> PlanRow:
    return PlanRow(
        rollout_id=of.rollout_id,
        digest=of.digest,
        partition=partition,
        offset=offset,
        n_tokens=of.n_tokens,
        rl=True,
        opd=False,
        rank=0,
        micro_batch=0,
    )


def on_topic(monkeypatch: pytest.MonkeyPatch, lying: Sequence[Rollout | bytes | None]) -> None:
    """What lies on partition 3 of the rollout topic; None is a tombstone."""

    def read(*_: Any, **__: Any) -> Iterator[Stored]:
        for offset, each in enumerate(lying):
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
            husk(MADE["forgotten"]),  # its content is not removed yet
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
    problems = examine(Settings(), CODEC, map(row, MADE.values()), unreadable, places)
    assert {(problem.kind, problem.rollout_id.partition("/")[0]) for problem in problems} == {
        ("missing", "missing"),
        ("forgotten", "forgotten"),
        ("forged", "altered"),
        ("forged", "twice"),
    }
    assert len(problems) == 4, "each is said once"
    details = {problem.rollout_id.partition("/")[0]: problem.detail for problem in problems}
    assert "not on the topic any more (planned from" in details["missing"]
    assert f"has digest {other_digest.digest}, the plan names {MADE['twice'].digest}" in details["twice"]
    assert "does not cover" in details["altered"]
    assert places["moved/0"] == (3, 7)
    (passed_over,) = unreadable
    assert f"{topics.ROLLOUTS}[3]@9" in passed_over
