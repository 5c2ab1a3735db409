"""The policy: a frozen base model with a LoRA adapter.

In: a model folder and packed tokens. Out: log-probs, entropies and the adapter's bytes.
Begin with `model.py`.
"""
