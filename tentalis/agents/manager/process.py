"""The manager's process: reads the log, writes the tasks and feedback that are due, and ends when its run is done."""

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from schemas import topics
from schemas.records import BackPressure, Feedback, Record, Result, Task
from tentalis.agents.environments.registry import has_episodes
from tentalis.agents.manager import metrics
from tentalis.agents.manager.core import ROUND, ManagerState, feedback_id_of, task_id_of
from tentalis.agents.manager.curriculum import Curriculum, SolveRateRule
from tentalis.agents.scenarios import Scenario, make_scenario
from tentalis.agents.scenarios.prompts import PromptScenario
from tentalis.kafka import topology
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import Stored, read_to_end
from tentalis.kafka.errors import RecordTooLarge
from tentalis.kafka.producer import Publisher
from tentalis.kafka.reader import Reader, decoded
from tentalis.kafka.topic_watch import ending_on_changes
from tentalis.policies.candidates import issue_metadata
from tentalis.service import tracing
from tentalis.service.exit_codes import ExitCode
from tentalis.service.health import Health, LoopWatch, served
from tentalis.service.heartbeat import Heart
from tentalis.service.lifecycle import Unmendable, run_service
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

POLL_S = 0.1
STUCK_S = 300.0
FEEDBACK_S = 1.0
"""Seconds after which a turn gives no more feedback: a hint may come from a slow function of the user. The process
shows its supervisor that it works between turns, and issues tasks then."""
TOPICS = (
    topics.RUNS,
    topics.POLICIES,
    topics.POLICY_ACKS,
    topics.BATCHES,
    topics.TASKS,
    topics.RESULTS,
    topics.FEEDBACK,
    topics.OUTCOMES,
)


@dataclass(frozen=True, slots=True)
class ManagerOptions:
    """Options of a manager. `prompts`: a folder that `tentalis learn` prepared, instead of a scenario. `starved_s`:
    seconds that the trainer may have a full batch without planning a step; then the manager issues one more task.
    `curriculum`: chooses prompts by their solve rates; None: each prompt once, then all in a new order."""

    run_id: str
    scenario: str
    n_samples: int | None = None
    starved_s: float = 60.0
    prompts: Path | None = None
    curriculum: SolveRateRule | None = None

    @property
    def manager_id(self) -> str:
        return f"manager-{self.scenario if self.prompts is None else PromptScenario.name}"


class ManagerMetrics:
    """The metrics of a manager."""

    def __init__(self) -> None:
        self.exporter = exporter = Exporter("manager")
        self.tasks = exporter.counter(metrics.MANAGER_TASKS)
        self.feedback = exporter.counter(metrics.MANAGER_FEEDBACK)
        self._open = exporter.gauge(metrics.MANAGER_OPEN)
        self._usable = exporter.gauge(metrics.MANAGER_USABLE)
        self._step = exporter.gauge(metrics.MANAGER_STEP)
        self.pressed = exporter.gauge(metrics.MANAGER_PRESSED)
        self._prompts = exporter.gauge(metrics.MANAGER_PROMPTS)

    def turned(self, state: ManagerState) -> None:
        """Updates the gauges after a turn of the loop."""
        self._open.set(state.running)
        self._usable.set(state.usable)
        self._step.set(-1 if state.served_step is None else state.served_step)

    def issued(self, count: int, curriculum: Curriculum | None) -> None:
        """Counts tasks, and updates the pools of the curriculum."""
        self.tasks.inc(count)
        if curriculum is not None:
            for pool, prompts in curriculum.pools().items():
                self._prompts.labels(pool.value).set(prompts)


def send_feedback(publisher: Publisher, feedback: Feedback, traceparent: str | None) -> None:
    """Queues feedback. If feedback and result do not fit into one record, sends the feedback without its result.

    The stream applications pair the two again (docs/concepts/feedback.md). Raises RecordTooLarge if the feedback alone
    does not fit either.
    """
    try:
        publisher.send(topics.FEEDBACK, feedback, traceparent=traceparent)
    except RecordTooLarge as error:
        log.warning("sending feedback without its result: %s", error)
        publisher.send(topics.FEEDBACK, feedback.model_copy(update={"result": None}), traceparent=traceparent)


