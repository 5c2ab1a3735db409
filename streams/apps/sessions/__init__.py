"""Sessions: links each turn of a conversation to its next state.

In: session events. Out: for each main turn a task, a result, and feedback (next state and implicit signals).
Start with `core.py` (the rules, a pure fold; docs/concepts/sessions.md), then `turns.py` (the records), then
`processor.py`.
"""
