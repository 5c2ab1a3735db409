"""The raw limit of a join: consumes, decodes and produces, without state, validation or joining.

`python -m tests.bench.join_raw BOOTSTRAP GROUP`. fastavro decodes every half; every score is produced unchanged (the
size of a rollout), together with 400 bytes (the size of an outcome).
"""

import io
import sys

import fastavro
from confluent_kafka import Consumer, Producer

from schemas import topics
from schemas.wire import avro


def main(bootstrap: str, group: str) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "compression.type": "zstd",
            "compression.level": 1,
            "linger.ms": 5,
            "partitioner": "murmur2_random",
        }
    )
    schemas = {schema.fingerprint: schema for schema in avro.all_current()}
    consumer.subscribe([topics.HALVES])
    outcome = b"\0" * 400
    while True:
        messages = consumer.consume(500, 0.2)
        for message in messages:
            value = message.value()
            schema = schemas[value[2:10]]
            fastavro.schemaless_reader(io.BytesIO(value[10:]), schema.parsed, None)
            if schema.name == "Score":
                key = message.key()
                producer.produce(topics.ROLLOUTS, value, key)
                producer.produce(topics.OUTCOMES, outcome, key)
        if messages:
            producer.flush()
            consumer.commit(asynchronous=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
