"""The bridge: tasks, results, feedback and sessions over HTTP, for programs that speak no Kafka (docs/bridge.md)."""
