"""`tentalis learn` on a given Kafka: with an empty namespace and with its own records, not with those of others."""

from pathlib import Path

import pytest

from schemas import topics
from tentalis.cli.shared.errors import CommandError
from tentalis.cli.shared.stack_checks import check_before_start
from tentalis.kafka.codec import make_codec
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.local.made_topics import record_made
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import ensure_topics
from tests.support.loop_records import task

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]


def test_records_of_others_are_refused_and_own_ones_are_not(own_broker: EmbeddedBroker, tmp_path: Path) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path / "home")
    check_before_start(settings, own_log=True)  # no topics yet
    ensure_topics(settings)
    check_before_start(settings, own_log=True)  # topics without records

    publisher = Publisher(settings, "test", make_codec(settings))
    publisher.send(topics.TASKS, task())
    publisher.flush()
    check_before_start(settings)  # `tentalis up` works on what is there
    with pytest.raises(CommandError, match=f"{topics.TASKS} on Kafka at .* has records.*TENTALIS_NAMESPACE=NAME"):
        check_before_start(settings, own_log=True)

    record_made(settings, None)
    check_before_start(settings, own_log=True)
    elsewhere = settings.model_copy(update={"home": tmp_path / "other"})
    with pytest.raises(CommandError, match="never worked there"):
        check_before_start(elsewhere, own_log=True)
