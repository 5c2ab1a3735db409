"""The runs of `tentalis learn`: STATE/runs/<run_id>/ with prepared prompts, scorers and the trainer's settings."""

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from schemas.problems import problems
from tentalis.agents.environments.registry import has_episodes
from tentalis.agents.manager.curriculum import SolveRateRule
from tentalis.agents.scenarios.prompt_file import Prompt
from tentalis.agents.scenarios.prompts import HELD_OUT, TRAINED, VERIFIER, PromptScenario, PromptSet
from tentalis.demo.runs import Configured, RunFolder, RunKind, trainer_config
from tentalis.learning.environments import LearnEnvironment, digest_of, environment_of, episodes_of, unfit_for
from tentalis.learning.errors import LearnError
from tentalis.learning.options import PLAIN, STDIN, LearnOptions
from tentalis.learning.prepare import PreparedPrompts, held_out_count, source_digest, unusable_file, write_prompts
from tentalis.opd.config import ANY_ENVIRONMENT
from tentalis.opd.hint_function import HintFunction
from tentalis.rewards.answer_judge import CRITERION
from tentalis.rewards.chat import ChatEndpoint, NoApiKey
from tentalis.rewards.functions.arguments import missing_columns
from tentalis.rewards.functions.errors import BadFunction
from tentalis.rewards.functions.scorer import FunctionScorer, FunctionSettings
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.rewards.scorer_file import BadScorers, load_scorers
from tentalis.rewards.verdict import Scorer

_KIND_FILE = "learn.json"
_PREPARING = "learn-preparing"
_STAMP = "learn-%Y%m%d-%H%M%S"
_LATER = {"curriculum": None, "environment": None}
"""Options that runs of earlier versions did not record, with their values then."""

Remark = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LearnRun(RunFolder):
    """The folder of a run of `tentalis learn`."""

    @property
    def prompts(self) -> Path:
        """The folder of prepared prompts."""
        return self.folder / "prompts"

    @property
    def hinters(self) -> Path:
        """The file of hinters; missing in a run without hints."""
        return self.folder / "hinters.yaml"

    @property
    def scorers(self) -> Path:
        """The file of scorers; missing in a run whose environment gives the reward."""
        return self.folder / "scorers.yaml"

    @property
    def environment_file(self) -> Path | None:
        """The file of environments that has the run's, or None. Raises LearnError."""
        environment = self.kind["environment"]
        return Path(environment["files"][0]) if environment is not None and environment["files"] else None

    @property
    def curriculum(self) -> SolveRateRule | None:
        """The curriculum with which the run began; None without one. Raises LearnError."""
        found = self.kind["curriculum"]
        return None if found is None else SolveRateRule(**found)

    @property
    def kind(self) -> dict[str, Any]:
        """The options with which the run began, as `kind_of` returns them. Raises LearnError."""
        return {**_LATER, **_described(self)["kind"]}


@dataclass(frozen=True, slots=True)
class Data:
    """Places of the data: the source, and the file of held-out prompts or None. Standard input is a file already."""

    source: Path
    held_out: Path | None


def kind_of(options: LearnOptions) -> dict[str, Any]:
    """Returns the options that identify a run: the same command continues an unfinished run with equal ones."""
    return {
        "source": options.source if options.source == STDIN else str(Path(options.source).resolve()),
        "held_out": None if options.held_out is None else str(Path(options.held_out).resolve()),
        "environment": environment_of(options).kind,
        "rewards": [absolute_target(target) for target in options.rewards],
        "python_path": [str(Path(folder).resolve()) for folder in options.python_path],
        "weights": list(options.weights),
        "judge": judge_of(options),
        "hints": hints_of(options),
        "loss": options.trained,
        "reward_range": None if options.reward_range is None else list(options.reward_range),
        "reward_seconds": options.reward_seconds,
        "reward_memory_mb": options.reward_memory_mb,
        "model": absolute_model(options.model),
        "steps": options.steps,
        "group": options.group,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "columns": dict(options.columns),
        "curriculum": curriculum_of(options),
        "seed": options.seed,
        "changes": list(options.changes),
    }


