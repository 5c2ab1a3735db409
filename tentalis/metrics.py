"""Every metric of every process, in one place; docs/metrics.md is written from it (`python -m tentalis.metrics`).

A process exports what names it in `by`, through an `Exporter`. Units are base units (seconds, bytes), counters end in
`_total`, labels have few values: never an id of a task, a rollout or a session.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tentalis.dlq.context import app_version

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram


class Kind(StrEnum):
    """What Prometheus calls the type."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


STREAMS = ("sessions", "scoring", "hinting", "experience", "join", "aggregation")
PROCESSES = (*STREAMS, "gateway", "model", "policies", "worker", "manager", "trainer")

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its full name as it is exported, the processes that export it, and what its labels can be.

    Example: Metric("tentalis_worker_tasks_total", Kind.COUNTER, "Tasks answered.", ("worker",), unit="tasks")
    """

    name: str
    kind: Kind
    help: str
    by: tuple[str, ...]
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()


def _stream(name: str, kind: Kind, text: str, unit: str, *labels: str, **more: Any) -> Metric:
    return Metric(f"tentalis_stream_{name}", kind, text, STREAMS, ("app", *labels), unit, **more)


# Every process

READY = Metric("tentalis_ready", Kind.GAUGE, "1 if /readyz says yes.", PROCESSES)
BUILD_INFO = Metric("tentalis_build_info", Kind.GAUGE, "1, with the version that runs.", PROCESSES, ("version",))
PROCESS_METRICS = (
    Metric(
        "process_cpu_seconds_total",
        Kind.COUNTER,
        "Total user and system CPU time spent in seconds.",
        PROCESSES,
        unit="seconds",
    ),
    Metric("process_resident_memory_bytes", Kind.GAUGE, "Resident memory size in bytes.", PROCESSES, unit="bytes"),
    Metric("process_virtual_memory_bytes", Kind.GAUGE, "Virtual memory size in bytes.", PROCESSES, unit="bytes"),
    Metric(
        "process_start_time_seconds",
        Kind.GAUGE,
        "Start time of the process since unix epoch in seconds.",
        PROCESSES,
        unit="seconds",
    ),
    Metric("process_open_fds", Kind.GAUGE, "Number of open file descriptors.", PROCESSES, unit="descriptors"),
    Metric("process_max_fds", Kind.GAUGE, "Maximum number of open file descriptors.", PROCESSES, unit="descriptors"),
)

# Stream applications

STREAM_RECORDS = _stream("records_total", Kind.COUNTER, "Records whose effects are confirmed.", "records")
STREAM_OUTPUTS = _stream("outputs_total", Kind.COUNTER, "Records produced and confirmed.", "records")
STREAM_CHANGES = _stream("changes_total", Kind.COUNTER, "State changes confirmed on the changelog.", "records")
STREAM_CHANGE_BYTES = _stream("change_bytes_total", Kind.COUNTER, "Bytes of those state changes.", "bytes")
STREAM_DEAD = _stream("dead_letters_total", Kind.COUNTER, "Records sent to a dead-letter topic.", "records")
STREAM_BATCHES = _stream("batches_total", Kind.COUNTER, "Batches completed.", "batches")
STREAM_RETRIES = _stream(
    "retries_total", Kind.COUNTER, "Batches tried again because something outside was away.", "batches"
)
STREAM_BATCH_SECONDS = _stream(
    "batch_seconds", Kind.HISTOGRAM, "From a batch taken up to its effects confirmed.", "seconds", buckets=SECONDS
)
STREAM_STEP_SECONDS = _stream(
    "step_seconds_total", Kind.COUNTER, "Time in the application's own step, decoding included.", "seconds"
)
STREAM_FLUSH_SECONDS = _stream(
    "flush_seconds_total", Kind.COUNTER, "Time until outputs and state changes were confirmed.", "seconds"
)
STREAM_DECODE_SECONDS = _stream("decode_seconds_total", Kind.COUNTER, "Time in decoding records.", "seconds")
STREAM_COMMIT_AGE = _stream(
    "commit_age_seconds", Kind.GAUGE, "How long something acknowledged has waited for its commit.", "seconds"
)
STREAM_RECOVERY = _stream("recovery_seconds", Kind.GAUGE, "Duration of the last recovery.", "seconds")
STREAM_RECOVERED = _stream(
    "recovered_records", Kind.GAUGE, "Changelog records that the last recovery had to read.", "records"
)
STREAM_STATE_BYTES = _stream("state_disk_bytes", Kind.GAUGE, "State on disk, 0 where it lies in memory.", "bytes")
STREAM_STATE_MEMORY = _stream(
    "state_buffers_bytes",
    Kind.GAUGE,
    "Memory of RocksDB's block cache and write buffers, which has a bound; 0 where state lies in memory.",
    "bytes",
)
STREAM_WAITING = _stream(
    "waiting_partitions",
    Kind.GAUGE,
    "Partitions that wait: for something outside (a model server), or for room.",
    "partitions",
)
STREAM_LAG = _stream(
    "lag_records",
    Kind.GAUGE,
    "Records not yet acknowledged, up to the end that the last fetch saw or the broker told within half a minute.",
    "records",
    "topic",
    "partition",
)

# Sessions

SESSIONS_OPEN = Metric(
    "tentalis_sessions_open_sessions", Kind.GAUGE, "Sessions that have not ended.", ("sessions",), unit="sessions"
)
SESSIONS_REMEMBERED = Metric(
    "tentalis_sessions_remembered_sessions",
    Kind.GAUGE,
    "Sessions that have ended, or had side turns alone, and are still remembered.",
    ("sessions",),
    unit="sessions",
)
SESSIONS_OPEN_BYTES = Metric(
    "tentalis_sessions_open_bytes",
    Kind.GAUGE,
    "Bytes of the turns whose next state is awaited.",
    ("sessions",),
    unit="bytes",
)
SESSIONS_PAUSED = Metric(
    "tentalis_sessions_paused_partitions",
    Kind.GAUGE,
    "Partitions that are not read on because as much is open as may be; all of them if the bound is reached.",
    ("sessions",),
    unit="partitions",
)
SESSIONS_TIME = Metric(
    "tentalis_sessions_stream_timestamp_seconds",
    Kind.GAUGE,
    "Stream time, since the epoch: the newest append time folded.",
    ("sessions",),
    ("partition",),
    "seconds",
)
SESSIONS_TURNS = Metric(
    "tentalis_sessions_turns_total", Kind.COUNTER, "Turns by type: main, side.", ("sessions",), ("type",), "turns"
)
SESSIONS_NOT_TRAINABLE = Metric(
    "tentalis_sessions_not_trainable_turns_total",
    Kind.COUNTER,
    "Main turns that got no task, by reason (the first 32 different ones, then other).",
    ("sessions",),
    ("reason",),
    "turns",
)
SESSIONS_NEXT_STATES = Metric(
    "tentalis_sessions_next_states_total",
    Kind.COUNTER,
    "Next states by who spoke: user, tool, other; none: nobody, or the session ended.",
    ("sessions",),
    ("role",),
    "turns",
)
SESSIONS_SIGNALS = Metric(
    "tentalis_sessions_signals_total",
    Kind.COUNTER,
    "Implicit signals found, by author: signal:reasked and so on (docs/signals.md).",
    ("sessions",),
    ("author",),
    "records",
)
SESSIONS_ENDED = Metric(
    "tentalis_sessions_ended_total",
    Kind.COUNTER,
    "Sessions by what ended them: header, call, idle.",
    ("sessions",),
    ("by",),
    "sessions",
)
SESSIONS_DUPLICATES = Metric(
    "tentalis_sessions_duplicates_total",
    Kind.COUNTER,
    "Events that were on the log a second time and changed nothing.",
    ("sessions",),
    unit="records",
)
SESSIONS_LATE = Metric(
    "tentalis_sessions_late_turns_total",
    Kind.COUNTER,
    "Main turns that were appended after a later one of their conversation.",
    ("sessions",),
    unit="turns",
)
SESSIONS_FORGOTTEN = Metric(
    "tentalis_sessions_forgotten_total",
    Kind.COUNTER,
    "Events of somebody who asked to be forgotten, passed over.",
    ("sessions",),
    unit="records",
)

# The join

JOIN_OPEN = Metric("tentalis_join_open_tasks", Kind.GAUGE, "Tasks that wait for halves.", ("join",), unit="tasks")
JOIN_OPEN_BYTES = Metric(
    "tentalis_join_open_bytes", Kind.GAUGE, "Bytes of the halves that open tasks wait with.", ("join",), unit="bytes"
)
JOIN_PAUSED = Metric(
    "tentalis_join_paused_partitions",
    Kind.GAUGE,
    "Partitions that are not read on because as much is open as may be; all of them if the bound is reached.",
    ("join",),
    unit="partitions",
)
JOIN_OLDEST = Metric(
    "tentalis_join_oldest_open_seconds",
    Kind.GAUGE,
    "Age of the oldest open task, by the log's clock.",
    ("join",),
    unit="seconds",
)
JOIN_REMEMBERED = Metric(
    "tentalis_join_remembered_tasks", Kind.GAUGE, "Closed tasks that are still remembered.", ("join",), unit="tasks"
)
JOIN_TIME = Metric(
    "tentalis_join_stream_timestamp_seconds",
    Kind.GAUGE,
    "Stream time, since the epoch: the newest append time folded.",
    ("join",),
    ("partition",),
    "seconds",
)
JOIN_OUTCOMES = Metric(
    "tentalis_join_outcomes_total",
    Kind.COUNTER,
    "Outcomes by what became of the sample: rl, opd, both (joined), empty, failed, expired, late, superseded.",
    ("join",),
    ("kind",),
    "samples",
)
JOIN_ROLLOUTS = Metric("tentalis_join_rollouts_total", Kind.COUNTER, "Rollouts emitted.", ("join",), unit="records")
JOIN_GIVEN_UP = Metric(
    "tentalis_join_timeouts_total",
    Kind.COUNTER,
    "Waits given up: for the hint of a sample (hint), for a whole group (deadline).",
    ("join",),
    ("wait",),
    "waits",
)
JOIN_DUPLICATES = Metric(
    "tentalis_join_duplicates_total",
    Kind.COUNTER,
    "Halves that were on the log a second time, or delivered again, and changed nothing.",
    ("join",),
    unit="records",
)

# Scoring, hinting, aggregation

SKIPPED = Metric(
    "tentalis_stream_skipped_total",
    Kind.COUNTER,
    "Records passed over because another application dead-letters them.",
    ("scoring", "experience", "aggregation"),
    ("app",),
    "records",
)
PAIRING_WAITING = Metric(
    "tentalis_pairing_waiting_feedback",
    Kind.GAUGE,
    "Feedback without its result that waits for one.",
    ("scoring", "hinting"),
    ("app",),
    "records",
)
PAIRING_REMEMBERED = Metric(
    "tentalis_pairing_remembered_results",
    Kind.GAUGE,
    "Results that feedback yet to come can be paired with.",
    ("scoring", "hinting"),
    ("app",),
    "records",
)
JUDGE_CALLS = Metric(
    "tentalis_scoring_judge_calls_total",
    Kind.COUNTER,
    "Calls of judges and slow verifiers by how they ended: answered, failed, timeout, away.",
    ("scoring",),
    ("result",),
    "calls",
)
JUDGE_UNKNOWN = Metric(
    "tentalis_scoring_judge_unknown_total",
    Kind.COUNTER,
    "Results that judges and slow verifiers left without a reward.",
    ("scoring",),
    unit="results",
)
JUDGE_VOTES = Metric(
    "tentalis_scoring_judge_votes_total",
    Kind.COUNTER,
    "Votes of judges: read, unparsable (answered, but without a grade), missing (failed, too late or cut off), "
    "cancelled (the others had decided).",
    ("scoring",),
    ("scorer", "result"),
    "votes",
)
JUDGE_UNPARSABLE = Metric(
    "tentalis_scoring_judge_unparsable_ratio",
    Kind.GAUGE,
    "Share of a judge's answers since the start from which no grade could be read; votes that were cancelled are none.",
    ("scoring",),
    ("scorer",),
    "ratio",
)
HINTS = Metric(
    "tentalis_hinting_hints_total",
    Kind.COUNTER,
    "Hints made of feedback, by kind: accepted, rejected, none.",
    ("hinting",),
    ("kind",),
    "records",
)
HINTS_NONE = Metric(
    "tentalis_hinting_none_total",
    Kind.COUNTER,
    "Halves without a hint, by why: nothing_said, praise, evidence (of an implicit signal), off, declined, too_short, "
    "too_long, unreadable (no vote of the judge could be read), lost (no vote came).",
    ("hinting",),
    ("reason",),
    "records",
)
HINTS_NO_RESULT = Metric(
    "tentalis_hinting_no_result_total",
    Kind.COUNTER,
    "Feedback that names a task and no more, of which no result is known within the horizon: nothing can be made of "
    "it. Plain traces have none.",
    ("hinting",),
    unit="records",
)
HINTS_REJECTED = Metric(
    "tentalis_hinting_rejected_total",
    Kind.COUNTER,
    "Rejected halves, by why: untrainable (the answer), or of the teacher: other_prompt (the student's prompt cannot "
    "be made again from what is recorded), no_prompt (it held images, or what is recorded cannot be read), "
    "no_user_message, not_served (the version that sampled), refused (by the server), no_scores (not one finite number "
    "per token), no_response.",
    ("hinting",),
    ("reason",),
    "records",
)
EXPERIENCE_OPEN = Metric(
    "tentalis_experience_open_sessions", Kind.GAUGE, "Sessions whose end is awaited.", ("experience",), unit="sessions"
)
EXPERIENCE_LESSONS = Metric(
    "tentalis_experience_lessons_total",
    Kind.COUNTER,
    "Sessions that ended, by what the judge said: accepted, declined, too_short, too_long, unreadable, lost.",
    ("experience",),
    ("said",),
    "sessions",
)
EXPERIENCE_TURNS = Metric(
    "tentalis_experience_turns_total",
    Kind.COUNTER,
    "Turns by what became of them: accepted (scored anew), failed (the teacher), gone (from the log), not_trainable, "
    "forgotten (on request), too_many (in one session), or why the teacher cannot score them, as in "
    "tentalis_hinting_rejected_total.",
    ("experience",),
    ("result",),
    "turns",
)
HINT_VOTES = Metric(
    "tentalis_hinting_judge_votes_total",
    Kind.COUNTER,
    "Votes of hint judges by what they said: accepted, declined, too_short, too_long, unreadable, lost.",
    ("hinting",),
    ("vote",),
    "votes",
)
AGGREGATION_BARE = Metric(
    "tentalis_aggregation_bare_feedback_total",
    Kind.COUNTER,
    "Grades in no window, as they came without the result that they speak of.",
    ("aggregation",),
    unit="records",
)
AGGREGATION_LATE = Metric(
    "tentalis_aggregation_late_total",
    Kind.COUNTER,
    "Records that came after their window was closed.",
    ("aggregation",),
    unit="records",
)
AGGREGATION_DUPLICATES = Metric(
    "tentalis_aggregation_duplicates_total",
    Kind.COUNTER,
    "Records whose event was counted before.",
    ("aggregation",),
    unit="records",
)

# The model server

MODEL_RUNNING = Metric("tentalis_inference_running", Kind.GAUGE, "Samples being decoded now.", ("model",))
MODEL_WAITING = Metric(
    "tentalis_inference_waiting", Kind.GAUGE, "Requests that wait for a place in the batch.", ("model",)
)
MODEL_ADAPTERS = Metric("tentalis_inference_adapters", Kind.GAUGE, "Adapters loaded.", ("model",))
MODEL_PROMPT_TOKENS = Metric(
    "tentalis_inference_prompt_tokens_total",
    Kind.COUNTER,
    "Prompt tokens prefilled (a prompt counts once, whatever n is).",
    ("model",),
    unit="tokens",
)
MODEL_GENERATED_TOKENS = Metric(
    "tentalis_inference_generated_tokens_total", Kind.COUNTER, "Tokens sampled.", ("model",), unit="tokens"
)
MODEL_SCORED_TOKENS = Metric(
    "tentalis_inference_scored_tokens_total", Kind.COUNTER, "Tokens of sequences scored.", ("model",), unit="tokens"
)
MODEL_STEPS = Metric("tentalis_inference_decode_steps_total", Kind.COUNTER, "Decoding steps.", ("model",), unit="steps")
MODEL_ROWS = Metric(
    "tentalis_inference_decode_rows_total",
    Kind.COUNTER,
    "Rows of all decoding steps: divided by the steps, the mean batch size.",
    ("model",),
    unit="rows",
)
MODEL_BUSY = Metric(
    "tentalis_inference_busy_seconds_total", Kind.COUNTER, "Seconds the engine worked.", ("model",), unit="seconds"
)
MODEL_REQUESTS = Metric(
    "tentalis_inference_requests_total",
    Kind.COUNTER,
    "Requests by route and status.",
    ("model",),
    ("path", "status"),
    "requests",
)
MODEL_REQUEST_SECONDS = Metric(
    "tentalis_inference_request_seconds",
    Kind.HISTOGRAM,
    "Seconds to the first byte of the answer.",
    ("model",),
    ("path",),
    "seconds",
    (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 120),
)

# Policies

POLICIES_SERVED = Metric(
    "tentalis_policies_served_version", Kind.GAUGE, "Version that the server serves.", ("policies",), ("policy",)
)
POLICIES_PROMOTED = Metric(
    "tentalis_policies_promoted_version", Kind.GAUGE, "Version that should be served.", ("policies",), ("policy",)
)
POLICIES_ACKS = Metric(
    "tentalis_policies_acknowledgements_total",
    Kind.COUNTER,
    "Acknowledgements written: of a version that is served (ok) or must not be (refused).",
    ("policies",),
    ("result",),
    "records",
)
POLICIES_VERDICTS = Metric(
    "tentalis_policies_verdicts_total",
    Kind.COUNTER,
    "Verdicts of the guard, on candidates and on what is served: passed or refused.",
    ("policies",),
    ("result",),
    "records",
)
POLICIES_SWAP = Metric(
    "tentalis_policies_swap_seconds",
    Kind.HISTOGRAM,
    "Hash checked, adapter loaded, canary compared.",
    ("policies",),
    unit="seconds",
    buckets=SECONDS,
)
POLICIES_CANARY = Metric(
    "tentalis_policies_canary_difference",
    Kind.GAUGE,
    "Largest difference of the last canary's log-probs from the trainer's.",
    ("policies",),
    unit="nats",
)
POLICIES_SERVER_UP = Metric(
    "tentalis_policies_server_up", Kind.GAUGE, "1 if the inference server answered when last asked.", ("policies",)
)

# Workers

WORKER_TASKS = Metric(
    "tentalis_worker_tasks_total",
    Kind.COUNTER,
    "Tasks answered: ok, or failed in at least one sample.",
    ("worker",),
    ("status",),
    "tasks",
)
WORKER_SAMPLES = Metric(
    "tentalis_worker_samples_total",
    Kind.COUNTER,
    "Results written, by status.",
    ("worker",),
    ("status",),
    "samples",
)
WORKER_TOKENS = Metric(
    "tentalis_worker_tokens_total", Kind.COUNTER, "Tokens of the responses written.", ("worker",), unit="tokens"
)
WORKER_SECONDS = Metric(
    "tentalis_worker_generation_seconds",
    Kind.HISTOGRAM,
    "From a task taken up to its results there, waits for a server included.",
    ("worker",),
    unit="seconds",
    buckets=LONG_SECONDS,
)
WORKER_RUNNING = Metric("tentalis_worker_running_tasks", Kind.GAUGE, "Tasks being answered.", ("worker",), unit="tasks")
WORKER_HELD = Metric(
    "tentalis_worker_held_tasks",
    Kind.GAUGE,
    "Tasks of a run that wait because the trainer would throw their answers away.",
    ("worker",),
    unit="tasks",
)
WORKER_QUEUED = Metric(
    "tentalis_worker_queued_tasks", Kind.GAUGE, "Tasks fetched and not begun.", ("worker",), unit="tasks"
)

# The manager

MANAGER_TASKS = Metric("tentalis_manager_tasks_total", Kind.COUNTER, "Tasks issued.", ("manager",), unit="tasks")
MANAGER_FEEDBACK = Metric(
    "tentalis_manager_feedback_total",
    Kind.COUNTER,
    "Feedback given: with something to say (complaint) or nothing (silent).",
    ("manager",),
    ("kind",),
    "records",
)
MANAGER_OPEN = Metric(
    "tentalis_manager_open_samples", Kind.GAUGE, "Samples without an outcome yet.", ("manager",), unit="samples"
)
MANAGER_USABLE = Metric(
    "tentalis_manager_usable_rollouts",
    Kind.GAUGE,
    "Rollouts that the trainer can still take.",
    ("manager",),
    unit="rollouts",
)
MANAGER_PRESSED = Metric(
    "tentalis_manager_back_pressure", Kind.GAUGE, "1 while the trainer asks for no more rollouts.", ("manager",)
)
MANAGER_STEP = Metric(
    "tentalis_manager_served_step", Kind.GAUGE, "Steps of the run that are served, -1 before the first.", ("manager",)
)

# The trainer: rank 0

TRAINER_STEPS = Metric(
    "tentalis_trainer_steps_total", Kind.COUNTER, "Steps completed by this process.", ("trainer",), unit="steps"
)
TRAINER_STEP = Metric("tentalis_trainer_step", Kind.GAUGE, "Last complete step of the run.", ("trainer",))
TRAINER_VERSION = Metric(
    "tentalis_trainer_policy_version", Kind.GAUGE, "Newest version published.", ("trainer",), ("policy",)
)
TRAINER_PROMOTED = Metric(
    "tentalis_trainer_promoted_version",
    Kind.GAUGE,
    "Version promoted, as far as the trainer has heard.",
    ("trainer",),
    ("policy",),
)
TRAINER_STEP_SECONDS = Metric(
    "tentalis_trainer_step_seconds",
    Kind.HISTOGRAM,
    "A step, from its plan to its version published.",
    ("trainer",),
    unit="seconds",
    buckets=LONG_SECONDS,
)
TRAINER_PHASE_SECONDS = Metric(
    "tentalis_trainer_phase_seconds_total",
    Kind.COUNTER,
    "Time by phase of the steps: fetch, pack, forward_backward, optimizer, publish.",
    ("trainer",),
    ("phase",),
    "seconds",
)
TRAINER_TOKENS = Metric(
    "tentalis_trainer_tokens_total", Kind.COUNTER, "Tokens of the rollouts trained on.", ("trainer",), unit="tokens"
)
TRAINER_SPEED = Metric(
    "tentalis_trainer_tokens_per_second", Kind.GAUGE, "Tokens per second of the last step.", ("trainer",)
)
TRAINER_ROLLOUTS = Metric(
    "tentalis_trainer_rollouts_total",
    Kind.COUNTER,
    "Rollouts of completed steps: those with an advantage (trained) and those without (idle).",
    ("trainer",),
    ("use",),
    "rollouts",
)
TRAINER_LOSS = Metric(
    "tentalis_trainer_loss",
    Kind.GAUGE,
    "Loss of the last step by part, unweighted: rl, opd, kl, pair.",
    ("trainer",),
    ("part",),
)
TRAINER_CLIPPED = Metric(
    "tentalis_trainer_clipped_ratio",
    Kind.GAUGE,
    "Share of the last step's tokens whose importance ratio was clipped, by part.",
    ("trainer",),
    ("part",),
    "ratio",
)
TRAINER_ADVANTAGE = Metric(
    "tentalis_trainer_advantage_magnitude",
    Kind.GAUGE,
    "Mean absolute advantage of the last step by part; 0 trains nothing.",
    ("trainer",),
    ("part",),
)
TRAINER_REWARD = Metric("tentalis_trainer_reward", Kind.GAUGE, "Mean reward of the last step.", ("trainer",))
TRAINER_REWARD_STD = Metric(
    "tentalis_trainer_reward_deviation", Kind.GAUGE, "Standard deviation of the last step's rewards.", ("trainer",)
)
TRAINER_AGES = Metric(
    "tentalis_trainer_rollout_ages_total",
    Kind.COUNTER,
    "Rollouts of completed steps by age in versions: 0, 1, 2, 3_4, 5_8, 9_up.",
    ("trainer",),
    ("age",),
    "rollouts",
)
TRAINER_JOINS = Metric(
    "tentalis_trainer_joins_total",
    Kind.COUNTER,
    "Rollouts of completed steps by what they were joined of: rl, opd, both.",
    ("trainer",),
    ("kind",),
    "rollouts",
)
TRAINER_HINTS = Metric(
    "tentalis_trainer_hint_acceptance_ratio",
    Kind.GAUGE,
    "Share of the hints that the last step's tasks asked for that became a teacher.",
    ("trainer",),
    unit="ratio",
)
TRAINER_RATIO = Metric(
    "tentalis_trainer_importance_ratio",
    Kind.GAUGE,
    "Mean ratio of the trained policy's probabilities to the sampler's, last step; 1 on policy.",
    ("trainer",),
    unit="ratio",
)
TRAINER_ESS = Metric(
    "tentalis_trainer_effective_sample_ratio",
    Kind.GAUGE,
    "(sum w)^2 / (n sum w^2) of those ratios, last step; 1 on policy.",
    ("trainer",),
    unit="ratio",
)
TRAINER_MFU = Metric(
    "tentalis_trainer_mfu_ratio",
    Kind.GAUGE,
    "Share of the device's matrix product peak that the last step's forward and backward pass used, causal.",
    ("trainer",),
    unit="ratio",
)
TRAINER_STALENESS = Metric(
    "tentalis_trainer_staleness_versions",
    Kind.GAUGE,
    "Mean age of the last step's rollouts, in versions.",
    ("trainer",),
    unit="versions",
)
TRAINER_KL = Metric(
    "tentalis_trainer_sampler_kl",
    Kind.GAUGE,
    "Estimated KL divergence of the trained policy from the sampler, last step.",
    ("trainer",),
    unit="nats",
)
TRAINER_ENTROPY = Metric(
    "tentalis_trainer_entropy", Kind.GAUGE, "Mean entropy of the policy, last step.", ("trainer",), unit="nats"
)
TRAINER_GRADIENT = Metric(
    "tentalis_trainer_gradient_norm", Kind.GAUGE, "Norm of the last step's gradient.", ("trainer",)
)
TRAINER_RATE = Metric(
    "tentalis_trainer_learning_rate", Kind.GAUGE, "Learning rate of the last step, by its schedule.", ("trainer",)
)
TRAINER_PENDING = Metric(
    "tentalis_trainer_pending_offers",
    Kind.GAUGE,
    "Rollouts read that no plan has considered.",
    ("trainer",),
    unit="rollouts",
)
TRAINER_DROPS = Metric(
    "tentalis_trainer_drops_total",
    Kind.COUNTER,
    "Rollouts that a plan left out, by reason.",
    ("trainer",),
    ("reason",),
    "rollouts",
)
TRAINER_LAG = Metric(
    "tentalis_trainer_lag_records",
    Kind.GAUGE,
    "Records of the rollout topic that were not read when it was last polled.",
    ("trainer",),
    ("partition",),
    "records",
)
TRAINER_DEAD = Metric(
    "tentalis_trainer_dead_letters_total",
    Kind.COUNTER,
    "Records sent to the dead-letter topic, by all ranks.",
    ("trainer",),
    unit="records",
)
TRAINER_WITHOUT_TOPK = Metric(
    "tentalis_trainer_without_topk_total",
    Kind.COUNTER,
    "Rollouts whose hint trains nothing: the loss distils over likeliest tokens, and the teacher was asked for none.",
    ("trainer",),
    unit="rollouts",
)
TRAINER_WAITING = Metric(
    "tentalis_trainer_waiting",
    Kind.GAUGE,
    "1 for what it waits for: rollouts (for a batch), served (for a promotion), window (for its hours); all 0 while it "
    "trains.",
    ("trainer",),
    ("reason",),
)
TRAINER_PRESSURE = Metric(
    "tentalis_trainer_back_pressure", Kind.GAUGE, "1 while it asks for no more rollouts.", ("trainer",)
)
TRAINER_BATCHES = Metric(
    "tentalis_trainer_waiting_batches", Kind.GAUGE, "Full batches that wait for a step.", ("trainer",), unit="batches"
)
TRAINER_TURN = Metric(
    "tentalis_trainer_turn_timestamp_seconds",
    Kind.GAUGE,
    "When the training loop last came round, since the epoch.",
    ("trainer",),
    unit="seconds",
)

# The gateway

GATEWAY_CALLS = Metric(
    "tentalis_gateway_calls_total",
    Kind.COUNTER,
    "Calls passed on, by path and status; broken: a stream that could not be completed.",
    ("gateway",),
    ("path", "status"),
    "calls",
)
GATEWAY_SECONDS = Metric(
    "tentalis_gateway_call_seconds",
    Kind.HISTOGRAM,
    "From a call taken up to its complete answer, the backend's time included.",
    ("gateway",),
    ("path",),
    "seconds",
    buckets=LONG_SECONDS,
)
GATEWAY_TURNS = Metric(
    "tentalis_gateway_turns_total",
    Kind.COUNTER,
    "Turns by kind (main, side), by who decided it and the session (header, body, default, heuristic), and by the sign "
    "that a guess went by.",
    ("gateway",),
    ("kind", "decided_by", "session_by", "sign"),
    "turns",
)
GATEWAY_TRAINABLE = Metric(
    "tentalis_gateway_trainable_total",
    Kind.COUNTER,
    "Turns written down, by whether they can be trained on: yes or no. Each record says why not.",
    ("gateway",),
    ("trainable",),
    "turns",
)
GATEWAY_RECORDED = Metric(
    "tentalis_gateway_recorded_total",
    Kind.COUNTER,
    "What became of turns: log, spool (on disk), drained (from there to the log), lost (its client was refused), "
    "set_aside (a file in the spool that nobody can read: it stays there, as *.damaged), off.",
    ("gateway",),
    ("became",),
    "turns",
)
GATEWAY_SPOOLED = Metric(
    "tentalis_gateway_spooled_turns", Kind.GAUGE, "Turns on disk that wait for the broker.", ("gateway",), unit="turns"
)
GATEWAY_HOLDS = Metric(
    "tentalis_gateway_holds_total",
    Kind.COUNTER,
    "Times that a call waited because its backend was taking new weights.",
    ("gateway",),
    unit="waits",
)

CATALOGUE: tuple[Metric, ...] = tuple(
    metric
    for value in list(globals().values())
    for metric in (value if isinstance(value, tuple) else (value,))
    if isinstance(metric, Metric)
)

Values = float | Mapping[tuple[str, ...], float]
"""A value, or one per combination of labels."""


class Exporter:
    """What one process exports. `constant` labels come first in a metric's labels and need not be given again.

    Metrics are written to (`counter`, `gauge`, `histogram`) or read when somebody asks (`read`).
    """

    def __init__(self, process: str, **constant: str) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics

        disable_created_metrics()  # type: ignore[no-untyped-call] # each counter would have a second series with the time of its creation
        self.process = process
        self.registry = CollectorRegistry()
        self.bound: set[Metric] = set(PROCESS_METRICS)
        self._constant = constant
        self._readers: list[tuple[Metric, Callable[[], Values]]] = []
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self.read(BUILD_INFO, lambda: {(app_version(),): 1.0})

    def counter(self, metric: Metric) -> Counter:
        """A counter to increment."""
        from prometheus_client import Counter

        return self._own(metric, Kind.COUNTER, Counter)  # type: ignore[no-any-return]

    def gauge(self, metric: Metric) -> Gauge:
        """A gauge to set."""
        from prometheus_client import Gauge

        return self._own(metric, Kind.GAUGE, Gauge)  # type: ignore[no-any-return]

    def histogram(self, metric: Metric) -> Histogram:
        """A histogram to observe into."""
        from prometheus_client import Histogram

        return self._own(metric, Kind.HISTOGRAM, Histogram, buckets=metric.buckets)  # type: ignore[no-any-return]

    def read(self, metric: Metric, value: Callable[[], Values]) -> None:
        """A counter or gauge whose value is asked for at each scrape, on the thread that serves it."""
        self._bind(metric)
        self._readers.append((metric, value))

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def collect(self) -> Iterator[Any]:
        """Called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric, read in self._readers:
            family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            series = family(metric.name, metric.help, labels=metric.labels)
            values = read()
            for labels, value in (values if isinstance(values, Mapping) else {(): values}).items():
                series.add_metric([*self._given(metric), *labels], value)
            yield series

    def _given(self, metric: Metric) -> list[str]:
        return [self._constant[label] for label in metric.labels if label in self._constant]

    def _own(self, metric: Metric, kind: Kind, make: Callable[..., Any], **more: Any) -> Any:
        if metric.kind is not kind:
            raise ValueError(f"{metric.name} is a {metric.kind}, not a {kind}")
        self._bind(metric)
        made = make(metric.name, metric.help, metric.labels, registry=self.registry, **more)
        given = self._given(metric)
        return made.labels(*given) if given and len(given) == len(metric.labels) else made

    def _bind(self, metric: Metric) -> None:
        if metric in self.bound:
            raise ValueError(f"{metric.name} is exported twice by {self.process}")
        self.bound.add(metric)


