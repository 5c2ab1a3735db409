"""Everything that talks to a Kafka broker outside the stream applications.

In: `Settings`. Out: configured clients, records read and written, topics and ACLs as `schemas/topics.yaml` wants them.
Begin with `config.py`, then `producer.py` and `consumer.py`.
"""
