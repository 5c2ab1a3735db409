"""The join: halves of a task become rollouts and outcomes. A pure fold over the one halves log; see docs/join.md."""
