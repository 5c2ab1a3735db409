"""HTTP gateway: an OpenAI- and Anthropic-compatible proxy that records the turns of agents.

In: completion requests. Out: the backends' answers, and session events on the log.
Begin with `build_app` (the routes), then `ModelProxy` (one call).
"""
