"""The processes of the stack, one command each: what `tentalis up`, compose and helm start."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tentalis.cli.common import USAGE, Bootstrap, CommandError, configure_logging, resolve_settings, settings_of_role
from tentalis.cli.loop import Scenario

if TYPE_CHECKING:
    from tentalis.config import Settings

app = typer.Typer(help="Runs one process of the stack until SIGTERM.", no_args_is_help=True, rich_markup_mode=None)


class State(StrEnum):
    MEMORY = "memory"
    ROCKSDB = "rocksdb"


Server = Annotated[str, typer.Option("--server", envvar="TENTALIS_SERVER", help="URL of the model server.")]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        envvar="TENTALIS_METRICS_PORT",
        help="For /healthz, /readyz and /metrics, 0 for a free one; on 127.0.0.1, or where TENTALIS_METRICS_HOST says.",
        show_default=False,
    ),
]
Instance = Annotated[
    str | None,
    typer.Option(
        "--instance",
        help="Unique and lasting name in the consumer group, so that a restart keeps its partitions. "
        "Default: host name and metrics port, if there is one.",
        show_default=False,
    ),
]


Where = Annotated[
    State,
    typer.Option(
        "--state",
        envvar="TENTALIS_STATE",
        help="Where state lies: in memory, or on disk if it is larger than that. The changelog has it in either case.",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="TENTALIS_STATE_DIR",
        help="Folder of the state on disk. Default: streams in TENTALIS_HOME.",
        show_default=False,
    ),
]
Horizon = Annotated[
    float,
    typer.Option(
        "--feedback-horizon",
        min=0.0,
        help="Seconds of log time within which feedback without its result is paired with it; 0: nothing comes of such "
        "feedback, and nothing is kept.",
    ),
]
HOUR_S, DAY_S = 3600.0, 86400.0


class Promote(StrEnum):
    RUN = "run"
    ALWAYS = "always"
    MANUAL = "manual"
    NONE = "none"


@app.command(short_help="The model server.")
def model(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    policy_model: Annotated[
        str | None, typer.Option("--policy-model", help="Folder or hub id. Default: SmolLM2-135M-Instruct.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    served_name: Annotated[
        str | None, typer.Option("--served-name", help="Name of the base model. Default: the folder's.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option("--max-model-len", min=1, help="Context in tokens. Default: the model's, at most 2048."),
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Samples decoded together.")] = 64,
    max_adapters: Annotated[int, typer.Option("--max-adapters", min=1, help="Adapters loaded at once.")] = 64,
) -> None:
    """The model server: OpenAI-compatible, with log-probs, token ids and hot-swapped adapters."""
    configure_logging("INFO")
    from tentalis.inference.models import resolve_model
    from tentalis.inference.server import serve

    path = resolve_model(policy_model, resolve_settings().cache)
    serve(
        path,
        host=host,
        port=port,
        served_name=served_name,
        threads=threads,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_batch=max_batch,
        max_adapters=max_adapters,
    )


@app.command(short_help="Loads promoted adapters into the server.")
def policies(
    server: Server,
    server_id: Annotated[str, typer.Option("--server-id", help="Name under which it acknowledges.")] = "local",
    promotion: Annotated[
        Promote, typer.Option(help="Who promotes: as each run says, always this process, or another.")
    ] = Promote.RUN,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Follows promotions, loads the adapters into the server and acknowledges them."""
    configure_logging("INFO")
    from tentalis.policies import serve

    serve(
        settings_of_role("policies", bootstrap),
        server=server,
        server_id=server_id,
        promotion=promotion.value,
        metrics_port=port,
    )


def _dead_limits(env: Mapping[str, str]) -> dict[str, Any]:
    """Past which an application stops instead of dead-lettering everything: TENTALIS_DEAD_RUN records in a row, the
    share TENTALIS_DEAD_RATIO of the recent ones."""
    limits: dict[str, Any] = {}
    for name, field, kind in (("TENTALIS_DEAD_RUN", "dead_run", int), ("TENTALIS_DEAD_RATIO", "dead_ratio", float)):
        text = env.get(name)
        if not text:
            continue
        try:
            limits[field] = kind(text)
        except ValueError as error:
            raise CommandError(f"{name}={text} is no number", USAGE) from error
        if limits[field] < 0:
            raise CommandError(f"{name}={text} is below 0", USAGE)
    return limits


