"""What else must hold of the topics after a chaos run: who is on them that should not be."""

from collections.abc import Collection, Iterable

from schemas.codec import Codec
from schemas.records import Rollout
from tentalis.kafka import Stored
from tests.chaos.findings import Findings


def wrongly_dead(letters: Iterable[Stored], bad: Collection[bytes]) -> Findings:
    """Dead letters that should be none: everything that is written in the run is good, but for the bytes that the
    driver made up to be no record.

    Args:
        letters: the dead-letter topics.
        bad: values of the records that are none.
    """
    wrong = set()
    for letter in letters:
        if letter.value in bad:
            continue
        said = {name: value.decode(errors="replace") for name, value in letter.headers}
        why, who = said.get("tentalis.dlq.error-message"), said.get("tentalis.dlq.consumer-group")
        wrong.add(f"{letter.topic}: a good record under {letter.key} was dead-lettered by {who}: {why}")
    return Findings(wrong=sorted(wrong))


def not_forgotten(rollouts: Iterable[Stored], user: str, codec: Codec) -> tuple[Findings, int]:
    """Rollouts of a user who has left that still say something, or whose husk is not theirs; and how many husks there
    are.

    Args:
        rollouts: each partition in its order. Husks do not name the user; what they stand for lies before them.
    """
    digests: dict[str, str] = {}
    last: dict[str, Rollout] = {}
    for stored in rollouts:
        rollout = stored.decode(codec)
        assert isinstance(rollout, Rollout)
        if rollout.head.user_id == user:
            digests.setdefault(rollout.rollout_id, rollout.digest)
        last[rollout.rollout_id] = rollout
    husks = {key: rollout for key, rollout in last.items() if rollout.forgotten}
    wrong = [f"{key}: still there of somebody who was forgotten" for key in digests.keys() - husks.keys()]
    wrong += [f"{key}: a husk, and nobody asked for it" for key in husks.keys() - digests.keys()]
    for key in digests.keys() & husks.keys():
        husk = husks[key]
        if husk.digest != digests[key]:
            wrong.append(f"{key}: the husk of another rollout")
        if husk.token_ids or husk.hints or husk.teacher_logprobs or husk.reward is not None or husk.head.session_id:
            wrong.append(f"{key}: a husk that still says something")
    return Findings(wrong=sorted(wrong)), len(husks)
