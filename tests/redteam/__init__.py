"""The red team: attacks from inside of a wall. In: a wall. Out: which attacks held, as a table in docs/results/walls.md.

Begin reading with `attack` (an attack and what counts as its success) and `trial` (runs one against a wall). The attacks
are in `secrets`, `files`, `processes`, `network`, `resources` and `graders`.
"""
