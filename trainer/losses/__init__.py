"""Losses: pure functions of flat per-token tensors, one module each. See docs/losses.md for the table.

Every policy loss takes `Tokens` (float32 [T], and the number of the sequence that each token belongs to) and the `Loss`
settings, and returns `(sum, metrics)`. The caller divides by counts that were fixed over all ranks before the first
micro-batch, so neither micro-batches nor ranks nor the layout of the sequences change the gradient.

Importing this package imports no torch: the configuration lives here too (settings.py).
"""
