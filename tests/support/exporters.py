"""The exporters of all processes, without the work that the processes do."""

from typing import Any, cast

from schemas.wire.codec import Codec
from streams.apps.aggregation.processor import Aggregation
from streams.apps.experience.processor import Experience
from streams.apps.hinting.processor import Hinting
from streams.apps.join.processor import JoinProcessor
from streams.apps.scoring.processor import Scoring
from streams.apps.sessions.processor import SessionsProcessor
from streams.runtime import health as stream_health
from streams.runtime.delivery import DeliveryCounts
from streams.runtime.processor import Processor
from tentalis.agents.manager.process import ManagerMetrics
from tentalis.agents.workers.process import WorkerMetrics
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import Keys
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.metrics import GatewayMetrics
from tentalis.inference.engine import EngineStats
from tentalis.inference.server import ServerMetrics
from tentalis.policies.process import PolicyMetrics
from tentalis.service.metrics import Exporter
from trainer.run.metrics import TrainerMetrics


def exporter_of_app(processor: Processor) -> Exporter:
    """Returns the exporter of a stream application."""
    made = stream_health.Metrics(
        processor, DeliveryCounts(), lag=lambda: {("t", 0): 3}, commit_age=lambda: 0.0, waiting=lambda: 0
    )
    return made.exporter


def exporter_of(process: str) -> Exporter:
    """Returns the exporter that a process sets up itself."""
    codec = Codec()
    match process:
        case "sessions":
            return exporter_of_app(SessionsProcessor(codec))
        case "scoring":
            return exporter_of_app(Scoring(codec))
        case "hinting":
            return exporter_of_app(Hinting(codec, cast(Any, None)))
        case "gateway":
            gateway = GatewayMetrics(lambda: 0)
            gateway.watch_keys(KeyUsage(KeyLimits()), Keys(None))
            return gateway.exporter
        case "experience":
            nobody = cast(Any, None)
            return exporter_of_app(Experience(codec, nobody, nobody, nobody, nobody, idle_ms=1))
        case "join":
            return exporter_of_app(JoinProcessor(codec))
        case "aggregation":
            return exporter_of_app(Aggregation(codec))
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
