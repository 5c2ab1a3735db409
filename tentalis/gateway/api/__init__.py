"""The bridge: tasks, results, feedback and sessions over HTTP, for programs without Kafka (docs/reference/bridge.md).

In: HTTP posts, written to the log as records. Out: task status, training status and live events, read from the log.
Begin with `routes`, then `service`.
"""
