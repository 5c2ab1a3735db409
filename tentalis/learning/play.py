"""`tentalis learn`: begins or continues a run, starts the stack, shows the progress and compares before with after."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from schemas import topics
from tentalis.agents.manager.core import Pace
from tentalis.agents.manager.curriculum import Pool
from tentalis.agents.scenarios.prompt_file import Prompt
from tentalis.agents.scenarios.prompts import PromptScenario
from tentalis.demo.answers import checked
from tentalis.demo.play import STOP_S, log_to, printable
from tentalis.demo.prepare import prepare
from tentalis.demo.runs import Configured, unused_applications, whole_models
from tentalis.demo.stats import RunStats
from tentalis.demo.view import Snapshot
from tentalis.demo.watch import Interrupted, Processes, RunWatch
from tentalis.kafka.codec import make_codec
from tentalis.kafka.lag import groups_of
from tentalis.kafka.reader import records_to_end
from tentalis.learning import runs
from tentalis.learning.compare import compare
from tentalis.learning.environments import OF_CONVERSATIONS, episodes_of, programs_play
from tentalis.learning.findings import judge_rewards
from tentalis.learning.function_log import FunctionLog
from tentalis.learning.options import STDIN, LearnOptions
from tentalis.learning.pools import curriculum_arguments, pools_of
from tentalis.learning.prepare import copy_stdin
from tentalis.learning.result import LearnResult, SamplePair, emit_result
from tentalis.learning.run_cluster import ClusterRecord, check_cluster
from tentalis.learning.runs import Data, LearnRun
from tentalis.learning.sample import CONCURRENT, Asked, ScoredAnswer, base_model, scored_answers
from tentalis.rewards.functions.scorer import FunctionScorer
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

    from tentalis.local.stack import StackOptions
    from tentalis.local.state import StateDir

# Answers after which a useless reward is reported, while the run continues.
JUDGED_ANSWERS = 64
SHOWN = 3
MANY_UNKNOWN = 0.125
"""Share of answers with an unknown reward from which on it is reported."""
WHY_UNKNOWN = (
    "`tentalis logs scoring` has the reasons. A reward that is not between -1 and 1 needs --reward-range LOW,HIGH."
)


def learn(options: LearnOptions, settings: Settings, configured: Configured) -> int:
    """Trains a run to its end, for the command. Returns 0, or INTERRUPTED after Ctrl-C; raises what `train` raises."""
    from rich.console import Console

    from tentalis.local.shutdown import signals_unwind, stop_signals

    console = Console(stderr=True, markup=False, highlight=False)
    log_to(console)
    with signals_unwind():
        concluded = train(options, settings, configured, console, stop_signals)
    return ExitCode.OK if concluded else ExitCode.INTERRUPTED


def train(
    options: LearnOptions,
    settings: Settings,
    configured: Configured,
    console: "Console",
    stopping: Callable[[], AbstractContextManager[threading.Event]],
    view: Callable[[Snapshot], None] | None = None,
) -> bool:
    """Begins or continues a run and trains it to its end; returns False if it was stopped before.

    Args:
        stopping: yields the event that stops the run, for the time in which the processes run.
        view: shows the progress, instead of the console.

    Raises LearnError, RunFailed and what the stack raises.
    """
    from tentalis.local.stack import build_stack
    from tentalis.local.state import StateDir
    from tentalis.local.supervisor import Supervisor

    with StateDir(settings.home) as state:
        run = _opened(state, options, settings, configured, console)
        record = ClusterRecord(run, settings)
        scenario = PromptScenario(run.prompts)
        begun = "continuing" if run.resumed else "beginning"
        console.print(f"{begun} run {run.run_id} in {state.path}", soft_wrap=True)
        stack = build_stack(stack_options(state, settings, run, scenario, options))
        with stopping() as stop:
            supervisor = Supervisor(state, stack.specs)
            functions = FunctionLog(state.folder("logs"))
            supervisor.start()
            try:
                show = LearnShow(
                    run,
                    options,
                    scenario,
                    stack.settings,
                    stack.server,
                    supervisor,
                    console,
                    stop,
                    functions,
                    record,
                    view,
                )
                show.play()
            except Interrupted:
                console.print("stopping ...", soft_wrap=True)
            finally:
                supervisor.stop(STOP_S)
                _close_scorer(scenario)
            if not show.concluded:
                console.print(f"stopped. `{options.command}` continues run {run.run_id}", soft_wrap=True)
        return show.concluded


def stack_options(
    state: "StateDir", settings: Settings, run: LearnRun, scenario: PromptScenario, options: LearnOptions
) -> "StackOptions":
    """Returns the options of the stack that trains a run."""
    from tentalis.local.stack import StackOptions

    return StackOptions(
        state=state,
        settings=settings,
        model=model_of(run),
        trainer_config=run.config,
        environment=scenario.environment,
        worker=("--allow-unsandboxed",) if options.allow_unsandboxed else (),
        environment_file=run.environment_file,
        manager=("--prompts", str(run.prompts), "--run", run.run_id, *curriculum_arguments(run.curriculum)),
        scorers=run.scorers if run.scorers.exists() else None,
        hinters=run.hinters if run.hinters.exists() else None,
        gateway=scenario.policy if programs_play(scenario.environment) else None,
        whole_models=whole_models(run.config),
        without=unused_applications(run.config) | OF_CONVERSATIONS,
    )


def _close_scorer(scenario: PromptScenario) -> None:
    """Ends the process of the reward functions, which the comparison started in this process."""
    scorer = ENVIRONMENTS[scenario.environment][scenario.set.scorer]
    if isinstance(scorer, FunctionScorer):
        scorer.close()


def data_of(state: "StateDir", options: LearnOptions) -> Data:
    """Returns the places of the data; standard input is copied into the state directory first. Raises LearnError."""
    held_out = None if options.held_out is None else Path(options.held_out)
    if options.source != STDIN:
        return Data(Path(options.source), held_out)
    return Data(copy_stdin(state.folder("runs") / "learn-stdin.jsonl"), held_out)


def model_of(run: LearnRun) -> Path:
    """Returns the folder of a run's base model."""
    return Path(yaml.safe_load(run.config.read_text(encoding="utf-8"))["base_model"])


