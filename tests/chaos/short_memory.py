"""An application that forgets soon: `python -m tests.chaos.short_memory join|sessions|experience|aggregation SECONDS`.

These remember for longer than a soak lasts, so that all of it would look like a leak, and their commands take no such
time: `serve join` refuses less than the hour for which a turn's task may wait, a session that has ended is remembered
for a day (by experience too), and a window takes records for an hour. Here the tasks of turns wait for half as long as
things are remembered. Everything else is as the commands have it.
"""

import argparse
import sys
from pathlib import Path

from streams.aggregation import Aggregation
from streams.app import StreamSettings, run
from streams.experience import processor as experience
from streams.join import core as join
from streams.join.processor import JoinProcessor
from streams.processor import Processor
from streams.sessions import core as sessions
from streams.sessions import turns
from streams.sessions.processor import SessionsProcessor
from tentalis.config import Settings
from tentalis.kafka import make_codec
from tentalis.opd.config import load_hinters


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("application", choices=["join", "sessions", "experience", "aggregation"])
    parser.add_argument("seconds", type=int, help="how long what is over is remembered")
    parser.add_argument("--idle", type=int, default=30, help="seconds after which a session has ended")
    parser.add_argument("--server", help="for experience")
    parser.add_argument("--hinters", type=Path, help="for experience")
    parser.add_argument("--state", choices=["memory", "rocksdb"], default="memory")
    parser.add_argument("--instance")
    parser.add_argument("--metrics-port", type=int)
    options = parser.parse_args()
    settings, ms, idle_ms = Settings.from_env(), 1000 * options.seconds, 1000 * options.idle
    turns.TERMS = turns.TERMS.model_copy(update={"deadline_ms": ms // 2})
    codec = make_codec(settings, patience=0.0)
    processor: Processor
    match options.application:
        case "join":
            processor = JoinProcessor(codec, join.Limits(marker_ttl_ms=ms))
        case "sessions":
            processor = SessionsProcessor(codec, sessions.Limits(idle_ms=idle_ms, remember_ms=ms))
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
