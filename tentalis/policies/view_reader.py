"""Reads the control topics, and a PolicyView from them."""

from collections.abc import Iterator

from schemas import topics
from schemas.records import Record
from tentalis.kafka.codec import make_codec
from tentalis.kafka.reader import records_to_end
from tentalis.policies.view import PolicyView
from tentalis.service.settings import Settings


def control_records(settings: Settings) -> Iterator[Record]:
    """Yields the records of the topics about runs and policies, to their present ends. Raises NoSuchTopic,
    KafkaException."""
    names = (topics.RUNS, topics.EVALS, topics.BATCHES, topics.POLICIES, topics.POLICY_ACKS)
    yield from records_to_end(settings, names, make_codec(settings))


def read_policies(settings: Settings) -> PolicyView:
    """Returns the versions of all policies, as the log has them now. Raises NoSuchTopic, Unreachable."""
    view = PolicyView()
    for record in control_records(settings):
        view.apply(record)
    return view
