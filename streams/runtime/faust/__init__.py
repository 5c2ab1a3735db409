"""Every adapter to Faust and every guard against one of its defects.

In: aiokafka's fetched records. Out: batches per partition, and a Faust app that recovers and commits safely.
Begin with `guards.py`.
"""
