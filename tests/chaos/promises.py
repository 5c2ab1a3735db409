"""Verifies that after a chaos run no valid record was dead-lettered and no forgotten user has data on the topics."""

from collections.abc import Collection, Iterable

from schemas.records import Rollout
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import Stored
from tests.chaos.findings import Findings


def wrongly_dead(letters: Iterable[Stored], bad: Collection[bytes]) -> Findings:
    """Dead letters of valid records. All records of a run are valid, except those that the driver made invalid.

    Args:
        letters: the dead-letter topics.
        bad: values of the invalid records.
    """
    wrong = set()
    for letter in letters:
        if letter.value in bad:
            continue
        said = {name: value.decode(errors="replace") for name, value in letter.headers}
        why, who = said.get("tentalis.dlq.error-message"), said.get("tentalis.dlq.consumer-group")
        wrong.add(f"{letter.topic}: a valid record with key {letter.key} was dead-lettered by {who}: {why}")
    return Findings(wrong=sorted(wrong))


def not_forgotten(rollouts: Iterable[Stored], user: str, codec: Codec) -> tuple[Findings, int]:
    """Errors in the redaction of a forgotten user's rollouts (missing, wrong or incomplete), and the number of redacted
    rollouts.

    Args:
        rollouts: each partition in order. A redacted rollout does not name the user, but the original is before it.
    """
    digests: dict[str, str] = {}
    last: dict[str, Rollout] = {}
    for stored in rollouts:
        rollout = stored.decode(codec)
        assert isinstance(rollout, Rollout)
        if rollout.head.user_id == user:
            digests.setdefault(rollout.rollout_id, rollout.digest)
        last[rollout.rollout_id] = rollout
    redacted = {key: each for key, each in last.items() if each.forgotten}
    wrong = [f"{key}: not redacted, although its user was forgotten" for key in digests.keys() - redacted.keys()]
    wrong += [f"{key}: redacted without a request" for key in redacted.keys() - digests.keys()]
    for key in digests.keys() & redacted.keys():
        rollout = redacted[key]
        if rollout.digest != digests[key]:
            wrong.append(f"{key}: redacted with the digest of another rollout")
        if (
            rollout.token_ids
            or rollout.hints
            or rollout.teacher_logprobs
            or rollout.reward is not None
            or rollout.head.session_id
        ):
            wrong.append(f"{key}: redacted, but with content")
    return Findings(wrong=sorted(wrong)), len(redacted)
