"""The metrics of learning from experience."""

from tentalis.service.metrics import Metric, MetricKind

EXPERIENCE_OPEN = Metric(
    "tentalis_experience_open_sessions",
    MetricKind.GAUGE,
    "Sessions whose end is awaited.",
    ("experience",),
    unit="sessions",
)
EXPERIENCE_LESSONS = Metric(
    "tentalis_experience_lessons_total",
    MetricKind.COUNTER,
    "Sessions that ended, by the judge's verdict: accepted, declined, too_short, too_long, unreadable, lost.",
    ("experience",),
    ("said",),
    "sessions",
)
EXPERIENCE_TURNS = Metric(
    "tentalis_experience_turns_total",
    MetricKind.COUNTER,
    "Turns by result: accepted (scored again), failed (the teacher), gone (from the log), not_trainable, forgotten "
    "(on request), too_many (in one session), other_conversation (with the same beginning, in a session that the "
    "gateway guessed), or a reason of the teacher as in tentalis_hinting_rejected_total.",
    ("experience",),
    ("result",),
    "turns",
)
