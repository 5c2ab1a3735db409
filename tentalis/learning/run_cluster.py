"""The Kafka of a run, recorded in its folder: a run is continued where its records are."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tentalis.learning.errors import LearnError
from tentalis.learning.runs import LearnRun
from tentalis.local.broker import stored_cluster_id
from tentalis.local.made_topics import cluster_id
from tentalis.local.state import read_whole, write_whole
from tentalis.service import variables
from tentalis.service.settings import Settings

FILE = "kafka.json"
_REMEDY = "Remove it if the run is on this Kafka, or begin another run with --new"


@dataclass(frozen=True, slots=True)
class RunCluster:
    """The Kafka of a run. `bootstrap`: None for the local broker; `namespace`: '' for none."""

    cluster_id: str
    bootstrap: str | None
    namespace: str

    @property
    def words(self) -> str:
        """The Kafka in words."""
        where = "the local broker" if self.bootstrap is None else f"Kafka at {self.bootstrap}"
        return f"{where} (cluster id {self.cluster_id}{self.namespace and f', namespace {self.namespace}'})"

    def way_back(self, bootstrap: str | None, namespace: str) -> str:
        """Returns the settings to change, in words, to reach it from other ones; '' if they are the same."""
        pairs = (
            (variables.BOOTSTRAP.name, self.bootstrap, bootstrap),
            (variables.NAMESPACE.name, self.namespace, namespace),
        )
        return " and ".join(f"set {name}={to}" if to else f"unset {name}" for name, to, now in pairs if to != now)


class ClusterRecord:
    """Records the Kafka of a run in the run's folder once it has the run's records. An earlier record stays.

    For a run that begins, this is at once, or on a local broker without data with the first `update`. A run that is
    continued without a record may have begun on another Kafka: it is recorded when `update` gets a manifest that an
    earlier session wrote.

    Raises Unreachable, KafkaException, BrokerError, OSError.
    """

    def __init__(self, run: LearnRun, settings: Settings) -> None:
        self._run, self._settings = run, settings
        self._since = round(1000 * time.time())
        self._path = run.folder / FILE
        self._recorded = self._path.exists()
        self._cluster = None if self._recorded else _cluster(settings)
        if self._cluster is not None:
            self.update(None)

    def update(self, manifest_time: int | None) -> None:
        """Records the Kafka if it is known to be the run's. To be called when the topics are made.

        Args:
            manifest_time: of the run's manifest on this Kafka, in ms since the epoch; None if it has not been read.

        Raises BrokerError, OSError.
        """
        if self._recorded or (self._run.resumed and (manifest_time is None or manifest_time >= self._since)):
            return
        if self._cluster is None:  # a local broker, which has data by now
            self._cluster = _cluster(self._settings)
        if self._cluster is not None:
            write_whole(self._path, asdict(self._cluster))
            self._recorded = True


def check_cluster(run: LearnRun, settings: Settings) -> None:
    """Checks that an unfinished run is on the Kafka of the settings. A run without a record is not checked.

    Raises LearnError, StateDirError, Unreachable, KafkaException, BrokerError.
    """
    path = run.folder / FILE
    try:
        begun = RunCluster(**read_whole(path, _REMEDY))
    except FileNotFoundError:
        return
    except TypeError as error:
        raise LearnError(f"{path} is damaged: {error}. {_REMEDY}") from error
    now = _cluster(settings)
    if now is not None and (now.cluster_id, now.namespace) == (begun.cluster_id, begun.namespace):
        return
    found = f"an empty local broker in {_data(settings)}" if now is None else now.words
    remedy = begun.way_back(settings.bootstrap, variables.NAMESPACE.read() or "")
    if not remedy:
        remedy = f"restore {_data(settings) if begun.bootstrap is None else 'the data of that cluster'}"
    raise LearnError(
        f"run {run.run_id}, which is unfinished, has its records on {begun.words}, and this is {found}. To continue "
        f"the run, {remedy}; --new begins another run here"
    )


def _cluster(settings: Settings) -> RunCluster | None:
    """Returns the Kafka of the settings; None for a local broker that has no data yet."""
    found = stored_cluster_id(_data(settings)) if settings.bootstrap is None else cluster_id(settings)
    return None if found is None else RunCluster(found, settings.bootstrap, variables.NAMESPACE.read() or "")


def _data(settings: Settings) -> Path:
    return settings.home / "kafka"
