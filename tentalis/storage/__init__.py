"""Files outside the machine: adapters, checkpoints and exports in an object store.

In: a location, either a folder or `s3://` and `gs://` addresses. Out: files that are complete and have the recorded
sha256, or an error that says what an operator must do. A set of files exists when its manifest does, which is written
last and deleted first. Begin with `file_set.py`; `location.py` and `manifest.py` are pure.
"""
