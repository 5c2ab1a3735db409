"""A run is continued on the Kafka that has its records, and nowhere else."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tentalis.learning.errors import LearnError
from tentalis.learning.run_cluster import FILE, ClusterRecord, check_cluster
from tentalis.learning.runs import LearnRun
from tentalis.local import made_topics
from tentalis.local.broker import BrokerError, stored_cluster_id
from tentalis.service import variables
from tentalis.service.settings import Settings

GIVEN = "kafka.example:9092"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearnRun:
    """A run in a home without a broker; the cluster `remote` answers on every address."""

    def connect(_: Settings) -> Any:
        return SimpleNamespace(list_topics=lambda timeout: SimpleNamespace(cluster_id="remote"))

    monkeypatch.setattr(made_topics, "connect", connect)
    monkeypatch.delenv(variables.NAMESPACE.name, raising=False)
    folder = tmp_path / "runs" / "learn-1"
    folder.mkdir(parents=True)
    return LearnRun(folder.name, folder, resumed=False)


def local(run: LearnRun, cluster: str | None = None) -> Settings:
    """Settings without a given Kafka; the local broker has data of a cluster."""
    home = run.folder.parents[1]
    if cluster is not None:
        (home / "kafka" / "log").mkdir(parents=True, exist_ok=True)
        stored = cluster.replace("=", "\\=")
        (home / "kafka" / "log" / "meta.properties").write_text(f"# Kafka\nversion=1\ncluster.id={stored}\nnode.id=1\n")
    return Settings(bootstrap=None, home=home)


def test_a_run_of_the_local_broker_is_recorded_once_it_has_data_and_refused_elsewhere(run: LearnRun) -> None:
    record = ClusterRecord(run, local(run))
    assert not (run.folder / FILE).exists()
    check_cluster(run, local(run))  # killed before the topics were made: no records anywhere
    local(run, "own==")
    record.update(None)
    assert '"cluster_id": "own=="' in (run.folder / FILE).read_text()
    check_cluster(run, local(run))
    with pytest.raises(
        LearnError, match=r"on the local broker \(cluster id own==\), and this is Kafka at kafka.ex"
    ) as said:
        check_cluster(run, Settings(bootstrap=GIVEN, home=local(run).home))
    assert "To continue the run, unset TENTALIS_BOOTSTRAP; --new" in str(said.value)
    with pytest.raises(
        LearnError, match=r"this is the local broker \(cluster id anew\). To continue the run, restore .*/kafka;"
    ):
        check_cluster(run, local(run, "anew"))


def test_a_run_of_a_given_kafka_is_continued_under_another_address_but_not_in_another_namespace(
    run: LearnRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Settings(bootstrap=GIVEN, home=local(run).home)
    ClusterRecord(run, given)
    check_cluster(run, given.model_copy(update={"bootstrap": "other.example:9092"}))
    with pytest.raises(LearnError, match=f"an empty local broker in .* set TENTALIS_BOOTSTRAP={GIVEN}; --new"):
        check_cluster(run, local(run))
    monkeypatch.setenv(variables.NAMESPACE.name, "mine")
    with pytest.raises(
        LearnError, match=r"\(cluster id remote, namespace mine\)\. To continue the run, unset TENTALIS_NAMESPACE;"
    ):
        check_cluster(run, given)


def test_a_run_that_is_continued_without_a_record_is_recorded_where_its_manifest_was_before(run: LearnRun) -> None:
    before = round(1000 * time.time()) - 1
    record = ClusterRecord(replace(run, resumed=True), Settings(bootstrap=GIVEN, home=local(run).home))
    record.update(None)
    record.update(before + 3_600_000)  # of this session's trainer, which finds no manifest there
    assert not (run.folder / FILE).exists()
    record.update(before)
    assert '"cluster_id": "remote"' in (run.folder / FILE).read_text()
    ClusterRecord(run, local(run, "own==")).update(before)
    assert '"cluster_id": "remote"' in (run.folder / FILE).read_text()


def test_damaged_records_are_named(run: LearnRun) -> None:
    (run.folder / FILE).write_text('{"cluster_id": "x"}')
    with pytest.raises(LearnError, match=f"{FILE} is damaged: .* begin another run with --new"):
        check_cluster(run, local(run))
    meta = local(run, "x").home / "kafka" / "log" / "meta.properties"
    meta.write_text("version=1\n")
    with pytest.raises(BrokerError, match=r"has no cluster\.id"):
        stored_cluster_id(local(run).home / "kafka")