class Manager:
    """The manager of one run. Its state comes only from the log."""

    def __init__(self, options: ManagerOptions, settings: Settings, scenario: Scenario) -> None:
        self._options = options
        self._scenario = scenario
        self._n_samples = options.n_samples or scenario.n_samples
        self._settings, self._codec = settings, make_codec(settings)
        curriculum = None
        if options.curriculum is not None:
            curriculum = Curriculum(options.run_id, scenario.prompt_count, options.curriculum)
        self.state = ManagerState(
            options.run_id,
            owes_feedback=scenario.owes_feedback,
            curriculum=curriculum,
            # An episode acts between its turns, so it begins after the decision.
            for_candidates=not has_episodes(scenario.environment),
        )
        self._reader = Reader(settings, TOPICS, self._codec)
        self._results_read: dict[int, int] = {}
        """The next offset of each partition of the results."""
        self._publisher = Publisher(settings, f"tentalis/{options.manager_id}", self._codec)
        self._moved = time.monotonic()
        self._pressed = False
        self._missing: str | None = None
        self.turns = LoopWatch(STUCK_S)
        self.metrics = ManagerMetrics()
        self._traces: dict[str, str | None] = {}

    def step(self) -> bool:
        """Reads new records, then writes the tasks and feedback that are due. Returns True when the run is done.

        Raises Unmendable if there is nothing to learn (`ManagerState.hopeless`).
        """
        self.turns.turned()
        for stored, record in self._reader.poll(POLL_S):
            if stored.topic == topics.RESULTS:
                self._results_read[stored.partition] = stored.offset + 1
            if self.state.apply(record):
                self._moved = time.monotonic()
                if tracing.enabled():
                    self._follow(stored, record)
        # Until the whole log is read, feedback that looks owed may already be on it.
        if not self._reader.caught_up:
            return False
        if (missing := self.state.missing) != self._missing:
            self._missing = missing
            if missing is not None:
                log.info("run %s: waiting for %s", self._options.run_id, missing)
        self._answer()
        if (hopeless := self.state.hopeless) is not None:
            raise Unmendable(hopeless)
        due = self.state.to_issue(self._n_samples)
        if not due and self.state.starved and time.monotonic() - self._moved > self._options.starved_s:
            log.warning("the trainer has a full batch but no plan for step %d: one more task", self.state.planned + 1)
            due = 1
        pressed = self.state.pressed(now_ms())
        if pressed is not None:
            # The trainer would discard the answers, so no task is issued. This time does not count as starved.
            due, self._moved = 0, time.monotonic()
        if due:
            self._issue(due)
        self._told(pressed)
        self.metrics.turned(self.state)
        self.metrics.pressed.set(float(pressed is not None))
        return self.state.finished and self._has_all_results()

    def _has_all_results(self) -> bool:
        """Returns True if the run is done with all results too. Topics are read one by one: the outcome of a sample may
        come before its result, to which the manager still owes feedback."""
        for _, record in decoded(read_to_end(self._settings, topics.RESULTS, start=self._results_read), self._codec):
            self.state.apply(record)
        return self.state.finished

    def not_ready(self) -> str | None:
        """Returns the reason why the manager cannot issue tasks or feedback yet, or None."""
        return None if self._reader.caught_up else "the log has not been read to its end yet"

    def _told(self, pressed: BackPressure | None) -> None:
        if (pressed is not None) != self._pressed:
            self._pressed = pressed is not None
            log.info("%s", "issuing tasks again" if pressed is None else f"no more tasks: {pressed.reason}")

    def _follow(self, stored: Stored, record: Record) -> None:
        """Remembers the trace of a result, so that its feedback continues it."""
        if isinstance(record, Result):
            self._traces[record.result_id] = tracing.continued(stored.headers, record.task.task_id)
        elif isinstance(record, Feedback) and record.result is not None:
            self._traces.pop(record.result.result_id, None)

    def _answer(self) -> None:
        until = time.monotonic() + FEEDBACK_S
        given = complaints = 0
        for result in self.state.owed():
            feedback = self._scenario.feedback(result, feedback_id_of(result.result_id), event_time=now_ms())
            with tracing.span("feedback", parent=self._traces.pop(result.result_id, None)) as span:
                send_feedback(self._publisher, feedback, span.traceparent)
            self.state.apply(feedback)
            self.metrics.feedback.labels("complaint" if feedback.text else "silent").inc()
            given, complaints = given + 1, complaints + bool(feedback.text)
            if time.monotonic() >= until:
                break
        if given:
            self._publisher.flush()
            log.info("feedback on %d results, %d complaints", given, complaints)

    def _issue(self, count: int) -> None:
        for _ in range(count):
            task = self._next_task()
            with tracing.span("task", root=task.task_id, producer=True, task_id=task.task_id) as span:
                self._publisher.send(topics.TASKS, task, traceparent=span.traceparent)
            self.state.apply(task)
        self._publisher.flush()
        self.metrics.issued(count, self.state.curriculum)
        self._moved = time.monotonic()
        log.info(
            "issued %d tasks for version %s; %d usable rollouts wait for the trainer",
            count,
            self.state.issue_version,
            self.state.usable,
        )

    def _next_task(self) -> Task:
        state = self.state
        version = state.issue_version
        assert state.manifest is not None and version is not None
        choice, rule = state.choose(self._n_samples), self._options.curriculum
        question = self._scenario.question(state.run_id, state.next_index if choice is None else choice.prompt)
        chosen = {} if choice is None or rule is None else choice.metadata(rule)
        return Task(
            task_id=task_id_of(state.run_id, state.next_index),
            event_time=now_ms(),
            policy=state.manifest.policy,
            environment=self._scenario.environment,
            messages=question.messages,
            n_samples=self._n_samples,
            sampling=self._scenario.sampling,
            verifier=question.verifier,
            terms=state.terms(self._scenario.terms),
            manager_id=self._options.manager_id,
            run_id=state.run_id,
            user_id=question.user_id,
            metadata={
                **question.metadata,
                **chosen,
                ROUND: str(state.step_of(version)),
                **issue_metadata(state.manifest.policy, version),
            },
        )

    def close(self) -> None:
        """Closes the reader."""
        self._reader.close()


