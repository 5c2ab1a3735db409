"""The scenario of `tentalis learn`: the prompts of a folder that the command prepared, scored by the user's function or
by an environment.

The folder has a file of prompts (`prompt_file`), perhaps a second one of held-out prompts, and `set.json`.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from schemas.records import Feedback, Message, Result, Sampling, Source, Status, Terms, Verifier
from tentalis.agents.scenarios.base import Question
from tentalis.agents.scenarios.permutation import permuted
from tentalis.agents.scenarios.prompt_file import BadPrompts, Prompt, PromptFile, file_digest
from tentalis.opd.hint_function import HintColumn, HintFunction, HintProvider
from tentalis.rewards.functions.errors import BadFunction, FunctionError
from tentalis.rewards.functions.scorer import FunctionSettings
from tentalis.rewards.verdict import ScorerAway
from tentalis.service.lifecycle import Unmendable

log = logging.getLogger(__name__)

SET_FILE = "set.json"
TRAINED, HELD_OUT = "prompts", "heldout"
VERIFIER = "reward"
_CONTINUE = "Put back what it was, and the same command continues the run; or begin another run with --new"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The description of a prepared folder.

    Attributes:
        seed: of the order of the prompts, and of the choice of the held-out ones.
        samples: answers per prompt.
        max_tokens: longest answer, in tokens.
        temperature: of sampling.
        sha256: of the file of prompts.
        prompts: number of prompts in that file.
        held_out: number of them that are held out; with a file of held-out prompts, the number of that file's.
        held_out_sha256: of the file of held-out prompts; None if they are a part of the prompts.
        hints: the source of hints: {"column": NAME}, or the settings of a function; None for no hints.
        hinter: name of the hint function, which has the digest of its source; None for a column or no hints.
        environment: of the tasks.
        scorer: the verifier of the tasks.
        data: defaults of the verifier's data, which the other columns of a row complete; None: a function gets the
            columns as they are.
    """

    seed: int
    samples: int
    max_tokens: int
    temperature: float
    sha256: str
    prompts: int
    held_out: int
    held_out_sha256: str | None = None
    hints: Mapping[str, Any] | None = None
    hinter: str | None = None
    environment: str = "chat"
    scorer: str = VERIFIER
    data: Mapping[str, Any] | None = None

    @property
    def held_out_inside(self) -> int:
        """Number of prompts of the file of prompts that are held out."""
        return self.held_out if self.held_out_sha256 is None else 0

    def write(self, folder: Path) -> None:
        """Writes the description into the folder."""
        (folder / SET_FILE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the description of a folder. Raises BadPrompts."""
        try:
            return cls(**json.loads((folder / SET_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise BadPrompts(
                f"{folder} is not a folder of prompts that `tentalis learn` prepared: {error}. Begin a new run"
            ) from error

    def trained_at(self, index: int) -> int:
        """Returns the position in the file of the prompt of task number `index`: each once, then all in a new order."""
        inside = self.held_out_inside
        lap, place = divmod(index, self.prompts - inside)
        return self._split(inside + permuted(place, self.prompts - inside, "order", self.seed, lap))

    def held_out_at(self, number: int) -> int:
        """Returns the position of held-out prompt `number`, in the file that has the held-out prompts."""
        if self.held_out_sha256 is None:
            return self._split(number)
        return permuted(number, self.held_out, "held out", self.seed)

    def _split(self, place: int) -> int:
        """Orders all prompts at random: the first `held_out_inside` are held out."""
        return permuted(place, self.prompts, "split", self.seed)


class PromptScenario:
    """The scenario of a prepared folder. `question` reads one prompt from disk; `feedback` has the hint of the user's
    function or column, if the folder names one."""

    name = "prompts"
    policy = "learn"

    def __init__(self, folder: Path) -> None:
        self.set = PromptSet.read(folder)
        self.environment = self.set.environment
        self.owes_feedback = self.set.hints is not None
        # A hint waits for the model server, which may be restarting: two minutes cover a restart.
        opd = Source.MANAGER if self.owes_feedback else None
        self.terms = Terms(rl=Source.RESULT, opd=opd, deadline_ms=900_000, opd_window_ms=120_000)
        self.n_samples = self.set.samples
        self.sampling = Sampling(temperature=self.set.temperature, max_tokens=self.set.max_tokens)
        self._trained = PromptFile(folder, TRAINED)
        self._held_out = self._trained if self.set.held_out_sha256 is None else PromptFile(folder, HELD_OUT)
        for file, expected in ((self._trained, self.set.prompts), (self._held_out, self._expected_held_out)):
            if file.count != expected:
                raise BadPrompts(f"{file.path} has {file.count} prompts instead of {expected}. Begin a new run")

    @property
    def _expected_held_out(self) -> int:
        return self.set.prompts if self.set.held_out_sha256 is None else self.set.held_out

    def check(self) -> None:
        """Checks the digests of the files, which reads all of them. Raises BadPrompts."""
        expected = {self._trained.path: self.set.sha256}
        if self.set.held_out_sha256 is not None:
            expected[self._held_out.path] = self.set.held_out_sha256
        for path, digest in expected.items():
            if file_digest(path) != digest:
                raise BadPrompts(f"{path} was changed after the run began. Begin a new run with `tentalis learn --new`")

    @cached_property
    def showcase(self) -> tuple[tuple[Message, ...], ...]:
        """The first three held-out prompts."""
        return tuple(messages_of(prompt) for prompt in self.held_out(3))

    @property
    def prompt_count(self) -> int:
        """See Scenario.prompt_count."""
        return self.set.prompts - self.set.held_out_inside

    def question(self, run_id: str, index: int) -> Question:
        """See Scenario.question. The order depends on the seed of the set, not on the run."""
        prompt = self._trained.prompt(self.set.trained_at(index))
        return self._question(prompt, self.set.sha256)

    def held_out(self, count: int) -> list[Prompt]:
        """Returns up to `count` held-out prompts, always the same ones first."""
        return [self._held_out.prompt(self.set.held_out_at(i)) for i in range(min(count, self.set.held_out))]

    def trained(self, count: int) -> list[Prompt]:
        """Returns the prompts of the first `count` tasks, or each prompt once if there are fewer."""
        return [self._trained.prompt(self.set.trained_at(i)) for i in range(min(count, self.prompt_count))]

    def _question(self, prompt: Prompt, sha256: str) -> Question:
        metadata = {"prompts": sha256, "line": str(prompt.line)}
        return Question(messages_of(prompt), self.verifier(prompt), None, metadata)

    def verifier(self, prompt: Prompt) -> Verifier:
        """Returns the verifier of a prompt."""
        return verifier_of(prompt, self.set.scorer, self.set.data)

    @cached_property
    def _hints(self) -> HintProvider:
        assert self.set.hints is not None, "only a folder with hints owes feedback"
        if "column" in self.set.hints:
            return HintColumn(self.set.hints["column"])
        return _hint_function(FunctionSettings.model_validate(self.set.hints), self.set.hinter)

    def _hint(self, result: Result) -> str | None:
        try:
            return self._hints.hint(result)
        except ScorerAway as error:
            log.warning("the hint function is loaded again: %s", error)
            del self._hints
            return self._hints.hint(result)

    def feedback(self, result: Result, feedback_id: str, event_time: int) -> Feedback:
        """Returns feedback whose text is the hint; without a text if there is none, or the function failed.

        Raises:
            Unmendable: the hint function has changed since the run began, or can no longer be loaded.
            ScorerAway: its process does not start again.
        """
        text = None
        if result.status is Status.OK:
            try:
                text = self._hint(result)
            except FunctionError as error:
                log.warning("no hint for result %s: %s", result.result_id, error)
        return Feedback(
            feedback_id=feedback_id,
            event_time=event_time,
            task_id=result.task.task_id,
            sample_index=result.sample_index,
            source=Source.MANAGER,
            author="hint",
            text=text or "",
            result=result,
        )


def _hint_function(settings: FunctionSettings, name: str | None) -> HintFunction:
    """Returns the hint function of a run, whose name had the digest of its source when the run began.

    Raises Unmendable.
    """
    try:
        function = HintFunction(settings)
    except BadFunction as error:
        raise Unmendable(f"the hint function {settings.target} cannot be used: {error}. {_CONTINUE}") from error
    if function.name != name:
        function.close()
        raise Unmendable(f"the hint function {settings.target} has changed since the run began. {_CONTINUE}")
    return function


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Returns the messages of a prompt as records."""
    return tuple(Message(role=role, content=content) for role, content in prompt.messages)


def verifier_of(prompt: Prompt, scorer: str = VERIFIER, defaults: Mapping[str, Any] | None = None) -> Verifier:
    """Returns the verifier of a prompt, whose data are the other columns of its row: as they are for a function, or
    with `defaults`, see PromptSet."""
    data = {"columns": prompt.columns} if defaults is None else {**defaults, **prompt.columns}
    return Verifier(name=scorer, data=json.dumps(data, ensure_ascii=False))
