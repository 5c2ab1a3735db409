"""Personalisation, end to end: simulated users talk through the gateway's proxy until the policy satisfies them.

`make personalise [METHOD=hybrid] [USER=student] [SEED=0] [SESSIONS=60] [FULL=1]` makes one run on a separate stack,
writes docs/results/personalisation/<user>-<method>-seed<seed>.json and redraws the page. SETUP=guarded takes the
0.5B model and the guard of promotion, users give a thumb before each reply, and the folder is
docs/results/personalisation-guarded. SEEDS=5 makes the runs of five seeds, and USER=each those of each user alone;
runs that exist are not made again. The client is OpenAI's, with
no knowledge of Tentalis and no extra headers: the gateway detects sessions and turns itself. Rules judge the users'
messages (`next_state_rules`), and a rule turns their wishes into hints: no judge model takes part.

A session meets the rule if its *first* answer does, before any complaint. A run has converged with the third such
session in a row; it ends there, or after SESSIONS; with FULL=1 always after SESSIONS. METHOD=none is the control:
SESSIONS first answers of the untrained model, without any reply, so that nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from schemas import topics
from schemas.ids import parse_policy_name
from schemas.records import (
    BatchPlan,
    EvalResult,
    Outcome,
    OutcomeKind,
    PolicyAck,
    Record,
    RunManifest,
    StepResult,
)
from tentalis.agents.manager.core import trains
from tentalis.kafka.codec import make_codec
from tentalis.kafka.reader import Reader
from tentalis.policies.served import ServedVersions
from tentalis.rewards.style_scorer import check_style
from tentalis.service.settings import Settings
from tests.bench import methods
from tests.bench.lab import log
from tests.bench.methods import COLOURS, SETTINGS, Z_95, Curve
from tests.bench.users import USERS, User

FOLDER = methods.FOLDER / "personalisation"


@dataclass(frozen=True, slots=True)
class Setup:
    """The model of a run, its promotion, and whether users give thumbs. `suffix`: of the folder of its results."""

    model: str
    title: str
    promotion: str
    thumbs: bool
    suffix: str = ""

    @property
    def folder(self) -> Path:
        """The folder of the runs of this setup."""
        return FOLDER.with_name(FOLDER.name + self.suffix)


SETUPS = {
    "plain": Setup("smollm2", "SmolLM2-135M", "always", thumbs=False),
    "guarded": Setup("qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct", "guarded", thumbs=True, suffix="-guarded"),
}
POLICY = "assistant"
CONTROL = "none"
METHODS = SETTINGS | {CONTROL: ()}
IN_A_ROW = 3
TURNS = 4
TEMPERATURE, MAX_TOKENS = 0.7, 128
BATCH = 4
SETTLES_S = 600.0
KNOWN_S = 60.0
SHOWN = 3


@dataclass(frozen=True, slots=True)
class Talk:
    """A session as the client saw it. `versions`: the policy version of each answer, None for the base model."""

    user: str
    session: int
    said: tuple[str, ...]
    answers: tuple[str, ...]
    versions: tuple[int | None, ...]
    first_fits: bool
    content: bool
    first_words: int
    first_on_topic: bool
    seconds: float


# --- pure -------------------------------------------------------------------------------------------------------------


def converged_after(fits: Sequence[bool], in_a_row: int = IN_A_ROW) -> int | None:
    """The number of sessions until `in_a_row` in a row have met the rule, None if that never happens.

    >>> converged_after([True, False, True, True, True, False])
    5
    """
    run = 0
    for at, fit in enumerate(fits, 1):
        run = run + 1 if fit else 0
        if run == in_a_row:
            return at
    return None


def wilson(hits: float, n: int) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927), (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, Z_95 * Z_95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * (share * (1 - share) / n + z2 / (4 * n * n)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_by_chance(share: float, in_a_row: int = IN_A_ROW) -> float:
    """The mean number of sessions until `in_a_row` in a row meet the rule, if each does independently with probability
    `share` (Feller 1968, XIII.7).

    >>> mean_by_chance(0.5)
    14.0
    """
    return math.inf if share == 0 else sum(share**-length for length in range(1, in_a_row + 1))


def converged_by_chance(share: float, sessions: int, in_a_row: int = IN_A_ROW) -> list[float]:
    """By session, the probability that a run has converged, if each session meets the rule with probability `share`.

    >>> converged_by_chance(0.5, 4)
    [0.0, 0.0, 0.125, 0.1875]
    """
    rows, done, found = [1.0] + [0.0] * (in_a_row - 1), 0.0, []
    for _ in range(sessions):
        done += rows[-1] * share
        rows = [sum(rows) * (1 - share), *(chance * share for chance in rows[:-1])]
        found.append(done)
    return found


def converged_share(ends: Sequence[int | None], lengths: Sequence[int]) -> list[float]:
    """By session, the share of runs that have converged (Kaplan and Meier 1958): a run that ended without converging is
    censored at its length. Sessions after a run has converged are ignored.

    >>> converged_share([None, 3], [2, 4])
    [0.0, 0.0, 1.0]
    """
    left, found = 1.0, []
    watched = [length if end is None else end for end, length in zip(ends, lengths, strict=True)]
    for at in range(1, max(watched, default=0) + 1):
        left *= 1 - sum(end == at for end in ends) / sum(last >= at for last in watched)
        found.append(1 - left)
    return found


def now_in(seed: int, session: int) -> str:
    """The system prompt of a session, with a date: one session a day, so that no two begin alike."""
    when = datetime(2026, 1, 5, 9, 0) + timedelta(days=session, minutes=7 * session % 480 + seed)
    return f"You are a helpful assistant. It is {when:%A, %d %B %Y, %H:%M}."


class Loop:
    """The state of the run according to the log. Users wait between two sessions, as people do, until it is settled."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._served = ServedVersions()
        self._first: dict[int, int] = {}
        """By branch of the run (0: the run itself; N: the run that a rollback began as RUN.N), its first version."""
        self._planned: set[tuple[int, int]] = set()
        self._stepped: set[tuple[int, int]] = set()
        self._decided: set[str] = set()
        self._usable: set[str] = set()
        self._gone: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self.rewards: Counter[str] = Counter()
        self.verdicts: Counter[str] = Counter()
        """Verdicts of the guard: passed and refused."""

    def apply(self, record: Record) -> None:
        """Applies a record of one of TOPICS."""
        match record:
            case RunManifest() if (branch := self._branch(record.run_id)) is not None:
                self._first[branch] = record.first_version
            case PolicyAck():
                self._served.apply(record)
            case BatchPlan() if (branch := self._branch(record.run_id)) is not None:
                self._planned.add((branch, record.step))
                self._gone.update(row.rollout_id for row in record.rows)
            case StepResult() if (branch := self._branch(record.run_id)) is not None and record.step > 0:
                self._stepped.add((branch, record.step))
            case EvalResult() if record.experiment.startswith("guard") and record.policy.startswith(f"{POLICY}@"):
                self.verdicts["passed" if record.passed else "refused"] += 1
            case Outcome() if record.head.policy == POLICY:
                self._outcome(record)

    def _branch(self, run_id: str) -> int | None:
        """The branch of this run that an id names, None for another run."""
        if run_id == self._run_id:
            return 0
        number = run_id.removeprefix(f"{self._run_id}.")
        return int(number) if number != run_id and number.isdecimal() else None

    def _outcome(self, outcome: Outcome) -> None:
        if outcome.kind in (OutcomeKind.LATE, OutcomeKind.SUPERSEDED) or outcome.outcome_key in self._decided:
            return
        self._decided.add(outcome.outcome_key)
        self.outcomes[outcome.kind.value] += 1
        if outcome.reward is not None:
            self.rewards[f"{outcome.reward:+g}"] += 1
        if trains(outcome) and outcome.rollout_id is not None:
            self._usable.add(outcome.rollout_id)

    @property
    def steps(self) -> int:
        """The number of steps of the newest branch whose version is served."""
        version = self._served.version(POLICY)
        return 0 if version is None or not self._first else max(0, version - self._first[max(self._first)])

    @property
    def trained(self) -> int:
        """The number of steps of all branches."""
        return len(self._stepped)

    @property
    def serves(self) -> bool:
        """True if a version of the newest branch is served."""
        version = self._served.version(POLICY)
        return version is not None and bool(self._first) and version >= self._first[max(self._first)]

    def unsettled(self, answered: int, batch: int) -> str | None:
        """The reason why the run is not settled, None if it is. `answered`: number of answers that got a reply."""
        if len(self._decided) < answered:
            return f"{len(self._decided)} of {answered} turns are decided"
        waiting = len(self._usable - self._gone)
        if waiting >= batch:
            return f"{waiting} rollouts wait for the trainer"
        newest = max(self._first, default=0)
        stepped = {step for branch, step in self._stepped if branch == newest}
        left = {step for branch, step in self._planned if branch == newest} - stepped
        if left:
            return f"step {max(left)} is being trained"
        if self.steps < len(stepped) or (newest and not self.serves):
            return f"{len(stepped)} steps are trained, {self.steps} are served"
        return None


