"""Moves all keyed topics, their dead letters and the changelogs to another number of partitions.

In: the topics of a stack whose processes are stopped. Out: topics of the same names with more partitions, the same
records, and for each consumer group the offsets at which it continues. Nothing is deleted before a checked copy is on
the broker. Begin reading with `repartition` in `process`; docs/decisions/0019-repartition.md has the reasons.
"""
