"""Topics that are deleted, or created again, by somebody who does not use `tentalis topics`."""

from confluent_kafka.admin import AdminClient

from tentalis.kafka.admin import KafkaAdmin, apply, plan
from tentalis.kafka.config import client_config
from tentalis.kafka.topology import topic_table
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import eventually


def delete(settings: Settings, *names: str) -> None:
    """Deletes topics, and waits until they are gone."""
    admin = AdminClient(client_config(settings))
    for future in admin.delete_topics([*names]).values():
        future.result(30)
    eventually(lambda: not {*names} & admin.list_topics(timeout=10).topics.keys(), 30)


def recreate(settings: Settings, *names: str) -> None:
    """Deletes topics and creates them again, empty: with the settings of the product, but without its records."""
    delete(settings, *names)
    port, table = KafkaAdmin(settings), topic_table()
    changes = [change for change in plan(table, port.current(table.topics)) if change.topic in names]
    assert len(changes) == len(names), "not every topic is missing"
    apply(port, changes, dry_run=False)
