"""Applications with short retention: `python -m tests.chaos.short_memory join|sessions|experience|aggregation SECONDS`.

By default these applications keep state for longer than a soak lasts, so their growth would look like a leak, and their
commands do not accept a shorter time: `serve join` rejects less than the hour for which a turn's task may wait, an
ended session is remembered for a day (also by experience), and a window accepts records for an hour. Here the tasks of
turns wait for half of SECONDS. All else is as in the commands.
"""

import argparse
import sys
from pathlib import Path

from streams.apps.aggregation.processor import Aggregation
from streams.apps.experience import processor as experience
from streams.apps.join import core as join
from streams.apps.join.processor import JoinProcessor
from streams.apps.sessions import core as sessions
from streams.apps.sessions.processor import SessionsProcessor
from streams.fold import session_turns
from streams.runtime.processor import Processor
from streams.runtime.worker import StreamSettings, run
from tentalis.kafka.codec import make_codec
from tentalis.opd.config import load_hinters
from tentalis.service.settings import Settings


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("application", choices=["join", "sessions", "experience", "aggregation"])
    parser.add_argument("seconds", type=int, help="seconds for which finished tasks, sessions and windows are kept")
    parser.add_argument("--idle", type=int, default=30, help="idle seconds after which a session ends")
    parser.add_argument("--server", help="URL of the model server, for experience")
    parser.add_argument("--hinters", type=Path, help="configuration file of the hinters, for experience")
    parser.add_argument("--state", choices=["memory", "rocksdb"], default="memory")
    parser.add_argument("--instance")
    parser.add_argument("--metrics-port", type=int)
    options = parser.parse_args()
    settings, ms, idle_ms = Settings.from_env(), 1000 * options.seconds, 1000 * options.idle
    session_turns.TERMS = session_turns.TERMS.model_copy(update={"deadline_ms": ms // 2})
    codec = make_codec(settings, patience=0.0)
    processor: Processor
    match options.application:
        case "join":
            processor = JoinProcessor(codec, join.JoinLimits(marker_ttl_ms=ms))
        case "sessions":
            processor = SessionsProcessor(codec, sessions.SessionLimits(idle_ms=idle_ms, remember_ms=ms))
        case "experience":
            hinters = load_hinters(options.hinters)
            processor = experience.build(
                settings, server=options.server, hinters=hinters, idle_ms=idle_ms, remember_ms=ms
            )
        case _:
            processor = Aggregation(codec, retention_ms=ms)
    stream = StreamSettings(
        bootstrap=settings.require_bootstrap(),
        state_dir=settings.home / "streams" / options.application,
        state=options.state,
        instance=options.instance,
        metrics_port=options.metrics_port,
    )
    return run(processor, stream)


if __name__ == "__main__":
    sys.exit(main())
