"""The trajectory store. In: the rollouts topic, which is the store. Out: a view of it for SQL queries.

The view is Parquet files below STATE/trajectories, refreshed from the topic before every use. It may be deleted at any
time and has no forgotten rollouts. Begin reading with `refresh`; then `query`, `view` (files) and `rows` (columns).
"""

from tentalis.ops.trajectories.query import BadQuery, Filters, QueryResult, listed, query
from tentalis.ops.trajectories.refresh import Refreshed, record_at, refresh, view_of

__all__ = ["BadQuery", "Filters", "QueryResult", "Refreshed", "listed", "query", "record_at", "refresh", "view_of"]
