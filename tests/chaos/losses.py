"""What a run has lost, from the topics: samples without an outcome, turns without a lesson, outcomes in no window."""

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import MetaSignal, Opens, SessionEvent, SessionEventKind, Task
from streams import aggregation
from streams.experience import processor as experience
from tentalis.config import Settings
from tentalis.kafka import make_codec, read_to_end


def lost(settings: Settings) -> list[str]:
    """Everything that is lost of what was sent, in words. All turns must be ones that can be trained on."""
    codec = make_codec(settings)
    outcomes = {str(stored.key) for stored in read_to_end(settings, topics.OUTCOMES)}
    opened, learnt = set(), set()
    for stored in read_to_end(settings, topics.HALVES):
        opened.add(str(stored.key))
        if dict(stored.headers).get("ce_source") == experience.APP_ID.encode():
            learnt.add(str(stored.key))
    wanted, turns = set(), set()
    for stored in read_to_end(settings, topics.TASKS):
        task = stored.decode(codec)
        assert isinstance(task, Task)
        # One that opens with its first feedback and got none waits for it for good.
        if task.terms.opens is Opens.AT_ONCE or task.task_id in opened:
            wanted |= {f"{task.task_id}/{index}" for index in range(task.n_samples)}
    for stored in read_to_end(settings, topics.SESSIONS):
        event = stored.decode(codec)
        if isinstance(event, SessionEvent) and event.kind is SessionEventKind.TURN and event.turn_type == "main":
            turns.add(turn_task_id(event.session_id, event.session_event_id))
    wanted |= {f"{turn}/0" for turn in turns}
    found = [f"{key} has no outcome" for key in sorted(wanted - outcomes)]
    found += [f"turn {turn} was not learnt from" for turn in sorted(turns - learnt)]
    signals: dict[str, MetaSignal] = {}
    for stored in read_to_end(settings, topics.META):
        signal = stored.decode(codec)
        assert isinstance(signal, MetaSignal)
        signals[str(stored.key)] = signal
    counted = sum(sum(signal.outcomes.values()) for signal in signals.values())
    if counted != len(outcomes):
        found.append(f"{aggregation.APP_ID} counted {counted:,} of {len(outcomes):,} outcomes")
    return found
