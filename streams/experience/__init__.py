"""Whole-session experience: when a session ends, a lesson of it, and every turn scored anew with it (docs/hints.md)."""
