"""Losses: per-token tensors (`LossTokens`) and `LossConfig` settings in, `(sum, metrics)` out. Pure functions, one per
module.

The caller divides by counts that are fixed over all ranks before the first micro-batch, so micro-batches, ranks and the
layout of the sequences do not change the gradient. Begin with registry.py and clipped.py; the table is in
docs/concepts/losses.md. Importing this package does not import torch: the configuration imports it too.
"""
