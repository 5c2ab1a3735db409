"""The trajectory store: the rollouts topic is the store, and this is a view of it that can be queried.

The view is Parquet files below STATE/trajectories. It is brought up to date from the topic before every use, can be
thrown away at any time, and holds nothing of what was forgotten.
"""

from tentalis.trajectories.query import BadQuery, Filters, Table, listed, query
from tentalis.trajectories.refresh import Refreshed, record_at, refresh, view_of

__all__ = ["BadQuery", "Filters", "Refreshed", "Table", "listed", "query", "record_at", "refresh", "view_of"]