def run(
    settings: Settings,
    *,
    scenario: str,
    run_id: str,
    n_samples: int | None = None,
    metrics_port: int | None = None,
    prompts: Path | None = None,
    curriculum: SolveRateRule | None = None,
) -> int:
    """Runs the manager until the run is done (exit code 0) or until SIGTERM.

    After SIGTERM the exit code is STOPPED, so that a supervisor does not take the run for finished. `n_samples` per
    task defaults to the scenario's. `prompts`: a folder that `tentalis learn` prepared, instead of the scenario.
    `curriculum`: chooses the prompts. Raises PortTaken, BadPrompts.
    """
    options = ManagerOptions(run_id, scenario, n_samples, prompts=prompts, curriculum=curriculum)
    watched = topology.named("manager").used_topics
    body = ending_on_changes(settings, watched, lambda stop: _manage(options, settings, metrics_port, stop))
    return run_service("manager", body, stopped=ExitCode.STOPPED)


def scenario_of(options: ManagerOptions, settings: Settings) -> Scenario:
    """Returns the scenario of a manager. Raises UnknownScenario, BadPrompts."""
    if options.prompts is not None:
        return PromptScenario(options.prompts)
    return make_scenario(options.scenario, settings.data)


def _manage(options: ManagerOptions, settings: Settings, port: int | None, stop: threading.Event) -> None:
    manager, heart = Manager(options, settings, scenario_of(options, settings)), Heart()
    try:
        with served(Health(manager.metrics.exporter, manager.not_ready, manager.turns.stuck), port):
            while not stop.is_set():
                heart.beat()
                if manager.step():
                    log.info("run %s is done", options.run_id)
                    return
    finally:
        manager.close()
