"""Wire formats: records to bytes and back.

In: records of `schemas.records` and the `.avsc` files. Out: Avro with a fingerprint or with Confluent framing.
Begin with `codec.py`; `compiled.py` generates the encoders, `compatibility.py` compares versions of a schema.
"""
