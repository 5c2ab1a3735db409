"""The contract of all processes: records, their Avro schemas and encoding, and the topics.

In: a record. Out: the bytes on the log with the schema's fingerprint, and back. Imports nothing else of this project.
Begin with `records/tasks.py` and `topics.yaml`; `codec.py` encodes and decodes, `versions/` has the kept schemas.
"""
