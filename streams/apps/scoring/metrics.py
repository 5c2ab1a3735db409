"""The metrics of scoring."""

from tentalis.service.metrics import Metric, MetricKind

JUDGE_CALLS = Metric(
    "tentalis_scoring_judge_calls_total",
    MetricKind.COUNTER,
    "Calls of judges and slow verifiers, by result: answered, failed, timeout, away (unavailable).",
    ("scoring",),
    ("result",),
    "calls",
)
JUDGE_UNKNOWN = Metric(
    "tentalis_scoring_judge_unknown_total",
    MetricKind.COUNTER,
    "Results that judges and slow verifiers left without a reward.",
    ("scoring",),
    unit="results",
)
JUDGE_VOTES = Metric(
    "tentalis_scoring_judge_votes_total",
    MetricKind.COUNTER,
    "Votes of judges: read, unparsable (an answer without a grade), missing (failed, too late or cut off), cancelled "
    "(the other votes had decided).",
    ("scoring",),
    ("scorer", "result"),
    "votes",
)
JUDGE_UNPARSABLE = Metric(
    "tentalis_scoring_judge_unparsable_ratio",
    MetricKind.GAUGE,
    "Share of a judge's answers since the start that hold no readable grade; cancelled votes are not counted.",
    ("scoring",),
    ("scorer",),
    "ratio",
)
