"""The metrics of the manager."""

from tentalis.service.metrics import Metric, MetricKind

MANAGER_TASKS = Metric("tentalis_manager_tasks_total", MetricKind.COUNTER, "Tasks issued.", ("manager",), unit="tasks")
MANAGER_FEEDBACK = Metric(
    "tentalis_manager_feedback_total",
    MetricKind.COUNTER,
    "Feedback given: with text (complaint) or without (silent).",
    ("manager",),
    ("kind",),
    "records",
)
MANAGER_OPEN = Metric(
    "tentalis_manager_open_samples", MetricKind.GAUGE, "Samples without an outcome yet.", ("manager",), unit="samples"
)
MANAGER_USABLE = Metric(
    "tentalis_manager_usable_rollouts",
    MetricKind.GAUGE,
    "Rollouts that the trainer can still take.",
    ("manager",),
    unit="rollouts",
)
MANAGER_PRESSED = Metric(
    "tentalis_manager_back_pressure", MetricKind.GAUGE, "1 while the trainer asks for no more rollouts.", ("manager",)
)
MANAGER_STEP = Metric(
    "tentalis_manager_served_step",
    MetricKind.GAUGE,
    "Steps of the run that are served; -1 before the first.",
    ("manager",),
)
MANAGER_PROMPTS = Metric(
    "tentalis_manager_prompts",
    MetricKind.GAUGE,
    "Prompts of the curriculum by what their solve rate says: unseen, learnable, easy, hard, equal or unscored.",
    ("manager",),
    ("pool",),
    "prompts",
)
