"""The metrics of hinting."""

from tentalis.service.metrics import Metric, MetricKind

HINTS = Metric(
    "tentalis_hinting_hints_total",
    MetricKind.COUNTER,
    "Hints made from feedback, by kind: accepted, rejected, none.",
    ("hinting",),
    ("kind",),
    "records",
)
HINTS_NONE = Metric(
    "tentalis_hinting_none_total",
    MetricKind.COUNTER,
    "Halves without a hint, by reason: nothing_said, praise, evidence (of an implicit signal), off, declined, "
    "too_short, too_long, unreadable (no vote of the judge could be read), lost (no vote came).",
    ("hinting",),
    ("reason",),
    "records",
)
HINTS_NO_RESULT = Metric(
    "tentalis_hinting_no_result_total",
    MetricKind.COUNTER,
    "Feedback that names only a task of which no result is known within the horizon; it gives no hint. Plain traces "
    "have no result.",
    ("hinting",),
    unit="records",
)
HINTS_REJECTED = Metric(
    "tentalis_hinting_rejected_total",
    MetricKind.COUNTER,
    "Rejected halves, by reason: untrainable (the answer), or a reason of the teacher: other_prompt (the student's "
    "prompt cannot be rebuilt from the record), no_prompt (it held images, or the record cannot be read), "
    "no_user_message, not_served (the version that sampled), refused (by the server), no_scores (not one finite "
    "number per token), no_response.",
    ("hinting",),
    ("reason",),
    "records",
)
HINT_VOTES = Metric(
    "tentalis_hinting_judge_votes_total",
    MetricKind.COUNTER,
    "Votes of hint judges, by verdict: accepted, declined, too_short, too_long, unreadable, lost.",
    ("hinting",),
    ("vote",),
    "votes",
)