def _opened(
    state: "StateDir", options: LearnOptions, settings: Settings, configured: Configured, console: "Console"
) -> LearnRun:
    def remark(text: str) -> None:
        console.print(text, soft_wrap=True)

    def model() -> Path:
        return prepare(console, options.model, settings.cache, own_broker=settings.bootstrap is None)

    folder = state.folder("runs")
    kind = runs.kind_of(options)
    data = data_of(state, options)
    found = None if options.new else runs.unfinished(folder, kind)
    if found is None:
        return runs.begin(folder, options, data, time.time(), configured, model, remark)
    check_cluster(found, settings)
    run = runs.continued(found, data)
    model()  # may have been removed from the cache since
    return run


@dataclass
class LearnShow:
    """Watches one run, then compares the base model with the newest adapter on held-out prompts."""

    run: LearnRun
    options: LearnOptions
    scenario: PromptScenario
    settings: Settings
    server: str
    processes: Processes
    console: "Console"
    stop: threading.Event
    functions: FunctionLog
    record: ClusterRecord
    view: Callable[[Snapshot], None] | None = None
    concluded: bool = False
    watch: RunWatch = field(init=False)

    def __post_init__(self) -> None:
        started = self.processes.status().keys()
        self.watch = RunWatch(
            self.run.run_id,
            self.options.steps,
            self.scenario.environment,
            self.scenario.policy,
            self.settings,
            self.processes,
            self.console,
            self.stop,
            groups_of(self.scenario.environment, self.scenario.policy, started),
            "tentalis learn",
            self._notice,
            self.view,
        )
        self._judged = False
        self._equal_said: set[int] = set()

    def play(self) -> None:
        """Watches the run to its end and shows the result. Raises Interrupted or RunFailed."""
        try:
            self.watch.follow()
        finally:
            if said := self._of_functions():
                self.console.print(said, soft_wrap=True)
        self._conclude()

    def _notice(self, stats: RunStats) -> str | None:
        """Returns what the functions print and how they fail, and a new remark on the rewards; None for neither.
        Records the Kafka of the run."""
        self.record.update(stats.begun)
        return "\n".join(filter(None, (self._of_functions(), self._of_rewards(stats)))) or None

    def _of_functions(self) -> str | None:
        return printable("\n".join(self.functions.new())) or None

    def _of_rewards(self, stats: RunStats) -> str | None:
        """Returns a new remark on the rewards, or None. Where hints alone train, there is none."""
        if self.options.trained == "opd":
            return None
        return self._useless(stats) or self._equal(stats)

    def _equal(self, stats: RunStats) -> str | None:
        """Returns the sign that a run is about to end with nothing to learn: half of the batches that its newest
        version may sample have equal rewards. Once for each version."""
        scores = stats.scores()
        if stats.config is None or not scores or scores[-1].version in self._equal_said:
            return None
        pace = Pace.of_config(stats.config, stats.run_id)
        version = scores[-1].version
        most = pace.max_equal_batches * (1 + pace.max_staleness)
        batches = stats.equal_answers(version, self.options.group) // pace.batch_rollouts
        if not pace.drops_equal or pace.distils or batches < max(1, most // 2):
            return None
        self._equal_said.add(version)
        return (
            f"The last {batches} batches of version {version} had equal rewards for all answers to a prompt, from "
            f"which nothing can be learned. After {most} of them the run ends (loss.max_equal_batches)."
        )

    def _useless(self, stats: RunStats) -> str | None:
        """Returns what is wrong with the reward after the first JUDGED_ANSWERS answers, if the reward is useless, never
        reaches its middle, or is unknown for many."""
        scored = stats.outcomes.total()
        if self._judged or scored < JUDGED_ANSWERS:
            return None
        self._judged = True
        rewards = stats.rewards([score.version for score in stats.scores()])
        unknown = [None] * max(0, scored - len(rewards))
        found = judge_rewards([[*rewards, *unknown]], self.options.reward_range is not None)
        if len(unknown) >= MANY_UNKNOWN * scored:
            return "\n".join((*found.remarks, WHY_UNKNOWN))
        return "\n".join(found.remarks) if found.useless or not found.solved else None

    def _conclude(self) -> None:
        stats = self.watch.stats
        newest = f"{stats.policy}@v{stats.acknowledged}"
        prompts = self.scenario.held_out(self.options.compared)
        self.console.print(f"comparing the base model with {newest} on {len(prompts)} held-out prompts", soft_wrap=True)
        before, after = checked(self._answers(newest, prompts), self.watch.check)
        result = LearnResult(
            run_id=self.run.run_id,
            stats=stats,
            steps=self.options.steps,
            newest=newest,
            comparison=compare([each.reward for each in before], [each.reward for each in after]),
            samples=[
                SamplePair(prompt.messages[-1][1], *pair)
                for prompt, *pair in zip(prompts[:SHOWN], before, after, strict=False)
            ],
            problems=[each.problem for each in (*before, *after) if each.problem],
            wall_seconds=self.watch.elapsed,
            start_seconds=self.watch.start_seconds,
            resumed=self.run.resumed,
            prompts=f"{self.options.source}: {self.scenario.set.prompts}, {self.scenario.set.held_out} held out",
            rewards=self._rewards(),
            config=self.run.config.read_text(encoding="utf-8"),
            pools=self._pools(),
        )
        emit_result(result, self.settings.home / "reports" / self.run.run_id, self.options.emit, self.console)
        self.run.finish()
        self.concluded = True
        for name, reason in self.processes.broken().items():
            self.console.print(f"{name}: {reason}", soft_wrap=True)

    def _rewards(self) -> tuple[str, ...]:
        """Returns what gives the rewards, in words."""
        if self.options.judge is not None:
            return (f"judge {self.options.judge}",)
        described = f"{self.scenario.set.scorer} of the environment {self.scenario.environment}"
        return self.options.rewards or (described,)

    def _pools(self) -> Mapping[Pool, int] | None:
        """Returns the number of prompts in each pool of the curriculum now; None without one."""
        rule = self.run.curriculum
        if rule is None:
            return None
        records = records_to_end(self.settings, (topics.TASKS, topics.OUTCOMES), make_codec(self.settings))
        return pools_of(self.run.run_id, self.scenario.prompt_count, rule, records)

    async def _answers(self, newest: str, prompts: list[Prompt]) -> tuple[list[ScoredAnswer], list[ScoredAnswer]]:
        """Returns the greedy answers of the base model and of the newest adapter."""
        from tentalis.inference.client import OpenAIClient
        from tentalis.policies.evaluation import all_or_none

        greedy = Asked(n=1, temperature=0.0, make=episodes_of(self.options))
        async with OpenAIClient(self.server, timeout=600.0) as client:
            base = await base_model(client)
            slots = asyncio.Semaphore(CONCURRENT)
            before, after = await all_or_none(
                *(scored_answers(client, model, self.scenario, prompts, greedy, slots) for model in (base, newest))
            )
        return [group[0] for group in before], [group[0] for group in after]
