"""Errors as users read them: the message and the exit code. Imports nothing heavy."""

from __future__ import annotations

import sys

from tentalis.service.exit_codes import ExitCode

# Exit codes of error classes, by their full names: importing the classes would load their libraries. All other errors
# end with ExitCode.ERROR.
EXIT_CODES = {
    "schemas.keyed_partitions.BadKeyedPartitions": ExitCode.USAGE,
    "schemas.namespace.BadNamespace": ExitCode.USAGE,
    "schemas.wire.codec.SchemasUnavailable": ExitCode.UNREACHABLE,
    "schemas.wire.registry.SchemaRefused": ExitCode.DRIFT,
    "tentalis.agents.environments.agent.BadProgram": ExitCode.USAGE,
    "tentalis.agents.environments.env_pool.BadPool": ExitCode.USAGE,
    "tentalis.agents.environments.openenv.environment.BadOpenEnv": ExitCode.USAGE,
    "tentalis.agents.environments.registry.BadEnvironment": ExitCode.USAGE,
    "tentalis.agents.environments.terminal_task.BadTasks": ExitCode.USAGE,
    "tentalis.agents.environments.trial.play.ProgramNeedsServer": ExitCode.USAGE,
    "tentalis.agents.environments.tools.BadTools": ExitCode.USAGE,
    "tentalis.agents.environments.verifiers_process.BadVerifiersEnvironment": ExitCode.USAGE,
    "tentalis.dlq.limits.TooManyDead": ExitCode.NEEDS_OPERATOR,
    "tentalis.gateway.settings.BadGateway": ExitCode.USAGE,
    "tentalis.inference.episode_secret.BadEpisodeSecret": ExitCode.USAGE,
    "tentalis.kafka.admin.Impossible": ExitCode.DRIFT,
    "tentalis.kafka.preflight.TopicsMissing": ExitCode.DRIFT,
    "tentalis.kafka.errors.Forbidden": ExitCode.FORBIDDEN,
    "tentalis.kafka.errors.Unreachable": ExitCode.UNREACHABLE,
    "tentalis.kafka.identity.PartitionsChanged": ExitCode.DRIFT,
    "tentalis.kafka.errors.NoSuchTopic": ExitCode.DRIFT,
    "tentalis.learning.errors.LearnError": ExitCode.USAGE,
    "tentalis.ops.key_usage.GatewayAway": ExitCode.UNREACHABLE,
    "tentalis.rewards.environment_file.BadEnvironmentFile": ExitCode.USAGE,
    "tentalis.service.lifecycle.Unmendable": ExitCode.PERMANENT,
    "tentalis.service.packages.MissingExtra": ExitCode.USAGE,
    "tentalis.service.security.BadSecurity": ExitCode.USAGE,
    "tentalis.service.settings.NoBroker": ExitCode.UNREACHABLE,
    "tentalis.service.settings_file.BadSettingsFile": ExitCode.USAGE,
    "tentalis.service.variable.BadVariable": ExitCode.USAGE,
    "tentalis.storage.errors.NoSuchBucket": ExitCode.PERMANENT,
    "tentalis.storage.errors.StoreDenied": ExitCode.FORBIDDEN,
    "tentalis.storage.errors.StoreFull": ExitCode.NEEDS_OPERATOR,
    "tentalis.storage.errors.StoreUnreachable": ExitCode.UNREACHABLE,
    "tentalis.storage.location.BadLocation": ExitCode.USAGE,
    "trainer.config.trainer_config.ConfigError": ExitCode.USAGE,
}


def explain(error: Exception) -> tuple[str, int]:
    """Returns the message for the user and the exit code of an error."""
    # Looked up, not imported: a library that was never loaded cannot have raised the error.
    kafka = sys.modules.get("confluent_kafka")
    if kafka is not None and isinstance(error, kafka.KafkaException):
        reason = error.args[0]
        away = {
            kafka.KafkaError._ALL_BROKERS_DOWN,
            kafka.KafkaError._TRANSPORT,
            kafka.KafkaError._TIMED_OUT,
            kafka.KafkaError._RESOLVE,
        }
        return f"Kafka: {reason.str()}", ExitCode.UNREACHABLE if reason.code() in away else ExitCode.ERROR
    for base in type(error).__mro__:
        if code := EXIT_CODES.get(f"{base.__module__}.{base.__qualname__}"):
            return str(error), code
    if isinstance(error, ModuleNotFoundError):
        from tentalis.service.packages import extra_of, how_to_install

        extra = extra_of(error.name or "")
        if extra is not None:
            return f"{error}: {how_to_install(extra)}", ExitCode.USAGE
        return f"{error}. The installation is incomplete: `tentalis doctor` lists what is missing", ExitCode.ERROR
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        return f"{error.filename}: {error.strerror}", ExitCode.ERROR
    text = str(error) or type(error).__name__
    if not _is_ours(error) and not isinstance(error, (OSError, ValueError)):
        text = f"{type(error).__name__}: {text}"
    return text, ExitCode.ERROR


def is_foreseen(error: Exception) -> bool:
    """True if the message of an error suffices for its user: a traceback adds nothing to it."""
    kafka = sys.modules.get("confluent_kafka")
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}
    return (
        _is_ours(error)
        or not names.isdisjoint(EXIT_CODES)
        or (kafka is not None and isinstance(error, kafka.KafkaException))
        or (isinstance(error, OSError) and error.filename is not None)
    )


def _is_ours(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] in ("tentalis", "schemas", "streams", "trainer")
