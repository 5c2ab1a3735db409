"""`tentalis.learn`: trains on a data set with reward functions, as the command does, from a script or a notebook.

The run has a thread, because a notebook has an event loop on its main thread. Ctrl-C, or the cancellation of the task,
stops its processes; the same call continues it.
"""

import asyncio
import threading
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Unpack, cast

from tentalis.cli.shared.settings import resolve_settings
from tentalis.cli.shared.stack_checks import check_before_start
from tentalis.cli.shared.startup import check_namespace
from tentalis.cli.shared.trainer_changes import check_changes, configured
from tentalis.python.given_dataset import Dataset
from tentalis.python.learn_arguments import LearnArguments, Rewards, checked_arguments, datasets_folder, options_of
from tentalis.python.learned_run import LearnedRun
from tentalis.python.progress_bar import TrainingBar
from tentalis.service.packages import require

_LOOK_S = 0.2


def learn(dataset: Dataset, reward: Rewards = None, **arguments: Unpack[LearnArguments]) -> LearnedRun:
    """Trains a model on prompts with a reward, as the command `tentalis learn` does, and returns the finished run.

    The same call continues a run that was stopped, with Ctrl-C for example. An argument that is None has its default.

    Args:
        dataset: a file or folder of prompts, a list of dicts, or a `datasets.Dataset`. The column `prompt` is the
            question; every other column reaches the reward.
        reward: a function with the parameters of TRL, verl or verifiers, or several, which are added.
        environment: of the tasks ("chat"); one with episodes gives the reward itself, unless a reward or a judge is
            given, and the other columns are its data.
        environment_file: file of environments that has it; None: that of TENTALIS_ENVIRONMENT_FILE, if set.
        allow_unsandboxed: run the actions of the model without a wall, if this machine has none (False).
        model: smollm2 (the default), qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, a folder, a GGUF file or a hub id.
        eval: held-out prompts; None: a tenth of the prompts.
        steps: policy versions to train (100).
        group: answers per prompt (8).
        max_tokens: longest answer, in tokens (256).
        temperature: of sampling (1.0).
        weights: one for each reward function.
        judge: URL of an OpenAI-compatible server whose model grades the answers, instead of a function.
        judge_model: its name on the server; None: the first that the server lists.
        judge_key_env: name of the variable with the server's key.
        criterion: what a good answer is, for the judge.
        hint: a function that returns a text or None for each answer, or the name of a column.
        loss: "rl", "opd" or "both"; None: both with a hint, else rl.
        reward_range: lowest and highest reward; None: -1 and 1.
        reward_seconds: time limit of one call of a function (10).
        reward_memory_mb: memory limit of the process of the functions, in MiB (2048).
        columns: new names of columns: {"question": "prompt"}.
        curriculum: choose the prompts by their solve rates (False).
        seed: of the order of prompts, the held-out part and the training (0).
        eval_prompts: most held-out prompts that are answered before and after (64).
        settings: of the trainer: {"optimizer.lr": 1e-4}.
        home: state directory; None: that of TENTALIS_HOME.
        new: begin a new run although one of the same call is unfinished.
        progress: show a bar (True).

    Raises:
        LearnError: the data or a function cannot be used.
        RunFailed: the run cannot continue.
        CommandError: a setting is wrong, or another stack runs in the state directory.
    """
    running = RunThread(dataset, reward, arguments)
    while True:
        try:
            return running.waited()
        except KeyboardInterrupt:
            if running.stop.is_set():  # the second one does not wait
                raise
            running.stop.set()


async def learn_async(dataset: Dataset, reward: Rewards = None, **arguments: Unpack[LearnArguments]) -> LearnedRun:
    """Does the same as `learn`, without blocking the event loop. Cancelling the task stops the run.

    Raises the errors of `learn`.
    """
    running = RunThread(dataset, reward, arguments)
    future = asyncio.wrap_future(running.future)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        running.stop.set()
        with suppress(KeyboardInterrupt):
            await future
        raise


class RunThread:
    """A run on a thread. `future` has the finished run, or KeyboardInterrupt after `stop` was set.

    Raises LearnError, CommandError, and what the settings raise, before the thread starts.
    """

    def __init__(self, dataset: Dataset, reward: Rewards, arguments: LearnArguments) -> None:
        require("`tentalis.learn`", "local", "serve", "train")
        given = checked_arguments(arguments)
        check_namespace()
        settings = resolve_settings(join_stack=False)
        home = given.get("home")
        self._settings = settings if home is None else settings.model_copy(update={"home": Path(home).absolute()})
        check_before_start(self._settings, own_log=True)
        self._found: list[Any] = []
        self._options = options_of(dataset, reward, given, self._settings.home, self._found.append)
        check_changes(self._options.changes)
        self.stop = threading.Event()
        self.future: Future[LearnedRun] = Future()
        self._progress = given.get("progress", True)
        # Daemonic: the interpreter may end meanwhile, and the processes of the run then end too.
        threading.Thread(target=self._run, name="tentalis.learn", daemon=True).start()

    def waited(self) -> LearnedRun:
        """Waits for the end of the run, in a way that Ctrl-C interrupts."""
        while not wait([self.future], _LOOK_S).done:
            pass
        return self.future.result()

    def _run(self) -> None:
        try:
            self.future.set_result(self._trained())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            self.future.set_exception(error)

    def _trained(self) -> LearnedRun:
        from rich.console import Console

        from tentalis.learning.play import train

        def stopping() -> AbstractContextManager[threading.Event]:
            return nullcontext(self.stop)

        with TrainingBar(self._progress) as bar:
            console = Console(
                file=cast(IO[str], bar), markup=False, highlight=False, force_jupyter=False, force_terminal=False
            )
            if not train(self._options, self._settings, configured, console, stopping, bar.show):
                raise KeyboardInterrupt
        for path in (self._options.source, self._options.held_out):
            if path is not None and Path(path).parent == datasets_folder(self._settings.home):
                Path(path).unlink(missing_ok=True)  # the run has its own copy, and is finished
        return LearnedRun.of_result(self._found[0], self._settings)