TOPICS = (topics.RUNS, topics.POLICY_ACKS, topics.BATCHES, topics.OUTCOMES, topics.EVALS)


# --- a run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run. `users`: the users of the one policy, who take turns."""

    method: str
    users: tuple[User, ...]
    seed: int
    sessions: int
    full: bool = False
    setup: Setup = SETUPS["plain"]

    @property
    def name(self) -> str:
        who = self.users[0].name if len(self.users) == 1 else "all"
        return f"{who}-{self.method}-seed{self.seed}"


def talk(base_url: str, user: User, seed: int, session: int, *, leaves: bool, thumbs: bool = False) -> Talk:
    """Holds one session, as any program with OpenAI's client would. `leaves`: the user leaves after the first answer,
    without a reply. `thumbs`: the user gives each answer a thumb before replying to it."""
    from openai import OpenAI

    began = time.monotonic()
    messages: list[Any] = [{"role": "system", "content": now_in(seed, session)}]
    said: list[str] = []
    answers: list[str] = []
    models: list[str] = []
    completion = ""
    with OpenAI(base_url=base_url, api_key="none", timeout=600) as client:
        while not (leaves and answers) and (message := user.next_message(seed, session, answers, TURNS)) is not None:
            if thumbs and answers:
                thumb = {"completion_id": completion, "thumb": "up" if user.content(answers[-1]) else "down"}
                give(client, thumb)
            said.append(message)
            messages.append({"role": "user", "content": message})
            answer = client.chat.completions.create(
                model="gpt-4o-mini", messages=messages, temperature=TEMPERATURE, max_tokens=MAX_TOKENS
            )
            completion = answer._request_id or ""  # the header X-Request-Id, by which feedback names an answer
            models.append(answer.model)
            answers.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    first = check_style(answers[0], said[0], stopped=True)
    return Talk(
        user=user.name,
        session=session,
        said=tuple(said),
        answers=tuple(answers),
        versions=tuple(map(version_of, models)),
        first_fits=user.content(answers[0]),
        content=any(map(user.content, answers)),
        first_words=first.words,
        first_on_topic=first.on_topic,
        seconds=time.monotonic() - began,
    )


