"""The state of scoring, moved to topics with more partitions. Pure."""

from streams.fold.moved_results import moved, places

__all__ = ["moved", "places"]