def _stream(
    name: str,
    build: Callable[[Settings], Any],
    bootstrap: str | None,
    port: int | None,
    instance: str | None,
    state: State,
    state_dir: Path | None,
) -> NoReturn:
    configure_logging("INFO")
    from streams.app import StreamSettings, run
    from tentalis.health import host

    settings = settings_of_role(name, bootstrap)
    member = instance or (f"{socket.gethostname()}-{port}" if port else None)
    stream_settings = StreamSettings(
        bootstrap=settings.require_bootstrap(),
        state_dir=(state_dir or settings.home / "streams") / name,
        state=state.value,
        metrics_port=port,
        metrics_host=host(),
        security=settings.security,
        instance=member,
        **_dead_limits(os.environ),
    )
    raise typer.Exit(run(build(settings), stream_settings))


@app.command()
def scoring(
    scorers: Annotated[
        Path | None,
        typer.Option(
            "--scorers",
            envvar="TENTALIS_SCORERS",
            help="YAML file of judges and scorers (docs/judges.md). Default: the verifiers of installed packages.",
            show_default=False,
        ),
    ] = None,
    feedback_horizon: Horizon = HOUR_S,
    state: Where = State.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Results and feedback to scores, tasks to opens."""
    if scorers is not None:
        _load_scorers(scorers)
    from streams.scoring import build

    make = partial(build, feedback_horizon_ms=round(1000 * feedback_horizon))
    _stream("scoring", make, bootstrap, port, instance, state, state_dir)


def _load_scorers(path: Path, *, names_only: bool = False) -> None:
    configure_logging("INFO")
    from tentalis.rewards.scorer_file import BadScorers, load_scorers, name_scorers

    try:
        name_scorers(path) if names_only else load_scorers(path)
    except BadScorers as error:
        raise CommandError(str(error), USAGE) from error


@app.command()
def hinting(
    server: Server,
    hinters: Annotated[
        Path | None,
        typer.Option(
            "--hinters",
            envvar="TENTALIS_HINTERS",
            help="YAML file: who makes hints in which environment, and who teaches (docs/hints.md). Default: the rule "
            "everywhere, and the server's base model.",
            show_default=False,
        ),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Without --hinters: model or adapter on the server. Default: the base model.")
    ] = None,
    teacher_top: Annotated[
        int,
        typer.Option(
            "--teacher-top", min=0, max=20, help="Without --hinters: likeliest tokens per token that it is asked for."
        ),
    ] = 0,
    feedback_horizon: Horizon = HOUR_S,
    state: Where = State.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Feedback to hints, with the teacher's log-probs."""
    from streams.hinting import build
    from tentalis.opd.config import Hinters, TeacherSettings, load_hinters

    if hinters is not None and (teacher is not None or teacher_top):
        raise CommandError(f"--teacher and --teacher-top are said in {hinters}, as teacher.model and .top", USAGE)
    chosen = Hinters(teacher=TeacherSettings(model=teacher, top=teacher_top))
    if hinters is not None:
        chosen = load_hinters(hinters)
    make = partial(build, server=server, hinters=chosen, feedback_horizon_ms=round(1000 * feedback_horizon))
    _stream("hinting", make, bootstrap, port, instance, state, state_dir)


@app.command(short_help="One lesson of each session that ends.")
def experience(
    server: Server,
    hinters: Annotated[
        Path,
        typer.Option(
            "--hinters",
            envvar="TENTALIS_HINTERS",
            help="YAML file: who extracts lessons, and who teaches (docs/hints.md).",
        ),
    ],
    idle: Annotated[
        float,
        typer.Option(
            "--idle",
            min=1.0,
            envvar="TENTALIS_SESSION_IDLE",
            help="Seconds of log time after its last main turn at which a session has ended.",
        ),
    ] = 23 * HOUR_S,
    state: Where = State.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Sessions that have ended to a lesson each, with the teacher's log-probs of every turn under it."""
    from streams.experience.processor import build
    from tentalis.opd.config import load_hinters

    make = partial(build, server=server, hinters=load_hinters(hinters), idle_ms=round(1000 * idle))
    _stream("experience", make, bootstrap, port, instance, state, state_dir)


@app.command()
def join(
    marker_ttl: Annotated[
        float,
        typer.Option(
            "--marker-ttl",
            envvar="TENTALIS_MARKER_TTL",
            help="Seconds of log time for which a closed task is remembered: above the longest deadline and what first "
            "feedback may take. Part of what a log means: the same in every worker and in a replay.",
        ),
    ] = DAY_S,
    max_open_tasks: Annotated[
        int | None,
        typer.Option(
            "--max-open-tasks",
            min=1,
            envvar="TENTALIS_MAX_OPEN_TASKS",
            help="Open tasks in this process at which its input waits. Default: no bound.",
            show_default=False,
        ),
    ] = None,
    max_open_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-open-bytes",
            min=1,
            envvar="TENTALIS_MAX_OPEN_BYTES",
            help="The same of the bytes of the halves that they wait with.",
            show_default=False,
        ),
    ] = None,
    state: Where = State.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Halves to rollouts and outcomes."""
    from streams.join.processor import JoinProcessor, limits_of
    from streams.join.room import Bound
    from tentalis.kafka import make_codec

    bound = Bound(max_open_tasks, max_open_bytes)
    try:
        limits = limits_of(round(1000 * marker_ttl))
    except ValueError as error:
        raise CommandError(f"--marker-ttl {marker_ttl:g} (TENTALIS_MARKER_TTL): {error}", USAGE) from error

    def make(settings: Settings) -> JoinProcessor:
        return JoinProcessor(make_codec(settings, patience=0.0), limits, bound=bound)

    _stream("join", make, bootstrap, port, instance, state, state_dir)


@app.command(short_help="Links the turns of conversations.")
def sessions(
    idle: Annotated[
        float,
        typer.Option(
            "--idle",
            min=1.0,
            max=24 * HOUR_S - 1,
            envvar="TENTALIS_SESSION_IDLE",
            help="Seconds of log time after its last main turn at which a session has ended; below a day, after which "
            "the join takes no feedback on a turn.",
        ),
    ] = 23 * HOUR_S,
    signals: Annotated[
        str,
        typer.Option(
            envvar="TENTALIS_SIGNALS",
            help="Implicit signals to look for, with commas between them (docs/signals.md): all, none, or names.",
        ),
    ] = "all",
    max_open_sessions: Annotated[
        int | None,
        typer.Option(
            "--max-open-sessions",
            min=1,
            envvar="TENTALIS_MAX_OPEN_SESSIONS",
            help="Open sessions in this process at which its input waits. Default: no bound.",
            show_default=False,
        ),
    ] = None,
    max_open_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-open-bytes",
            min=1,
            envvar="TENTALIS_MAX_OPEN_BYTES",
            help="The same of the bytes of the turns whose next state is awaited.",
            show_default=False,
        ),
    ] = None,
    state: Where = State.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Session events to tasks, results, and what came next as feedback."""
    from streams.join.room import Bound
    from streams.sessions.processor import build
    from tentalis.signals import NAMES

    names = {"all": NAMES, "none": frozenset[str]()}.get(signals, frozenset(signals.split(",")))
    if not names <= NAMES:
        unknown = ", ".join(sorted(names - NAMES))
        raise CommandError(f"--signals: there is no {unknown}; there are {', '.join(sorted(NAMES))}", USAGE)
    bound = Bound(max_open_sessions, max_open_bytes)
    make = partial(build, idle_ms=round(1000 * idle), signals=names, bound=bound)
    _stream("sessions", make, bootstrap, port, instance, state, state_dir)


@app.command(short_help="Windowed means per manager and worker.")
def aggregation(
    state: Where = State.MEMORY,
    state_dir: StateDir = None,
    port: MetricsPort = None,
    instance: Instance = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Outcomes and feedback to windowed means per manager and worker."""
    from streams.aggregation import build

    _stream("aggregation", build, bootstrap, port, instance, state, state_dir)


class Logprobs(StrEnum):
    RAW = "raw"
    PROCESSED = "processed"


@app.command(short_help="Where agents ask for completions; what is said is recorded.")
def gateway(
    server: Annotated[
        str | None,
        typer.Option("--server", envvar="TENTALIS_SERVER", help="URL of the one backend, where no --config is given."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="What the one backend is asked for, whatever model a client names."),
    ] = None,
    server_id: Annotated[
        str, typer.Option("--server-id", help="Whose acknowledgements tell what is served.")
    ] = "local",
    logprobs_mode: Annotated[
        Logprobs,
        typer.Option(
            "--logprobs-mode",
            help="The one backend's log-probs: raw, of the bare model, as vLLM gives them, or processed, of the "
            "distribution that it sampled from, as `tentalis serve model` gives them.",
        ),
    ] = Logprobs.RAW,
    config: Annotated[
        Path | None,
        typer.Option("--config", exists=True, dir_okay=False, help="YAML: backends, policies and bounds."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8200,
    keys: Annotated[
        Path | None,
        typer.Option(
            "--keys",
            envvar="TENTALIS_KEYS",
            help="File of API keys, see `tentalis keys`. Default: none are asked for, which only 127.0.0.1 may do.",
            show_default=False,
        ),
    ] = None,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Ask nobody for a key, wherever it listens.")] = False,
    scorers: Annotated[
        Path | None,
        typer.Option(
            "--scorers",
            envvar="TENTALIS_SCORERS",
            help="Scoring's file of judges and scorers: tasks may name its verifiers. Only their names are read.",
            show_default=False,
        ),
    ] = None,
    gateway_id: Annotated[
        str | None,
        typer.Option("--gateway-id", help="Its own, lasting name. Default: host name and port.", show_default=False),
    ] = None,
    spool_dir: Annotated[
        Path | None,
        typer.Option(
            "--spool-dir",
            help="Where turns wait on disk while the broker is away. Default: gateway/ID in TENTALIS_HOME.",
            show_default=False,
        ),
    ] = None,
    drain_s: Annotated[
        int | None,
        typer.Option(
            "--drain-s",
            min=0,
            help="Seconds that answers under way may take after SIGTERM. Default: drain_s of --config, or 60.",
            show_default=False,
        ),
    ] = None,
    metrics_port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """An OpenAI-compatible proxy that writes down what is said. Any number of them may serve one session."""
    configure_logging("INFO")
    from schemas.records import LogprobsMode
    from tentalis.gateway.process import serve
    from tentalis.gateway.settings import GatewaySettings

    if keys is None and not no_keys and host not in ("127.0.0.1", "::1", "localhost"):
        raise CommandError(
            f"on {host} anybody could ask: name a file of API keys with --keys (`tentalis keys create` makes one), "
            "or say --no-keys",
            USAGE,
        )
    if scorers is not None:
        _load_scorers(scorers, names_only=True)
    name = gateway_id or f"{socket.gethostname()}-{port}"
    if config is not None:
        told = GatewaySettings.from_file(config, gateway_id=name)
    elif server is not None:
        mode = LogprobsMode(logprobs_mode.value)
        told = GatewaySettings.simple(server, server_id=server_id, policy=policy, gateway_id=name, logprobs_mode=mode)
    else:
        raise CommandError("name the backend: --server URL, or --config FILE for several", USAGE)
    if drain_s is not None:
        told = told.model_copy(update={"drain_s": drain_s})
    settings = settings_of_role("gateway", bootstrap)
    serve(
        told,
        settings,
        host=host,
        port=port,
        keys=keys,
        spool=spool_dir or settings.home / "gateway" / told.gateway_id,
        local=keys is None and not no_keys,
        metrics_port=metrics_port,
    )


def worker(
    server: Server,
    environment: Annotated[str, typer.Option(help="Kind of tasks that it answers.")] = "chat",
    worker_id: Annotated[str | None, typer.Option("--worker-id", help="Default: host name and environment.")] = None,
    server_id: Annotated[
        str, typer.Option("--server-id", help="Whose acknowledgements tell what is served.")
    ] = "local",
    concurrency: Annotated[int, typer.Option(min=1, help="Tasks at once.")] = 8,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Answers tasks with the newest acknowledged policy."""
    configure_logging("INFO")
    from tentalis.workers import run

    run(
        settings_of_role("worker", bootstrap),
        environment=environment,
        server=server,
        worker_id=worker_id,
        server_id=server_id,
        concurrency=concurrency,
        metrics_port=port,
    )


def manager(
    run_id: Annotated[str, typer.Option("--run", help="Id of the run that its tasks carry.")],
    scenario: Annotated[Scenario, typer.Option(help="What it asks for.")] = Scenario.ASSISTANT,
    samples: Annotated[int | None, typer.Option(min=1, help="Per task. Default: the scenario's.")] = None,
    port: MetricsPort = None,
    bootstrap: Bootstrap = None,
) -> None:
    """Gives tasks and, as the simulated user, feedback."""
    configure_logging("INFO")
    from tentalis.manager import run

    settings = settings_of_role("manager", bootstrap)
    raise typer.Exit(run(settings, scenario=scenario.value, run_id=run_id, n_samples=samples, metrics_port=port))
