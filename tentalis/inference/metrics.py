"""The metrics of the model server."""

from tentalis.service.metrics import Metric, MetricKind

MODEL_RUNNING = Metric("tentalis_inference_running", MetricKind.GAUGE, "Samples being decoded now.", ("model",))
MODEL_WAITING = Metric(
    "tentalis_inference_waiting", MetricKind.GAUGE, "Requests that wait for a place in the batch.", ("model",)
)
MODEL_ADAPTERS = Metric("tentalis_inference_adapters", MetricKind.GAUGE, "Adapters loaded.", ("model",))
MODEL_PROMPT_TOKENS = Metric(
    "tentalis_inference_prompt_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens computed (a prompt counts once, for any n).",
    ("model",),
    unit="tokens",
)
MODEL_REUSED_TOKENS = Metric(
    "tentalis_inference_reused_tokens_total",
    MetricKind.COUNTER,
    "Prompt tokens that an ended sequence began with, so that they were not computed again.",
    ("model",),
    unit="tokens",
)
MODEL_GENERATED_TOKENS = Metric(
    "tentalis_inference_generated_tokens_total", MetricKind.COUNTER, "Tokens sampled.", ("model",), unit="tokens"
)
MODEL_SCORED_TOKENS = Metric(
    "tentalis_inference_scored_tokens_total",
    MetricKind.COUNTER,
    "Tokens of sequences scored.",
    ("model",),
    unit="tokens",
)
MODEL_STEPS = Metric(
    "tentalis_inference_decode_steps_total", MetricKind.COUNTER, "Decoding steps.", ("model",), unit="steps"
)
MODEL_ROWS = Metric(
    "tentalis_inference_decode_rows_total",
    MetricKind.COUNTER,
    "Rows of all decoding steps; divided by the steps, the mean batch size.",
    ("model",),
    unit="rows",
)
MODEL_DRAFTED_TOKENS = Metric(
    "tentalis_inference_drafted_tokens_total",
    MetricKind.COUNTER,
    "Tokens that were guessed from the text before them, and computed.",
    ("model",),
    unit="tokens",
)
MODEL_ACCEPTED_TOKENS = Metric(
    "tentalis_inference_accepted_tokens_total",
    MetricKind.COUNTER,
    "Guessed tokens that were sampled; divided by the guessed ones, the share that saved a step.",
    ("model",),
    unit="tokens",
)
MODEL_BUSY = Metric(
    "tentalis_inference_busy_seconds_total",
    MetricKind.COUNTER,
    "Time that the engine was busy.",
    ("model",),
    unit="seconds",
)
MODEL_REQUESTS = Metric(
    "tentalis_inference_requests_total",
    MetricKind.COUNTER,
    "Requests by route and status.",
    ("model",),
    ("path", "status"),
    "requests",
)
MODEL_REQUEST_SECONDS = Metric(
    "tentalis_inference_request_seconds",
    MetricKind.HISTOGRAM,
    "Time to the first byte of the response.",
    ("model",),
    ("path",),
    "seconds",
    (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120),
)
