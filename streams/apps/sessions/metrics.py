"""The metrics of the sessions."""

from tentalis.service.metrics import Metric, MetricKind

SESSIONS_OPEN = Metric(
    "tentalis_sessions_open_sessions", MetricKind.GAUGE, "Sessions that have not ended.", ("sessions",), unit="sessions"
)
SESSIONS_REMEMBERED = Metric(
    "tentalis_sessions_remembered_sessions",
    MetricKind.GAUGE,
    "Sessions that have ended, or had only side turns, and are still remembered.",
    ("sessions",),
    unit="sessions",
)
SESSIONS_OPEN_BYTES = Metric(
    "tentalis_sessions_open_bytes",
    MetricKind.GAUGE,
    "Bytes of the turns whose next state is awaited.",
    ("sessions",),
    unit="bytes",
)
SESSIONS_PAUSED = Metric(
    "tentalis_sessions_paused_partitions",
    MetricKind.GAUGE,
    "Partitions that are paused because too much is open; all partitions once the bound is reached.",
    ("sessions",),
    unit="partitions",
)
SESSIONS_TIME = Metric(
    "tentalis_sessions_stream_timestamp_seconds",
    MetricKind.GAUGE,
    "Stream time since the epoch: the newest append time processed.",
    ("sessions",),
    ("partition",),
    "seconds",
)
SESSIONS_TURNS = Metric(
    "tentalis_sessions_turns_total",
    MetricKind.COUNTER,
    "Turns by type: main, side, episode.",
    ("sessions",),
    ("type",),
    "turns",
)
SESSIONS_NOT_TRAINABLE = Metric(
    "tentalis_sessions_not_trainable_turns_total",
    MetricKind.COUNTER,
    "Main turns without a task, by reason (the first 32 different ones, then other).",
    ("sessions",),
    ("reason",),
    "turns",
)
SESSIONS_NEXT_STATES = Metric(
    "tentalis_sessions_next_states_total",
    MetricKind.COUNTER,
    "Next states by role: user, tool, other; none: no message came, or the session ended.",
    ("sessions",),
    ("role",),
    "turns",
)
SESSIONS_SIGNALS = Metric(
    "tentalis_sessions_signals_total",
    MetricKind.COUNTER,
    "Implicit signals found, by author, for example signal:reasked (docs/concepts/signals.md).",
    ("sessions",),
    ("author",),
    "records",
)
SESSIONS_ENDED = Metric(
    "tentalis_sessions_ended_total",
    MetricKind.COUNTER,
    "Sessions that ended, by cause: header, call, idle.",
    ("sessions",),
    ("by",),
    "sessions",
)
SESSIONS_DUPLICATES = Metric(
    "tentalis_sessions_duplicates_total",
    MetricKind.COUNTER,
    "Duplicate events on the log, which changed nothing.",
    ("sessions",),
    unit="records",
)
SESSIONS_LATE = Metric(
    "tentalis_sessions_late_turns_total",
    MetricKind.COUNTER,
    "Main turns appended after a later turn of their conversation.",
    ("sessions",),
    unit="turns",
)
SESSIONS_FORGOTTEN = Metric(
    "tentalis_sessions_forgotten_total",
    MetricKind.COUNTER,
    "Events skipped because an erasure request covers them.",
    ("sessions",),
    unit="records",
)
