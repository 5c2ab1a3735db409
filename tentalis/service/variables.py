"""The one list of the environment variables that are settings: `TENTALIS_*`, and `SCHEMA_REGISTRY_*`.

Everything derives from it: reading (`Variable.read`), the options that a variable sets
(`tentalis/cli/shared/options.py`), the check before a process starts, the warning about misspelt names, `tentalis
config` and docs/reference/settings.md. To add a variable, add a constant: the list is made from the constants.
Variables that no process reads are in `tentalis.service.outside_variables`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from schemas import keyed_partitions, namespace
from tentalis.service.outside_variables import COMPOSE, TESTS
from tentalis.service.variable import (
    FILE,
    PATH,
    PORT,
    SERVERS,
    TEXT,
    TRUTH,
    WEB_ADDRESS,
    WEB_ADDRESSES,
    BadVariable,
    ValueKind,
    Variable,
    exit_codes,
    matching,
    number,
    one_of,
    whole,
)

PREFIX = "TENTALIS_"
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LARGEST_ATTACHMENT = 2**30
"""Bytes of the largest file of an episode that any worker stores, and that a reader takes."""
HOUR_S, DAY_S = 3600.0, 86_400.0

_EVERY = "every command and process"
_CLIENTS = "every command and process that uses Kafka"
_STREAMS = "stream applications"
_DEAD = "stream applications, `train` and `serve policies`"
_METRICS = "every process with metrics, the model server and `up` aside"


def _namespace(text: str) -> str:
    try:
        return namespace.checked(text)
    except namespace.BadNamespace:
        raise ValueError from None


# The settings file

CONFIG = Variable[Path | None](
    f"{PREFIX}CONFIG",
    FILE,
    None,
    "Settings file: values of variables, with profiles for several clusters (docs/operations/profiles.md).",
    "every command",
    default_text="`tentalis.yaml` in the working folder, else `~/.config/tentalis/config.toml`",
)
PROFILE = Variable[str | None](
    f"{PREFIX}PROFILE",
    TEXT,
    None,
    "Profile of the settings file. `--profile` takes precedence.",
    "every command",
    default_text="the key `profile` of the file",
)

# Kafka and its schema registry

BOOTSTRAP = Variable[str | None](
    f"{PREFIX}BOOTSTRAP",
    SERVERS,
    None,
    "Kafka brokers. `--bootstrap-server` takes precedence.",
    _CLIENTS,
    default_text="the local stack that runs in `TENTALIS_HOME`",
)
NAMESPACE = Variable[str | None](
    namespace.VARIABLE,
    ValueKind(namespace.ALLOWED, _namespace),
    None,
    "Prefix of the names of topics, consumer groups and transactional ids, so that several stacks can share one Kafka: "
    "in the namespace staging, tasks are on staging.tentalis.tasks.v1.",
    _CLIENTS,
    default_text="no prefix",
)
KEYED_PARTITIONS = Variable[int | None](
    keyed_partitions.VARIABLE,
    whole(1, keyed_partitions.MOST),
    None,
    "Number of partitions of the keyed topics, their dead letters and the changelogs; the same for every process of a "
    "stack. `tentalis topics repartition` changes the number of topics that exist.",
    _CLIENTS,
    default_text="8, as in schemas/topics.yaml",
)
SECURITY_PROTOCOL = Variable(
    f"{PREFIX}SECURITY_PROTOCOL", one_of(*PROTOCOLS), "PLAINTEXT", "Protocol of the connection to Kafka.", _CLIENTS
)
SASL_MECHANISM = Variable[str | None](
    f"{PREFIX}SASL_MECHANISM", one_of(*MECHANISMS), None, "Mechanism of the login to Kafka.", _CLIENTS
)
SASL_USERNAME = Variable[str | None](f"{PREFIX}SASL_USERNAME", TEXT, None, "User of the login to Kafka.", _CLIENTS)
SASL_PASSWORD = Variable[str | None](
    f"{PREFIX}SASL_PASSWORD", TEXT, None, "Password of the login to Kafka.", _CLIENTS, secret=True
)
SASL_PASSWORD_FILE = Variable[Path | None](
    f"{PREFIX}SASL_PASSWORD_FILE", PATH, None, "File that holds the password of the login to Kafka.", _CLIENTS
)
SSL_CA = Variable[Path | None](
    f"{PREFIX}SSL_CA",
    PATH,
    None,
    "PEM file of the authorities that sign the brokers' certificates.",
    _CLIENTS,
    default_text="the system's authorities",
)
SSL_CERTIFICATE = Variable[Path | None](
    f"{PREFIX}SSL_CERTIFICATE", PATH, None, "PEM file of the client's certificate.", _CLIENTS
)
SSL_KEY = Variable[Path | None](f"{PREFIX}SSL_KEY", PATH, None, "PEM file of the client's key.", _CLIENTS)
SSL_KEY_PASSWORD = Variable[str | None](
    f"{PREFIX}SSL_KEY_PASSWORD", TEXT, None, "Password of the client's key.", _CLIENTS, secret=True
)
SSL_KEY_PASSWORD_FILE = Variable[Path | None](
    f"{PREFIX}SSL_KEY_PASSWORD_FILE", PATH, None, "File that holds the password of the client's key.", _CLIENTS
)
SSL_VERIFY_HOSTNAME = Variable(
    f"{PREFIX}SSL_VERIFY_HOSTNAME", TRUTH, True, "Compare the broker's host name with its certificate.", _CLIENTS
)
REGISTRY_URL = Variable[str | None](
    "SCHEMA_REGISTRY_URL",
    WEB_ADDRESS,
    None,
    "Schema registry. Without it, schemas are on the topic tentalis.schemas.v1 only.",
    _CLIENTS,
)
REGISTRY_USER = Variable[str | None]("SCHEMA_REGISTRY_USER", TEXT, None, "User of the schema registry.", _CLIENTS)
REGISTRY_PASSWORD = Variable[str | None](
    "SCHEMA_REGISTRY_PASSWORD", TEXT, None, "Password of the schema registry.", _CLIENTS, secret=True
)
REGISTRY_PASSWORD_FILE = Variable[Path | None](
    "SCHEMA_REGISTRY_PASSWORD_FILE", PATH, None, "File that holds the password of the schema registry.", _CLIENTS
)
REGISTRY_CA = Variable[Path | None](
    "SCHEMA_REGISTRY_CA",
    FILE,
    None,
    "PEM file of the authorities that sign the registry's certificate.",
    _CLIENTS,
    default_text="the system's authorities",
)
REPLICATION_FACTOR = Variable[int | None](
    f"{PREFIX}REPLICATION_FACTOR",
    whole(1, 32_767),
    None,
    "Replication factor of new topics.",
    "`topics apply`, and `up`, `demo` and `learn` through it",
    default_text="3, or the number of brokers if that is smaller",
)

# Folders

HOME = Variable(f"{PREFIX}HOME", PATH, Path(".tentalis"), "State directory of the local stack.", _EVERY)
CACHE = Variable(
    f"{PREFIX}CACHE", PATH, Path("~/.cache/tentalis"), "Folder of downloads: models, the local broker.", _EVERY
)
STORE = Variable[str | None](
    f"{PREFIX}STORE",
    matching(r"(file:///|/|s3://[^/]|gs://[^/])\S*", "file:///folder, s3://bucket/prefix or gs://bucket/prefix"),
    None,
    "Place of the checkpoints and adapters (docs/how-to/object-storage.md).",
    "`train`, `replay`, `runs` and `policy`",
    default_text="`TENTALIS_HOME`",
)
STORE_CACHE_BYTES = Variable(
    f"{PREFIX}STORE_CACHE_BYTES",
    whole(0),
    10 * 2**30,
    "Most bytes of adapters from an object store that stay in `TENTALIS_CACHE`.",
    "`serve model`, `serve policies` and `replay`",
)
ATTACHMENTS = Variable[str | None](
    f"{PREFIX}ATTACHMENTS",
    STORE.kind,
    None,
    "Place of the files of episodes that are too large for a result (docs/how-to/object-storage.md).",
    "`worker`",
    default_text="they are cut",
)
ATTACHMENT_BYTES = Variable(
    f"{PREFIX}ATTACHMENT_BYTES",
    whole(1, LARGEST_ATTACHMENT),
    32 * 2**20,
    "Most bytes of one file of an episode. A larger one is not stored, and the result says so.",
    "`worker`",
)
DATA = Variable[Path | None](
    f"{PREFIX}DATA", PATH, None, "Folder of data sets such as GSM8K.", "`manager`, `demo` and `doctor`"
)

# Every process

LOG = Variable[str | None](
    f"{PREFIX}LOG",
    one_of(*LEVELS, any_case=True),
    None,
    "Log level.",
    _EVERY,
    default_text="WARNING for commands, INFO for processes",
)
DEBUG = Variable(f"{PREFIX}DEBUG", TRUTH, False, "Print tracebacks of errors.", "every command")
TRACES = Variable[Path | None](
    f"{PREFIX}TRACES", PATH, None, "Folder to which OpenTelemetry traces are written.", "every process"
)
METRICS_PORT = Variable[int | None](
    f"{PREFIX}METRICS_PORT",
    PORT,
    None,
    "Port of /healthz, /readyz and /metrics; 0 picks a free one.",
    _METRICS,
    default_text="none are served",
)
TRAINER_NODES = Variable(
    f"{PREFIX}TRAINER_NODES", whole(1), 1, "Number of machines on which the trainer runs its ranks.", "`train`"
)
TRAINER_NODE = Variable(
    f"{PREFIX}TRAINER_NODE", whole(0), 0, "Number of this machine among those of the trainer, from 0.", "`train`"
)
TRAINER_RENDEZVOUS = Variable[str | None](
    f"{PREFIX}TRAINER_RENDEZVOUS",
    matching(r"\S+:[0-9]+", "HOST:PORT"),
    None,
    "HOST:PORT at which the trainer's nodes meet: an address of node 0, which listens on the port.",
    "`train`",
    default_text="one machine",
)
HOLD = Variable[frozenset[int] | None](
    f"{PREFIX}HOLD",
    exit_codes(),
    None,
    "Exit codes with which a process does not end but waits for SIGTERM, alive and, unless the code is 0, not ready: "
    "for supervisors that restart whatever ends, such as Kubernetes and Docker.",
    "every process with a metrics port",
    default_text="every process ends",
)
METRICS_HOST = Variable(
    f"{PREFIX}METRICS_HOST",
    matching(r"[^\s/]+", "a host name or an address"),
    "127.0.0.1",
    "Address on which health and metrics are served.",
    _METRICS,
)

# Applications

SERVER = Variable[str | None](
    f"{PREFIX}SERVER",
    WEB_ADDRESSES,
    None,
    "URL of the model server, or of each of its replicas, separated by commas.",
    "`worker`, `serve policies`, `serve hinting`, `serve experience`, `serve gateway`",
)
INFERENCE_BACKEND = Variable[str | None](
    "INFERENCE_BACKEND",
    one_of("ollama", "openai"),
    None,
    "Kind of the model server of a worker without a server; `ollama` is http://localhost:11434 unless "
    "INFERENCE_BASE_URL is set.",
    "`worker`",
)
INFERENCE_BASE_URL = Variable[str | None](
    "INFERENCE_BASE_URL", WEB_ADDRESS, None, "URL of the model server of a worker without a server.", "`worker`"
)
INFERENCE_API_KEY = Variable[str | None](
    "INFERENCE_API_KEY", TEXT, None, "API key for the model server of a worker.", "`worker`", secret=True
)
VLLM_LORA_NAME = Variable[str | None](
    "VLLM_LORA_NAME",
    TEXT,
    None,
    "Name of the model that the server of INFERENCE_BASE_URL or INFERENCE_BACKEND is asked for.",
    "`worker`",
)
VLLM = Variable[Path | None](
    f"{PREFIX}VLLM",
    PATH,
    None,
    "The executable `vllm`, in its own Python environment.",
    "`serve vllm`, and `up --server vllm` through it",
    default_text="that of `make vllm` in `TENTALIS_CACHE`, or the one on PATH",
)
KEYS = Variable[Path | None](
    f"{PREFIX}KEYS",
    PATH,
    None,
    "File of the gateway's API keys.",
    "`serve gateway` and `keys`",
    default_text="`serve gateway`: no keys; `keys`: keys.json in `TENTALIS_HOME`",
)
SCORERS = Variable[Path | None](
    f"{PREFIX}SCORERS",
    FILE,
    None,
    "YAML file of judges and scorers (docs/concepts/judges.md).",
    "`serve scoring` and `serve gateway`",
    default_text="the verifiers of installed packages",
)
ENVIRONMENT_FILE = Variable[Path | None](
    f"{PREFIX}ENVIRONMENT_FILE",
    FILE,
    None,
    "YAML file of environments: known ones under other names, with their settings (docs/how-to/environment-file.md).",
    "`worker`, `learn`, `env`, `rescore`, `serve scoring`, `serve hinting`, `serve aggregation` and `serve gateway`",
    default_text="the environments of this installation and of installed packages",
)
ENV_POOL = Variable[str | None](
    f"{PREFIX}ENV_POOL",
    WEB_ADDRESS,
    None,
    "URL of the pool of the environment env-pool (docs/reference/env-pool.md).",
    "`worker`, `learn` and `env`",
    default_text="`server` in the file of environments",
)
ENV_POOL_KEY = Variable[str | None](
    f"{PREFIX}ENV_POOL_KEY",
    TEXT,
    None,
    "Key of a pool of environments: `serve env-pool` requires it, and the environment env-pool sends it.",
    "`serve env-pool`, `worker`, `learn` and `env`",
    secret=True,
)
EPISODE_SECRET = Variable[str | None](
    f"{PREFIX}EPISODE_SECRET",
    TEXT,
    None,
    "Secret with which workers sign the API keys of episodes that programs play through the gateway; the same for both "
    "(docs/how-to/unchanged-agents.md).",
    "`worker` and `serve gateway`",
    default_text="the file episode-secret in `TENTALIS_HOME`, which a worker of such an environment makes",
    secret=True,
)
EPISODE_SECRET_FILE = Variable[Path | None](
    f"{PREFIX}EPISODE_SECRET_FILE",
    PATH,
    None,
    "File that holds the secret of the keys of episodes.",
    "`worker` and `serve gateway`",
)
HINTERS = Variable[Path | None](
    f"{PREFIX}HINTERS",
    FILE,
    None,
    "YAML file of hinters and the teacher (docs/concepts/hints.md).",
    "`serve hinting` and `serve experience`",
    default_text="the rule hinter, and the server's base model",
)
SIGNALS = Variable(
    f"{PREFIX}SIGNALS",
    matching(r"[a-z_]+(,[a-z_]+)*", "all, none, or names of signals separated by commas"),
    "all",
    "Implicit signals to look for (docs/concepts/signals.md): all, none, or names separated by commas.",
    "`serve sessions`",
)
SESSION_IDLE = Variable(
    f"{PREFIX}SESSION_IDLE",
    number(1, DAY_S - 1, "seconds"),
    23 * HOUR_S,
    "Seconds of log time after its last main turn at which a session ends. Less than a day: the join accepts no "
    "feedback on older turns.",
    "`serve sessions` and `serve experience`",
)
MARKER_TTL = Variable(
    f"{PREFIX}MARKER_TTL",
    number(1, 3650 * DAY_S, "seconds"),
    DAY_S,
    "Seconds of log time for which a closed task is remembered: more than the longest deadline and the longest wait "
    "for first feedback. Outcomes depend on it: set the same value in every worker and replay.",
    "`serve join`",
)
MAX_OPEN_TASKS = Variable[int | None](
    f"{PREFIX}MAX_OPEN_TASKS",
    whole(1),
    None,
    "Number of open tasks at which the process pauses its input.",
    "`serve join`",
    default_text="no bound",
)
MAX_OPEN_SESSIONS = Variable[int | None](
    f"{PREFIX}MAX_OPEN_SESSIONS",
    whole(1),
    None,
    "Number of open sessions at which the process pauses its input.",
    "`serve sessions`",
    default_text="no bound",
)
MAX_OPEN_BYTES = Variable[int | None](
    f"{PREFIX}MAX_OPEN_BYTES",
    whole(1),
    None,
    "Bytes of waiting halves, or of turns without a next state, at which the process pauses its input.",
    "`serve join` and `serve sessions`",
    default_text="no bound",
)
STATE = Variable(
    f"{PREFIX}STATE",
    one_of("memory", "rocksdb"),
    "memory",
    "Store of the state: memory, or rocksdb on disk for state larger than memory. Both are restored from the "
    "changelog.",
    _STREAMS,
)
STATE_DIR = Variable[Path | None](
    f"{PREFIX}STATE_DIR",
    PATH,
    None,
    "Folder of the state on disk.",
    _STREAMS,
    default_text="streams in `TENTALIS_HOME`",
)
DEAD_RUN = Variable(
    f"{PREFIX}DEAD_RUN",
    whole(0),
    100,
    "Most dead letters in a row; past it, the process stops with exit code 5 instead of dead-lettering every record.",
    _DEAD,
)
DEAD_RATIO = Variable(
    f"{PREFIX}DEAD_RATIO",
    number(0, 1),
    0.5,
    "Largest share of dead letters among the recent records; past it, the process stops with exit code 5.",
    _DEAD,
)

DEAD_WINDOW = Variable(
    f"{PREFIX}DEAD_WINDOW", whole(1), 1000, "Number of recent records in which the share of dead letters counts.", _DEAD
)
ACCEPT_LOSS = Variable(
    f"{PREFIX}ACCEPT_LOSS",
    TRUTH,
    False,
    "Continue after a topic was deleted, created again or cut off. What is given up is written to the outcomes and to "
    "the audit topic. Without it, such a start ends with 7 and says what would be lost.",
    "stream applications, `train`, `topics apply` and `up`",
)

# Agents that call a gateway (config/, extensions/), and commands that ask one

URL = Variable[str | None](
    f"{PREFIX}URL",
    WEB_ADDRESS,
    None,
    "URL of the gateway.",
    "agents that call a gateway, `keys usage`, `worker` of an environment that programs play",
    default_text="`keys usage`: the local stack's, else http://127.0.0.1:8200",
)
API_KEY = Variable[str | None](
    f"{PREFIX}API_KEY", TEXT, None, "API key for the gateway.", "agents that call a gateway, `keys usage`", secret=True
)

# Set by a process for its children

HEARTBEAT = Variable[Path | None](
    f"{PREFIX}HEARTBEAT",
    PATH,
    None,
    "Folder of the heartbeat that the supervisor watches.",
    "worker, manager, policies, trainer",
    internal=True,
)
READY_FD = Variable[int | None](
    f"{PREFIX}READY_FD",
    whole(0),
    None,
    "File descriptor on which a detached stack reports that it is ready.",
    "`up --detach`",
    internal=True,
)
LOG_LEVEL_FILE = Variable[Path | None](
    f"{PREFIX}LOG_LEVEL_FILE",
    PATH,
    None,
    "File with the log level, which `log-level` writes.",
    "every process of a local stack",
    internal=True,
)
SUPERVISED = Variable[str | None](
    f"{PREFIX}SUPERVISED",
    TEXT,
    None,
    "Mark of the processes of one local stack.",
    "every process of a local stack",
    internal=True,
)

VARIABLES: tuple[Variable[Any], ...] = tuple(each for each in list(globals().values()) if isinstance(each, Variable))
"""Every variable that a process reads, in the order of their definitions."""

NAMES = frozenset(each.name for each in VARIABLES)

LISTED: tuple[Variable[Any], ...] = (*VARIABLES, *COMPOSE, *TESTS)
"""Every variable: also those that only docker-compose.yml or the tests read."""


def named(name: str) -> Variable[Any]:
    """The variable of this name. Raises KeyError."""
    return {each.name: each for each in LISTED}[name]


def problems(env: Mapping[str, str]) -> list[str]:
    """The variables of an environment that have a value that is not allowed, each as a message."""
    found = []
    for variable in VARIABLES:
        try:
            variable.read(env)
        except BadVariable as error:
            found.append(str(error))
    return found
