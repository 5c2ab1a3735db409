"""`tentalis learn --check`: samples a few answers of the base model, shows them with their rewards, and stops."""

import logging
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tentalis.agents.scenarios.prompt_file import Prompt
from tentalis.agents.scenarios.prompts import PromptScenario
from tentalis.demo.answers import checked
from tentalis.demo.play import STOP_S, log_to, printable
from tentalis.demo.watch import Interrupted, Processes, RunFailed
from tentalis.learning.environments import episodes_of
from tentalis.learning.findings import Findings, judge_rewards
from tentalis.learning.options import LearnOptions
from tentalis.learning.play import data_of
from tentalis.learning.result import shown
from tentalis.learning.runs import LearnRun, prepare_run
from tentalis.learning.sample import Asked, ScoredAnswer, base_model, scored_answers
from tentalis.rewards.functions.process import output_log
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tentalis.service.stdout import data

if TYPE_CHECKING:
    from tentalis.local.state import StateDir

PROMPTS, ANSWERS = 4, 4
MODEL = "model"


def check(options: LearnOptions, settings: Settings) -> int:
    """Checks prompts and reward function with 16 answers of the base model; starts the model server alone.

    Returns 0, ERROR if nothing can be learned from the reward, or INTERRUPTED after Ctrl-C.

    Raises LearnError, RunFailed.
    """
    from rich.console import Console

    from tentalis.demo.prepare import prepare
    from tentalis.local.shutdown import signals_unwind, stop_signals
    from tentalis.local.state import StateDir

    console = Console(stderr=True, markup=False, highlight=False)
    log_to(console)
    output_log.setLevel(logging.INFO)  # what the functions print
    with (
        signals_unwind(),
        StateDir(settings.home) as state,
        tempfile.TemporaryDirectory(prefix="check-", dir=state.folder("runs")) as folder,
    ):
        run = LearnRun("check", Path(folder), resumed=False)
        prepare_run(run.folder, options, data_of(state, options), lambda text: console.print(text, soft_wrap=True))
        scenario = PromptScenario(run.prompts)
        model = prepare(console, options.model, settings.cache, own_broker=False)
        prompts = scenario.trained(PROMPTS)
        with stop_signals() as stop:
            try:
                asked = Asked(ANSWERS, scenario.sampling.temperature, scenario.set.seed, episodes_of(options))
                groups = _sampled(state, settings, model, scenario, prompts, asked, stop)
            except Interrupted:
                console.print("stopped", soft_wrap=True)
                return ExitCode.INTERRUPTED
    found = judge_rewards([[answer.reward for answer in group] for group in groups], options.reward_range is not None)
    if options.emit is not None:
        options.emit(_as_json(found, prompts, groups))
    else:
        _print(found, prompts, groups)
    return ExitCode.ERROR if found.useless else ExitCode.OK


def _sampled(
    state: "StateDir",
    settings: Settings,
    model: Path,
    scenario: PromptScenario,
    prompts: list[Prompt],
    asked: Asked,
    stop: threading.Event,
) -> list[list[ScoredAnswer]]:
    """Returns answers of the base model from a model server that runs meanwhile. Raises Interrupted or RunFailed."""
    from tentalis.local.stack import StackOptions, build_stack
    from tentalis.local.supervisor import Supervisor

    stack = build_stack(StackOptions(state=state, settings=settings, model=model, trainer_config=model))
    supervisor = Supervisor(state, [spec for spec in stack.specs if spec.name == MODEL])

    def watched() -> None:
        _watched(supervisor, stop)

    supervisor.start()
    try:
        while supervisor.status()[MODEL]["state"] != "ready":
            watched()
            stop.wait(0.1)
        return checked(_answers(stack.server, scenario, prompts, asked), watched)
    finally:
        supervisor.stop(STOP_S)


def _watched(processes: Processes, stop: threading.Event) -> None:
    if stop.is_set():
        raise Interrupted
    for name, reason in processes.broken().items():
        raise RunFailed(f"{name}: {reason}")


async def _answers(
    server: str, scenario: PromptScenario, prompts: list[Prompt], asked: Asked
) -> list[list[ScoredAnswer]]:
    from tentalis.inference.client import OpenAIClient

    async with OpenAIClient(server, timeout=600.0) as client:
        return await scored_answers(client, await base_model(client), scenario, prompts, asked)


def solve_rate(found: Findings) -> str:
    """Returns the solve rate in words."""
    if found.solved is None:
        return f"solve rate: unknown, no reward of {found.answers} answers is known"
    return (
        f"solve rate: {found.solved:.0%} of {found.answers} answers reach {found.middle:g}, the middle of "
        f"{found.low:g} to {found.high:g}"
    )


def _as_json(found: Findings, prompts: list[Prompt], groups: list[list[ScoredAnswer]]) -> dict[str, Any]:
    return {
        "solve_rate": found.solved,
        "middle": found.middle,
        "useful": not found.useless,
        "remarks": list(found.remarks),
        "prompts": [
            {
                "line": prompt.line,
                "prompt": prompt.messages[-1][1],
                "answers": [
                    {
                        "answer": answer.text,
                        "reward": answer.reward,
                        "components": dict(answer.components),
                        "problem": answer.problem or None,
                    }
                    for answer in group
                ],
            }
            for prompt, group in zip(prompts, groups, strict=True)
        ],
    }


def _print(found: Findings, prompts: list[Prompt], groups: list[list[ScoredAnswer]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=data(), markup=False, highlight=False)
    for prompt, group in zip(prompts, groups, strict=True):
        table = Table(f"line {prompt.line}: {printable(prompt.messages[-1][1])}", show_lines=True)
        for answer in group:
            table.add_row(Text(shown(answer)))
        console.print(table)
    console.print(solve_rate(found), soft_wrap=True)
    for remark in found.remarks:
        console.print(remark, soft_wrap=True)