def judge_of(options: LearnOptions) -> dict[str, Any] | None:
    """Returns the judge of the options: its endpoint and criterion; None if functions or the environment give the
    rewards.

    Raises LearnError if both or none are given, or an option of the other.
    """
    if options.rewards and options.judge is not None:
        raise LearnError("give reward functions (--reward) or a judge (--judge), and not both")
    if not options.rewards and options.judge is None and environment_of(options).scorer is None:
        if options.environment == PLAIN:
            raise LearnError("give reward functions (--reward) or a judge (--judge), and not both")
        raise LearnError(
            f"the environment {options.environment} gives no reward itself: give functions (--reward) or a judge "
            "(--judge), or name its scorer in a file of environments (--environment-file)"
        )
    if options.judge is None:
        of_judge = {
            "--judge-model": options.judge_model,
            "--judge-key-env": options.judge_key_env,
            "--criterion": options.criterion,
        }
        if given := next((name for name, value in of_judge.items() if value is not None), None):
            raise LearnError(f"{given} is of a judge: name its server with --judge, or leave {given} out")
        if not options.rewards and options.reward_range is not None:
            raise LearnError(
                f"--reward-range is of reward functions: leave it out, because {options.environment} gives the reward"
            )
        return None
    if options.reward_range is not None:
        raise LearnError(
            "--reward-range is of reward functions: leave it out with --judge, whose grades become rewards from 0 to 1"
        )
    return {
        "endpoint": {"url": options.judge, "model": options.judge_model, "api_key_env": options.judge_key_env},
        "criterion": options.criterion or CRITERION,
    }


def curriculum_of(options: LearnOptions) -> dict[str, float] | None:
    """Returns the settings of the curriculum, None without one. The lowest reward is -1 with a declared range, else 0.

    Raises LearnError.
    """
    if not options.curriculum:
        return None
    if options.trained == "opd":
        raise LearnError("--curriculum chooses prompts by their rewards, on which --loss opd does not train")
    return asdict(SolveRateRule(lowest=0.0 if options.reward_range is None else -1.0))


def hints_of(options: LearnOptions) -> dict[str, Any] | None:
    """Returns the source of hints for `PromptSet`; None for no hints. Raises LearnError."""
    if options.hint is None:
        return None
    if has_episodes(options.environment):
        raise LearnError(
            f"--hint is for answers of one completion, and {options.environment} plays episodes: leave it out"
        )
    if options.trained == "rl":
        raise LearnError("--loss rl reads no hints: leave --hint out, or give --loss opd or both")
    if ":" not in options.hint:
        return {"column": options.hint}
    return {
        "kind": "function",
        "target": absolute_target(options.hint, "--hint"),
        "python_path": [str(Path(folder).resolve()) for folder in options.python_path],
        "time_limit_s": options.reward_seconds,
        "memory_mb": options.reward_memory_mb,
    }


def absolute_target(target: str, option: str = "--reward") -> str:
    """Returns PATH.py:NAME with an absolute path, or MODULE:NAME as it is. Raises LearnError."""
    path, colon, name = target.rpartition(":")
    is_module = all(part.isidentifier() for part in path.split(".")) and find_spec(path.partition(".")[0]) is not None
    if not colon or not name.isidentifier() or not (path.endswith(".py") or is_module):
        raise LearnError(f"{option} {target}: name a file and a function in it, such as rewards.py:score")
    if not path.endswith(".py"):
        return target
    if not Path(path).is_file():
        raise LearnError(f"{option} {target}: there is no file {path}")
    return f"{Path(path).resolve()}:{name}"


def absolute_model(model: str | None) -> str | None:
    """Returns the model's name, or the absolute path of a folder or file."""
    return str(Path(model).resolve()) if model is not None and Path(model).exists() else model


def environment_name(kind: Mapping[str, Any]) -> str:
    """Returns the name of the environment of a run."""
    return PLAIN if kind["environment"] is None else str(kind["environment"]["name"])