def exported_by(process: str) -> set[Metric]:
    """What the catalogue says that a process exports."""
    return {metric for metric in CATALOGUE if process in metric.by}


_HEAD = """# Metrics

Written by `python -m tentalis.metrics docs/metrics.md` from the catalogue in `tentalis/metrics.py`.
Where they are served, what `/healthz` and `/readyz` promise, and traces: [observability.md](observability.md).

Every series is of one process; sum over processes in the query. A histogram has the series `_bucket`, `_sum` and
`_count`. `process_*` exist on Linux only.
"""


def markdown() -> str:
    """The text of docs/metrics.md."""
    sections: dict[tuple[str, ...], list[Metric]] = {}
    for metric in CATALOGUE:
        sections.setdefault(metric.by, []).append(metric)
    parts = [_HEAD]
    for by, metrics in sections.items():
        title = {PROCESSES: "Every process", STREAMS: "Stream applications"}.get(by, ", ".join(by))
        said = "" if title[0].islower() else f"Exported by {', '.join(by)}.\n\n"
        rows = [
            f"| `{m.name}` | {m.kind} | {', '.join(f'`{label}`' for label in m.labels)} | {m.unit} | {m.help} |"
            for m in metrics
        ]
        parts.append(
            "\n".join([f"## {title}\n\n{said}| name | kind | labels | unit | what |", "|---|---|---|---|---|", *rows])
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
    else:
        sys.stdout.write(markdown())
