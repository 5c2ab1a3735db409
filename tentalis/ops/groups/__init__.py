"""Consumer groups of the applications: their lag, and the reset of their offsets.

In: the groups, offsets and timestamps of a broker, and the records of training. Out: lag in records, seconds and
learning units; plans to reset offsets. The applications of the groups are those of `tentalis/kafka/topology.py`. Begin
with `core.py`; `learning.py` computes the learning units, `process.py` and `learning_reader.py` talk to the broker.
"""
