"""The catalogue of metrics, who exports what, and what a process answers on its port."""

import asyncio
import re
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemas import topics
from schemas.codec import Codec
from schemas.records import Record
from streams import health as stream_health
from streams.aggregation import Aggregation
from streams.delivery import Counts
from streams.experience.processor import Experience
from streams.hinting import Hinting
from streams.join.processor import JoinProcessor
from streams.processor import LogRecord, Processor
from streams.scoring import Scoring
from streams.sessions.processor import SessionsProcessor
from tentalis import metrics
from tentalis.gateway.measures import Measures
from tentalis.health import Health, PortTaken, served
from tentalis.inference.engine import EngineStats
from tentalis.inference.server import ServerMetrics
from tentalis.manager.process import ManagerMetrics
from tentalis.metrics import CATALOGUE, PROCESSES, Exporter, Kind, exported_by, markdown
from tentalis.policies.process import PolicyMetrics
from tentalis.workers.process import WorkerMetrics
from tests.unit.join_support import CODEC, LIMITS, PARTITION, START, head, hint, open_, sample, score, tick
from trainer import composition
from trainer.config import Tracking
from trainer.metrics import TrainerMetrics
from trainer.tracking import Trackers

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
UNITS = ("seconds", "bytes", "ratio")


def _stream(processor: Processor) -> Exporter:
    made = stream_health.Metrics(
        processor, Counts(), lag=lambda: {("t", 0): 3}, commit_age=lambda: 0.0, waiting=lambda: 0
    )
    return made.exporter


def exporter_of(process: str) -> Exporter:
    """What the process itself sets up, without what it works on."""
    codec = Codec()
    match process:
        case "sessions":
            return _stream(SessionsProcessor(codec))
        case "scoring":
            return _stream(Scoring(codec))
        case "hinting":
            return _stream(Hinting(codec, cast(Any, None)))
        case "gateway":
            return Measures(lambda: 0).exporter
        case "experience":
            nobody = cast(Any, None)
            return _stream(Experience(codec, nobody, nobody, nobody, nobody, idle_ms=1))
        case "join":
            return _stream(JoinProcessor(codec))
        case "aggregation":
            return _stream(Aggregation(codec))
        case "model":
            return ServerMetrics(EngineStats(), lambda: 0).exporter
        case "policies":
            return PolicyMetrics(lambda: True).exporter
        case "worker":
            return WorkerMetrics(lambda: 0, lambda: 0, lambda: 0).exporter
        case "manager":
            return ManagerMetrics().exporter
    assert process == "trainer"
    return TrainerMetrics().exporter


@pytest.mark.parametrize("process", PROCESSES)
def test_each_process_exports_what_the_catalogue_says_of_it(process: str) -> None:
    exporter = exporter_of(process)
    health = Health(exporter, lambda: None)
    wanted = exported_by(process)
    assert {m.name for m in exporter.bound} == {m.name for m in wanted}
    by_name = {m.name.removesuffix("_total"): m for m in wanted}
    found = {f.name: f for f in text_string_to_metric_families(health.answer("/metrics").body.decode())}
    assert set(found) == set(by_name)
    for name, family in found.items():
        assert (family.type, family.documentation) == (by_name[name].kind.value, by_name[name].help)
        for series in family.samples:
            assert series.labels.keys() - {"le"} == set(by_name[name].labels)


