"""The join: the halves of a task become rollouts and outcomes.

In: the halves topic (`Score`, `Hint`, `Open`, `Forget`, `Tick`). Out: one `Outcome` per sample, with its `Rollout`.
Start with `core.py` (the rules, a pure fold; docs/concepts/join.md), then `emit.py` (the records), then `processor.py`.
"""
