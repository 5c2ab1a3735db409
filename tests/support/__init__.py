"""Helpers that the tests share: a broker, a registry, model servers, a small trainer."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The folder of the checkout."""