def scorer_file_of(kind: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of the file of scorers for the reward functions or the judge of a run."""
    environment = environment_name(kind)
    if (judge := kind["judge"]) is not None:
        graded = {"kind": "answer", "judge": "judge", "criterion": judge["criterion"]}
        return {
            "judges": {"judge": judge["endpoint"]},
            "environments": {environment: {VERIFIER: graded}},
        }
    settings: dict[str, Any] = {
        "kind": "function",
        "target": kind["rewards"],
        "time_limit_s": kind["reward_seconds"],
        "memory_mb": kind["reward_memory_mb"],
    }
    if kind["python_path"]:
        settings["python_path"] = kind["python_path"]
    if kind["weights"]:
        settings["weights"] = kind["weights"]
    if kind["reward_range"] is not None:
        settings["range"] = kind["reward_range"]
    return {"environments": {environment: {VERIFIER: settings}}}


def first_model(endpoint: Mapping[str, Any]) -> str:
    """Returns the name of the first model that a server lists. Raises LearnError."""
    import httpx

    try:
        asked = ChatEndpoint(**{**endpoint, "model": "-"})
        key = asked.api_key()
        headers = {} if key is None else {"authorization": f"Bearer {key.get_secret_value()}"}
        answer = httpx.get(f"{asked.url}/v1/models", headers=headers, timeout=10.0).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except ValidationError as error:
        raise LearnError(f"--judge: {problems(error, 'judge')}") from error
    except NoApiKey as error:
        raise LearnError(f"--judge-key-env: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise LearnError(
            f"--judge {endpoint['url']}: it lists no models ({error or type(error).__name__}). Start the server, or "
            "name its model with --judge-model"
        ) from error


def loaded_scorer(path: Path) -> Scorer:
    """Registers the scorer of a run in this process and returns it. Its name has the digest of the function's source.

    Raises LearnError.
    """
    try:
        ((_, _, scorer),) = load_scorers(path)
    except BadScorers as error:
        # The file is made of the options, and the user never sees it.
        if isinstance(error.__cause__, BadFunction):
            raise LearnError(f"the reward function cannot be used: {error.__cause__}") from error
        raise LearnError(f"the reward cannot be used: {error}") from error
    if isinstance(scorer, FunctionScorer):
        scorer.close()  # its process starts again with the next call
    return scorer


def missing_of(scorer: Scorer) -> Callable[[Prompt], str | None]:
    """Returns a function that gives the reason why the reward functions cannot score answers to a prompt, or None."""

    def reason(prompt: Prompt) -> str | None:
        if not isinstance(scorer, FunctionScorer):
            return None
        for each in scorer.description.functions:
            if missing := missing_columns(each.signature, prompt.columns):
                return f"{each.name} of {each.place} needs the column {', '.join(missing)}"
        return None

    return reason


def loaded_hints(hints: Mapping[str, Any]) -> HintFunction:
    """Returns the hint function of a run. Raises LearnError."""
    try:
        function = HintFunction(FunctionSettings.model_validate(hints))
    except BadFunction as error:
        raise LearnError(f"the hint function cannot be used: {error}") from error
    function.close()  # its process starts again with the next call
    return function


def without_hint(hints: Mapping[str, Any], function: HintFunction | None) -> Callable[[Prompt], str | None]:
    """Returns a function that gives the reason why a prompt cannot have hints, or None."""

    def reason(prompt: Prompt) -> str | None:
        if function is not None:
            missing = function.missing(prompt.columns)
            return f"the hint function {function.name} needs the column {', '.join(missing)}" if missing else None
        name = hints["column"]
        if name not in prompt.columns:
            return f"no column {name}, which --hint names"
        value = prompt.columns[name]
        return None if value is None or isinstance(value, str) else f"the hint in the column {name} must be a text"

    return reason


def unfinished(runs: Path, kind: Mapping[str, Any]) -> LearnRun | None:
    """Returns the newest unfinished run of this kind, or None.

    Raises LearnError if there is none, but one that differs in its curriculum alone.
    """
    others = []
    for folder, found in _unfinished(runs):
        if found == kind:
            return LearnRun(folder.name, folder, resumed=True)
        others.append((folder.name, found))
    for name, found in others:
        if found | {"curriculum": kind["curriculum"]} == kind:
            raise LearnError(_other_curriculum(name, found["curriculum"], kind["curriculum"]))
    return None


def _unfinished(runs: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the folders of unfinished runs with their kinds, the newest first. Raises LearnError."""
    for folder in sorted(runs.glob("learn-*"), reverse=True):
        run = LearnRun(folder.name, folder, resumed=True)
        # The configuration is written last: a folder without one was not begun.
        if folder.name != _PREPARING and not run.finished and run.config.exists():
            yield folder, run.kind


def _other_curriculum(run_id: str, begun: object, now: object) -> str:
    if begun is not None and now is not None:
        return (
            f"run {run_id}, which is unfinished, began with other settings of the curriculum, those of another "
            "version: begin another run with --new"
        )
    how, remedy = ("with", "give it again") if now is None else ("without", "leave it out")
    return (
        f"run {run_id}, which is unfinished, began {how} --curriculum: {remedy} to continue the run, or begin another "
        "one with --new"
    )


def continued(run: LearnRun, data: Data) -> LearnRun:
    """Returns an unfinished run after it is checked that its data and reward function are unchanged.

    Raises LearnError, BadPrompts.
    """
    described = _described(run)
    for name, place in (("source", data.source), ("held_out", data.held_out)):
        if place is not None and source_digest(place) != described[name]:
            raise LearnError(
                f"{place} has changed since run {run.run_id} began, which is unfinished: put the earlier content back "
                "to continue it, or begin another run with --new"
            )
    if run.scorers.exists() and loaded_scorer(run.scorers).name != described["scorer"]:
        raise LearnError(
            f"the reward function has changed since run {run.run_id} began, which is unfinished: put the earlier "
            "function back to continue it, or begin another run with --new"
        )
    hints = described["kind"]["hints"]
    if hints is not None and "target" in hints and loaded_hints(hints).name != described["hinter"]:
        raise LearnError(
            f"the hint function has changed since run {run.run_id} began, which is unfinished: put the earlier "
            "function back to continue it, or begin another run with --new"
        )
    environment = run.kind["environment"]
    if environment is not None and digest_of(map(Path, environment["files"])) != described["environment"]:
        raise LearnError(
            f"{' or '.join(environment['files'])} has changed since run {run.run_id} began, which is unfinished: put "
            "the earlier content back to continue it, or begin another run with --new"
        )
    PromptScenario(run.prompts).check()
    return run


def begin(
    runs: Path,
    options: LearnOptions,
    data: Data,
    now: float,
    configured: Configured,
    model: Callable[[], Path],
    remark: Remark,
) -> LearnRun:
    """Prepares the data, loads the reward function, and begins a run named after `now` (seconds since the epoch).

    `model` returns the folder of the model; it is called when data and function are known to be good.

    Raises LearnError.
    """
    folder = runs / _PREPARING
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed
    folder.mkdir(parents=True)
    try:
        return _begun(folder, _free_name(runs, int(now)), options, data, configured, model, remark)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # has its own name by now, or the copy of the data is of no use


def _free_name(runs: Path, stamp: int) -> str:
    while (runs / time.strftime(_STAMP, time.gmtime(stamp))).exists():
        stamp += 1
    return time.strftime(_STAMP, time.gmtime(stamp))


def _begun(
    folder: Path,
    run_id: str,
    options: LearnOptions,
    data: Data,
    configured: Configured,
    model: Callable[[], Path],
    remark: Remark,
) -> LearnRun:
    run = LearnRun(run_id, folder, resumed=False)
    described = prepare_run(folder, options, data, remark, folder.with_name(run_id))
    scenario = PromptScenario(run.prompts)
    settings = trainer_config(
        run.run_id, RunKind(scenario.name, options.steps, str(model()), options.changes), scenario
    ) | {"seed": options.seed}
    # The process that promotes does not have the reward function, which alone says what a good answer is.
    settings["promotion"] = "always"
    settings.pop("guard", None)
    # No part of the loss reads a group of equal rewards, so further prompts are drawn in its place.
    settings["loss"] |= {"dynamic_sampling": True, "rl_weight": 0.0 if options.trained == "opd" else 1.0}
    (folder / _KIND_FILE).write_text(json.dumps(described, indent=1), encoding="utf-8")
    config = yaml.safe_dump(configured(settings, options.changes), sort_keys=False)
    run.config.write_text(config, encoding="utf-8")
    return LearnRun(run.run_id, folder.rename(folder.with_name(run.run_id)), resumed=False)


def prepare_run(
    folder: Path, options: LearnOptions, data: Data, remark: Remark, final: Path | None = None
) -> dict[str, Any]:
    """Loads the reward function and writes scorers and prompts into a folder; returns the options with all digests.

    `final`: the later name of the folder, for remarks; None if it will be removed.

    Raises LearnError.
    """
    kind = kind_of(options)
    if kind["judge"] is not None and kind["judge"]["endpoint"]["model"] is None:
        judge = kind["judge"]
        # The kind stays without the name, so that the same command continues the run.
        named = judge | {"endpoint": judge["endpoint"] | {"model": first_model(judge["endpoint"])}}
        kind, shown = kind | {"judge": named}, kind
    else:
        shown = kind
    run = LearnRun("", folder, resumed=False)
    environment = environment_of(options)
    if options.rewards or options.judge is not None:
        run.scorers.write_text(yaml.safe_dump(scorer_file_of(kind), sort_keys=False), encoding="utf-8")
        scorer = loaded_scorer(run.scorers)
        environment, scorable = replace(environment, scorer=None), missing_of(scorer)
    else:
        scorer, scorable = ENVIRONMENTS[environment.name][str(environment.scorer)], unfit_for(environment)
    episodes_of(options)  # what it needs is here: a wall, tools, tasks
    hints = kind["hints"]
    function = loaded_hints(hints) if hints is not None and "target" in hints else None
    hinter = None if function is None else function.name
    refusals = [scorable]
    if hints is not None:
        run.hinters.write_text(yaml.safe_dump({"hinters": {ANY_ENVIRONMENT: {"kind": "given"}}}), encoding="utf-8")
        refusals.append(without_hint(hints, function))
    run.prompts.mkdir()
    listed = None if final is None else LearnRun("", final, resumed=False).prompts
    try:
        prepared = _prepare(options, data, environment, run.prompts, refusals, hinter, remark, listed)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise LearnError(
            f"{run.prompts}: {error.strerror}: the data are copied there. Make room, or set TENTALIS_HOME to a folder "
            "on another disk"
        ) from error
    digest = digest_of(environment.files)
    return prepared | {"kind": shown, "scorer": scorer.name, "hinter": hinter, "environment": digest}


def _described(run: LearnRun) -> dict[str, Any]:
    """Returns the options and digests of a run. Raises LearnError if their file is damaged or missing."""
    file = run.folder / _KIND_FILE
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(described, dict) or not isinstance(described.get("kind"), dict):
            raise ValueError("not a JSON object with the options of a run")
    except (OSError, ValueError) as error:
        raise LearnError(
            f"{file} is damaged ({error}), so it is unknown whether run {run.run_id} is this one: begin another run "
            "with --new, or remove the folder"
        ) from error
    return described


def changes_of(folder: Path) -> tuple[str, ...] | None:
    """Returns the changes that the user gave to a run of `tentalis learn` with --set; None for another command's run.

    Raises LearnError if they cannot be read.
    """
    file = folder / _KIND_FILE
    if not file.exists():
        return None
    try:
        return tuple(json.loads(file.read_text(encoding="utf-8"))["kind"]["changes"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LearnError(
            f"{file} is damaged ({error}), so it is unknown which settings of run {folder.name} are the user's: name a "
            "configuration with --config, or remove the folder"
        ) from error


def _prepare(
    options: LearnOptions,
    data: Data,
    environment: LearnEnvironment,
    folder: Path,
    refusals: Sequence[Callable[[Prompt], str | None]],
    hinter: str | None,
    remark: Remark,
    listed: Path | None,
) -> dict[str, Any]:
    """Writes the prompts; returns the digests of the sources. `environment`: without a scorer if it does not give the
    reward. `refusals`: the first one holds for held-out prompts too. `hinter`: name of the hint function, or None.
    `listed`: the later name of the folder, or None."""

    def refused(prompt: Prompt) -> str | None:
        return next((reason for refusal in refusals if (reason := refusal(prompt)) is not None), None)

    def written(source: Path, name: str, shown: str) -> PreparedPrompts:
        refusal = refused if name == TRAINED else refusals[0]
        prepared = write_prompts(source, folder, name, dict(options.columns), refusal)
        if said := prepared.remark(shown, None if listed is None else unusable_file(listed, name)):
            remark(said)
        return prepared

    trained = written(data.source, TRAINED, "standard input" if options.source == STDIN else options.source)
    held_out: PreparedPrompts | None = None
    if data.held_out is not None:
        held_out = written(data.held_out, HELD_OUT, str(options.held_out))
        count = held_out.prompts
        remark(f"{trained.prompts} prompts to train on, {count} held-out prompts")
    else:
        count = held_out_count(trained.prompts, data.source)
        remark(
            f"{trained.prompts - count} prompts to train on; a tenth is held out ({count} prompts), because --eval "
            "names no other ones"
        )
    PromptSet(
        options.seed,
        options.group,
        options.max_tokens,
        options.temperature,
        trained.sha256,
        trained.prompts,
        count,
        None if held_out is None else held_out.sha256,
        hints_of(options),
        hinter,
        environment.name,
        environment.scorer or VERIFIER,
        None if environment.scorer is None else environment.data,
    ).write(folder)
    return {
        "source": source_digest(data.source),
        "held_out": None if data.held_out is None else source_digest(data.held_out),
        "unusable": trained.unusable + (0 if held_out is None else held_out.unusable),
    }