def give(client: Any, thumb: dict[str, str]) -> None:
    """Sends a thumb. The gateway knows a completion when it has read it back from the log, a moment after the answer:
    until then it is 404, and sent again. Raises openai.NotFoundError after KNOWN_S seconds."""
    from openai import NotFoundError

    deadline = time.monotonic() + KNOWN_S
    while True:
        try:
            client.post("/feedback", body=thumb, cast_to=object)
            return
        except NotFoundError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def version_of(model: str) -> int | None:
    """The N of `policy@vN`, None for another model name."""
    try:
        return parse_policy_name(model)[1]
    except ValueError:
        return None


@dataclass
class Stack:
    """A stack of `tentalis up --gateway` in its own state directory."""

    home: Path
    config: Path
    model: str
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)

    def command(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        """Runs a command on the stack and returns its stdout. Raises RuntimeError for another exit code than these."""
        done = subprocess.run(
            [sys.executable, "-m", "tentalis.cli", *arguments],
            env=os.environ | {"TENTALIS_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode not in codes:
            raise RuntimeError(
                f"tentalis {' '.join(arguments)} ended with exit code {done.returncode}; see {self.home}/logs"
            )
        return done.stdout

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs `up`, then `down` at the end of the block."""
        try:
            self.command("up", "--detach", "--gateway", "--config", str(self.config), "--policy-model", self.model)
            # It exits with 1 while a process is degraded, as some are right after the start, and shows all the same.
            self.processes = json.loads(self.command("status", "-o", "json", codes=(0, 1)))["processes"]
            yield
        finally:
            self.command("down")

    @property
    def gateway(self) -> str:
        """The gateway's base URL."""
        return f"http://127.0.0.1:{self.processes['gateway']['port']}/v1"

    @property
    def settings(self) -> Settings:
        """The settings for reading the log."""
        ports = json.loads((self.home / "ports.json").read_text(encoding="utf-8"))
        return Settings.from_env().model_copy(update={"home": self.home, "bootstrap": f"127.0.0.1:{ports['broker']}"})


def write_config(options: Options, folder: Path) -> tuple[Path, str]:
    """Writes the trainer's configuration file; returns its path and the id of the run."""
    from tentalis.inference.models import resolve_model
    from trainer.config.file import override_settings
    from trainer.config.trainer_config import TrainerConfig, given_text

    model = resolve_model(options.setup.model, Settings.from_env().cache)
    config = TrainerConfig(
        run_id=options.name,
        policy=POLICY,
        base_model=str(model),
        base_model_name=model.name,
        batch_rollouts=BATCH,
        seed=options.seed,
    )
    changes = dict(each.split("=", 1) for each in METHODS[options.method])
    changes["promotion"] = options.setup.promotion
    config = override_settings(config, changes, options.method)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.yaml"
    path.write_text(given_text(config), encoding="utf-8")
    return path, config.run_id


def play(options: Options, into: Path) -> None:
    """Makes one run; writes its summary to the file `into`. Raises RuntimeError and then keeps the state directory."""
    home = Path(f".tentalis/personalise{options.setup.suffix}").absolute() / options.name
    if home.exists():
        shutil.rmtree(home)
    config, run_id = write_config(options, home)
    stack = Stack(home, config, options.setup.model)
    began = time.monotonic()
    with stack.running():
        talks, loop = converse(options, stack, run_id)
    lines = config.read_text(encoding="utf-8").splitlines(keepends=True)
    # The model's local path is not published; base_model_name identifies the model.
    kept = "".join(line for line in lines if not line.startswith("base_model:"))
    result = summary(options, talks, loop, time.monotonic() - began, kept)
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(home)


def converse(options: Options, stack: Stack, run_id: str) -> tuple[list[Talk], Loop]:
    """Holds the users' sessions one after another, each after the loop has settled. Raises RuntimeError if it does
    not settle."""
    loop = Loop(run_id)
    settings = stack.settings
    reader = Reader(settings, TOPICS, make_codec(settings))
    talks: list[Talk] = []
    try:
        settle(reader, loop, lambda: None if loop.serves else "no version is served yet")
        for number in range(options.sessions * len(options.users)):
            user = options.users[number % len(options.users)]
            leaves = options.method == CONTROL
            thumbs = options.setup.thumbs
            held = talk(stack.gateway, user, options.seed, number // len(options.users), leaves=leaves, thumbs=thumbs)
            talks.append(held)
            # The last answer of a session gets no reply.
            answered = sum(len(each.said) - 1 for each in talks)
            settle(reader, loop, partial(loop.unsettled, answered, BATCH))
            log(
                f"{options.name}: session {held.session} of {user.name} with version {held.versions[0]}: "
                f"the first answer {'fits' if held.first_fits else 'does not fit'}, {len(held.said)} messages, "
                f"{'content' if held.content else 'not content'}; {loop.steps} steps"
                f"{f', guard {dict(loop.verdicts)}' if loop.verdicts else ''}"
            )
            if not (options.full or leaves) and all(
                converged_after(fits_of(talks, each.name)) for each in options.users
            ):
                break
    finally:
        reader.close()
    return talks, loop


def settle(reader: Reader, loop: Loop, under_way: Callable[[], str | None]) -> None:
    """Reads the log until `under_way` returns None. Raises RuntimeError after SETTLES_S seconds without a record."""
    moved = time.monotonic()
    while True:
        for _, record in reader.poll(0.2):
            loop.apply(record)
            moved = time.monotonic()
        why = under_way()
        if why is None:
            return
        if time.monotonic() - moved > SETTLES_S:
            raise RuntimeError(f"no record for {SETTLES_S:g} s, but the run is not settled: {why}")


# --- results ----------------------------------------------------------------------------------------------------------


def fits_of(talks: Iterable[Talk], user: str) -> list[bool]:
    """True for each session of a user whose first answer met the rule."""
    return [held.first_fits for held in talks if held.user == user]


def summary(options: Options, talks: Sequence[Talk], loop: Loop, seconds: float, config: str) -> dict[str, Any]:
    """The summary of a run: the figures of every session, and the texts of the first and last few."""
    shown = {*range(SHOWN), *range(len(talks) - SHOWN, len(talks))}
    rows = []
    for at, held in enumerate(talks):
        row = asdict(held) | {"messages": len(held.said), "seconds": round(held.seconds, 1)}
        if at not in shown:
            del row["said"], row["answers"]
        rows.append(row)
    return {
        "method": options.method,
        "users": [user.name for user in options.users],
        "seed": options.seed,
        "judge": "next_state_rules (rules, no model)",
        "hinter": "rule",
        "converged_after": {user.name: converged_after(fits_of(talks, user.name)) for user in options.users},
        "sessions_at_most": options.sessions,
        "full": options.full,
        "steps": loop.steps,
        "steps_trained": loop.trained,
        "promotion": options.setup.promotion,
        "thumbs": options.setup.thumbs,
        "guard": dict(sorted(loop.verdicts.items())),
        "outcomes": dict(sorted(loop.outcomes.items())),
        "rewards": dict(sorted(loop.rewards.items())),
        "seconds": round(seconds),
        "config": config,
        "sessions": rows,
    }


def played(folder: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The existing runs of a folder, by user ("all" for several) and method."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        who = run["users"][0] if len(run["users"]) == 1 else "all"
        found.setdefault((who, run["method"]), []).append(run)
    return found


def write_page(setup: Setup = SETUPS["plain"]) -> None:
    """Writes `curves.png` and `README.md` from the existing runs of a setup."""
    folder = setup.folder
    runs = played(folder)
    if not runs:
        raise SystemExit(f"there is no run in {folder} yet")
    panels: dict[str, list[Curve]] = {}
    rows, strips = [], []
    for (who, method), of in sorted(runs.items()):
        for user in of[0]["users"]:
            panel = panels.setdefault(f"{user}, {'alone' if who != 'all' else 'with the others'}", [])
            shares = converged_share(
                [run["converged_after"][user] for run in of], [len(rows_of(run, user)) for run in of]
            )
            bounds = [wilson(share * len(of), len(of)) for share in shares]
            if method != CONTROL:
                panel.append(curve(f"{method} ({len(of)} runs)", COLOURS[method], shares, bounds))
            rows.append(table_row(who, method, user, of))
            strips += [strip(who, method, user, run) for run in of]
    everyone = [run for of in runs.values() for run in of]
    for title, panel in panels.items():
        hits, n = untrained(everyone, title.partition(",")[0])
        longest = max((len(each.at) for each in panel), default=IN_A_ROW)
        low, middle, high = (
            converged_by_chance(share, longest) for share in (wilson(hits, n)[0], hits / n, wilson(hits, n)[1])
        )
        panel.append(curve("by chance", "black", middle, list(zip(low, high, strict=True))))
    methods.draw(folder / "curves.png", list(panels.items()), "session", "runs that have converged")
    head = ("users", "method", "rule of", "seeds", "sessions to converge", "meet the rule", "words", "on topic")
    table = "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])
    users = dict.fromkeys(user for run in everyone for user in run["users"])
    chance = "\n".join(chance_row(everyone, user) for user in users)
    text = PAGE.format(
        table=table,
        chance=chance,
        strips="\n".join(strips),
        turns=TURNS,
        row=IN_A_ROW,
        model=setup.title,
        learns=LEARNS[setup.thumbs],
        setup="" if not setup.suffix else " SETUP=guarded",
        guard=guard_line(everyone) if setup.promotion == "guarded" else "",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def curve(label: str, colour: str, middle: Sequence[float], bounds: Sequence[tuple[float, float]]) -> Curve:
    """A curve over the sessions, from the first one on."""
    low, high = zip(*bounds, strict=True)
    return Curve(label=label, colour=colour, at=range(1, len(middle) + 1), middle=middle, low=low, high=high)


def rows_of(run: dict[str, Any], user: str) -> list[dict[str, Any]]:
    """A user's sessions."""
    return [row for row in run["sessions"] if row["user"] == user]


def is_trained(row: dict[str, Any]) -> bool:
    """True if the first answer came from a trained version."""
    return (row["versions"][0] or 0) > 0


def untrained(runs: Iterable[dict[str, Any]], user: str) -> tuple[int, int]:
    """(hits, n) of the base model's first answers: those of the control, and those in the first IN_A_ROW sessions of
    the other runs, which every run has however early it converged."""
    rows = [
        row
        for run in runs
        for row in rows_of(run, user)[: None if run["method"] == CONTROL else IN_A_ROW]
        if not is_trained(row)
    ]
    return sum(row["first_fits"] for row in rows), len(rows)


def chance_row(runs: Sequence[dict[str, Any]], user: str) -> str:
    """The line about convergence by chance, without training."""
    hits, n = untrained(runs, user)
    low, high = wilson(hits, n)
    means = map(mean_by_chance, (hits / n, high, low))
    mean, least, most = ("no end of" if mean == math.inf else f"{mean:,.0f}" for mean in means)
    return (
        f"- {user}: {hits} of {n} first answers of the untrained model meet the rule ({low:.0%} to {high:.0%}); by "
        f"chance that takes {mean} sessions on average ({least} to {most})."
    )


def strip(who: str, method: str, user: str, run: dict[str, Any]) -> str:
    """A run's first answers, in the order of its sessions."""
    marks = "".join("x" if row["first_fits"] else "." for row in rows_of(run, user))
    return f"{user if who != 'all' else f'{user} (all)':24}{method:8}seed {run['seed']}  {marks}"


def table_row(who: str, method: str, user: str, runs: Sequence[dict[str, Any]]) -> str:
    """A line of the table. Shares have their 95 % interval."""
    ends = [run["converged_after"][user] for run in runs]
    said = ", ".join(
        f"> {len(rows_of(run, user))}" if end is None else str(end) for end, run in zip(ends, runs, strict=True)
    )
    rows = [row for run in runs for row in rows_of(run, user)]
    parts = [[row for row in rows if is_trained(row) is trained] for trained in (False, True)]

    def change(text: Callable[[Sequence[dict[str, Any]]], str]) -> str:
        return " to ".join(text(part) if part else "-" for part in parts)

    def share(part: Sequence[dict[str, Any]]) -> str:
        hits = sum(row["first_fits"] for row in part)
        low, high = wilson(hits, len(part))
        return f"{hits / len(part):.0%} ({low:.0%} to {high:.0%})"

    words = change(lambda part: f"{statistics.fmean(row['first_words'] for row in part):.0f}")
    topic = change(lambda part: f"{statistics.fmean(row['first_on_topic'] for row in part):.0%}")
    return f"| {who} | {method} | {user} | {len(runs)} | {said} | {change(share)} | {words} | {topic} |"


def guard_line(runs: Sequence[dict[str, Any]]) -> str:
    """The sentence about the guard of promotion."""
    passed, refused = (sum(run["guard"].get(verdict, 0) for run in runs) for verdict in ("passed", "refused"))
    return f" The guard decides what is served: {passed} versions passed, {refused} were refused."


LEARNS = {False: "their next messages", True: "their thumbs and their next messages"}
PAGE = """# Personalisation

Simulated users talk to a policy ({model}) through the gateway with OpenAI's client, without extra headers; the
policy is trained only on {learns}. The student wants no bold text, lists or boxes, the assistant teacher at
least 60 words, the teacher praise. A session has at most {turns} turns; a satisfied user says thanks, an unsatisfied
one complains and asks for a different answer. Made by `make personalise{setup}`.{guard}

**The judge and the hinter are rules here** (`next_state_rules`, the rule hinter): a model this small cannot judge.
A session meets the rule if its first answer does; a run has converged with the {row}rd such session in a row. `none` is
the control: first answers of the untrained model, which converges only by chance.

![share of runs that have converged, by session](curves.png)

The share is the Kaplan-Meier estimate, the shade its 95 % interval (Wilson; wide, because there are only three runs).
`by chance` is the share for a model that never changes, whose first answers meet the rule as often as those of the
untrained model; its shade comes from the interval of that rate.

{chance}

{table}

The last three columns compare the first answers of the untrained model with those of all later versions. A run that
converges ends with {row} answers that meet the rule, so the second share is biased upwards. Topic: a content word in
common with the question. The first answer of each session, `x` if it met the rule:

```
{strips}
```

For context, not for comparison: the OpenClaw-RL paper reports 10.3 sessions to converge with the hybrid method, 14.1
with RL and 29.7 with distillation alone, for a model of 4B parameters, with models as users and judge, and with users
taking turns.
"""


def main() -> None:
    """Makes one run unless its summary exists, then draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, default="hybrid")
    parser.add_argument("--user", choices=(*USERS, "all", "each"), default="student")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="The number of runs, with seeds from --seed on.")
    parser.add_argument("--setup", choices=SETUPS, default="plain")
    parser.add_argument("--sessions", type=int, default=60)
    parser.add_argument("--full", action="store_true", help="Continue after the run has converged.")
    parser.add_argument("--draw-only", action="store_true", help="Draw the existing runs, without a new one.")
    given = parser.parse_args()
    setup = SETUPS[given.setup]
    singly: list[tuple[User, ...]] = [(user,) for user in USERS.values()]
    together = {"all": [tuple(USERS.values())], "each": singly}
    chosen = together[given.user] if given.user in together else [(USERS[given.user],)]
    for seed in range(given.seed, given.seed + given.seeds):
        for users in chosen:
            options = Options(given.method, users, seed, given.sessions, given.full, setup)
            path = setup.folder / f"{options.name}.json"
            if not given.draw_only and not path.exists():
                play(options, path)
                write_page(setup)
    write_page(setup)


if __name__ == "__main__":
    main()