def test_each_metric_is_exported_by_some_process_and_named_as_prometheus_wants() -> None:
    names = [m.name for m in CATALOGUE]
    assert len(set(names)) == len(names)
    assert len(CATALOGUE) > 60
    for metric in CATALOGUE:
        assert metric.by and set(metric.by) <= set(PROCESSES)
        assert re.fullmatch(r"(tentalis|process)(_[a-z]+)+", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert bool(metric.buckets) == (metric.kind is Kind.HISTOGRAM), metric.name
        assert metric.help.endswith(".") and not metric.help.startswith(" "), metric.name
        for unit in UNITS:
            in_name = metric.name.removesuffix("_total").endswith(f"_{unit}")
            assert in_name == (metric.unit == unit), f"{metric.name} is in {metric.unit}"


def test_the_page_is_what_the_catalogue_says() -> None:
    assert DOCS.read_text(encoding="utf-8") == markdown(), "run `python -m tentalis.metrics docs/metrics.md`"


def test_a_metric_of_another_kind_or_twice_is_refused() -> None:
    exporter = Exporter("worker")
    with pytest.raises(ValueError, match="is a counter, not a gauge"):
        exporter.gauge(metrics.WORKER_TASKS)
    exporter.counter(metrics.WORKER_TASKS)
    with pytest.raises(ValueError, match="tentalis_worker_tasks_total is exported twice by worker"):
        exporter.read(metrics.WORKER_TASKS, lambda: 0)


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_says_what_is_wrong() -> None:
    problems: dict[str, str | None] = {"ready": "no partitions", "stuck": None}
    exporter = Exporter("worker")
    health = Health(exporter, lambda: problems["ready"], lambda: problems["stuck"])
    with served(health, 0) as port:
        assert port
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/readyz") == (503, "not ready: no partitions\n")
        assert "\ntentalis_ready 0.0\n" in get(port, "/metrics")[1]
        problems |= {"ready": None, "stuck": "it hangs"}
        assert get(port, "/readyz?verbose") == (200, "ready\n")
        assert get(port, "/healthz") == (503, "not ok: it hangs\n")
        assert "\ntentalis_ready 1.0\n" in get(port, "/metrics")[1]
        assert get(port, "/")[0] == 404
        with (
            pytest.raises(PortTaken, match=f"worker cannot be served on 127.0.0.1:{port}.*--metrics-port"),
            served(Health(Exporter("worker"), lambda: None), port),
        ):
            pass
    with pytest.raises(urllib.error.URLError):
        get(port, "/healthz")


def test_without_a_port_nothing_listens() -> None:
    with served(Health(Exporter("worker"), lambda: None), None) as port:
        assert port is None


def test_the_trainer_says_what_it_waits_for_and_what_a_step_was() -> None:
    made = TrainerMetrics()
    read = made.exporter.registry.get_sample_value
    assert made.not_ready() is not None
    made.recovered("p", 3, 7)
    made.waits("rollouts")
    assert made.not_ready() is None
    assert read("tentalis_trainer_waiting", {"reason": "rollouts"}) == 1
    outcome = dict.fromkeys(
        ("rl_loss", "opd_loss", "rl_clip_fraction", "opd_clip_fraction", "rl_advantage_abs", "opd_advantage_abs"), 0.5
    ) | dict.fromkeys(("reward_mean", "staleness_mean", "mismatch_kl", "entropy", "grad_norm", "learning_rate"), 0.25)
    outcome |= dict.fromkeys(("reward_std", "hint_acceptance", "ratio_mean", "effective_sample_size"), 0.5)
    outcome |= dict.fromkeys(composition.names(), 0.0) | {"staleness_3_4": 6.0, "joined_both": 2.0, "model_flops": 5e9}
    outcome |= {"tokens": 300.0, "rollouts": 8.0, "trained_rollouts": 6.0, "kl_loss": 0.75, "pair_loss": 1.5}
    told: list[dict[str, float]] = []
    trackers = Trackers(Tracking(), "run", {}, Path())
    trackers._trackers.append(SimpleNamespace(step=lambda step, values: told.append(values)))  # type: ignore[arg-type]
    made.track(trackers, 1e10)
    made.stepped("p", 4, 8, outcome, {"fetch": 1.0, "forward_backward": 2.0})
    made.read(1, {"0": 5}, 2)
    made.read(1, {"0": 0}, 3)
    values = {
        "tentalis_trainer_step": 4,
        "tentalis_trainer_steps_total": 1,
        "tentalis_trainer_tokens_per_second": 100,
        "tentalis_trainer_dead_letters_total": 3,
        "tentalis_trainer_step_seconds_sum": 3,
    }
    assert {name: read(name) for name in values} == values
    losses = {part: read("tentalis_trainer_loss", {"part": part}) for part in ("rl", "opd", "kl", "pair")}
    assert losses == {"rl": 0.5, "opd": 0.5, "kl": 0.75, "pair": 1.5}
    assert read("tentalis_trainer_rollouts_total", {"use": "idle"}) == 2
    assert read("tentalis_trainer_rollout_ages_total", {"age": "3_4"}) == 6
    assert read("tentalis_trainer_joins_total", {"kind": "both"}) == 2
    assert read("tentalis_trainer_mfu_ratio") == told[0]["train/mfu"] == 0.25
    assert read("tentalis_trainer_learning_rate") == told[0]["train/learning_rate"] == 0.25
    assert read("tentalis_trainer_lag_records", {"partition": "0"}) == 0
    assert read("tentalis_trainer_phase_seconds_total", {"phase": "forward_backward"}) == 2


def test_the_join_counts_what_became_of_samples_and_what_it_gave_up() -> None:
    join = JoinProcessor(CODEC, LIMITS)
    join.restore(PARTITION, {})
    registry = _stream(join).registry
    joined, alone, expired = (head(name) for name in ("joined", "alone", "expired"))
    events: list[tuple[int, Record]] = [
        (START, open_(joined)),
        (START, open_(expired)),
        (START + 1, score(sample(joined))),
        (START + 2, score(sample(joined))),  # the same half once more
        (START + 3, hint(sample(joined))),
        (START + 4, score(sample(alone))),
        (START + 5, hint(sample(joined), id="another")),
    ]
    log = [
        LogRecord(topics.HALVES, PARTITION, offset, at, event.key, CODEC.encode(topics.HALVES, event))
        for offset, (at, event) in enumerate(events)
    ]
    asyncio.run(join.process(PARTITION, log))

    def read(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"tentalis_{name}", labels)

    assert read("join_open_tasks") == 2
    assert read("join_oldest_open_seconds") == 0.005
    assert read("join_stream_timestamp_seconds", partition=str(PARTITION)) == (START + 5) / 1000
    assert read("join_duplicates_total") == 1
    assert read("join_outcomes_total", kind="both") == 1
    assert read("join_outcomes_total", kind="late") == 1
    end = LogRecord(
        topics.HALVES, PARTITION, len(log), START + 1_001, str(PARTITION), CODEC.encode(topics.HALVES, tick())
    )
    asyncio.run(join.process(PARTITION, [end]))
    assert read("join_open_tasks") == read("join_oldest_open_seconds") == 0
    assert read("join_remembered_tasks") == 3
    assert read("join_timeouts_total", wait="hint") == 1
    assert read("join_timeouts_total", wait="deadline") == 1
    assert read("join_outcomes_total", kind="rl") == read("join_outcomes_total", kind="expired") == 1
    assert read("join_rollouts_total") == 2
    decoded = read("stream_decode_seconds_total", app="tentalis-join")
    assert decoded is not None and decoded > 0
