"""Judges that have no answer: one refuses the key, one takes longer than it may."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from schemas.records import Verifier
from tentalis.local.ports import free_port
from tests.drill.alerts import runbook
from tests.drill.bench import Bench
from tests.drill.fault import Sight, fault
from tests.support.judge_server import JudgeServer, Reply, judge_in_thread, says
from tests.support.kafka_fixture import eventually

KEY = "the-key-of-the-judge"
GRADE = says("\\boxed{8}")
SLOW_S = 3.0
TRIES = 3
SCORERS = """judges:
  local: {{url: "{url}", model: judge, api_key_env: JUDGE_KEY, time_limit_s: {limit_s}}}
environments:
  chat:
    style: {{kind: answer, judge: local, criterion: "One friendly sentence."}}
"""


class Judged:
    """Scoring of a bench with a judge behind HTTP, and an operator's view of it."""

    def __init__(self, bench: Bench, judge: JudgeServer, key: str, limit_s: int) -> None:
        self.bench = bench
        scorers, used = bench.folder / "scorers.yaml", bench.folder / "judge-key"
        secret = bench.folder / "secret"
        scorers.write_text(SCORERS.format(url=judge.url, limit_s=limit_s), encoding="utf-8")
        used.write_text(key, encoding="utf-8")
        secret.write_text(KEY, encoding="utf-8")
        self.port = free_port()
        bench.shell.env |= {
            "SCORERS": str(scorers),
            "JUDGE_KEY_FILE": str(used),
            "SECRET": str(secret),
            "METRICS_PORT": str(self.port),
            "LOG": str(bench.folder / "scoring.log"),
        }
        bench.works("scoring")
        bench.stop("scoring")
        bench.start("scoring", "--scorers", str(scorers), "--metrics-port", str(self.port))
        bench.shell.env["PID"] = str(bench.processes.pop("scoring").pid)

    def ask(self, run: str) -> None:
        """Writes a task whose answer the judge grades, and the answer."""
        self.bench.work.answer(self.bench.work.ask(run, 1, verifier=Verifier(name="style")))

    def calls(self) -> Sight:
        """The ends of the judge's calls that have been counted."""
        metrics = f"curl -s http://127.0.0.1:{self.port}/metrics"
        return self.bench.shell.run(f"{metrics} | grep '^tentalis_scoring_judge_calls_total' | grep -v ' 0.0$'")

    def seen(self, ending: str) -> Sight:
        """Waits until calls have ended so; the ends of all calls."""
        eventually(lambda: ending in self.calls().says, 120, 0.5, lambda: self.bench.log("scoring")[-3000:])
        return self.calls()

    def leave(self) -> None:
        """Ends the scoring that the page started; the bench has its own again."""
        self.bench.processes["scoring"] = self.bench.shell.newest
        self.bench.stop("scoring")
        self.bench.start("scoring")


AWAY, FAILED = (f'tentalis_scoring_judge_calls_total{{result="{ending}"}}' for ending in ("away", "failed"))
ANSWERED = 'tentalis_scoring_judge_calls_total{result="answered"} 1.0'


@fault("bench", runbook("judges-fail"), code=0, says=AWAY)
def a_judge_that_refuses_the_key(bench: Bench) -> Iterator[Sight]:
    """The answer waits for the judge, and is graded when the judge takes the key."""
    servers: list[JudgeServer] = []

    def script(_: int, __: dict[str, Any]) -> Reply:
        return GRADE if f"Bearer {KEY}" in servers[0].headers[-1] else Reply(401, b"unknown key")

    with judge_in_thread(script) as server, bench.running("join"):
        servers.append(server)
        scoring = Judged(bench, server, "the-key-of-last-year", 60)
        scoring.ask("refused-key")
        yield scoring.seen(AWAY)
        bench.work.settled("refused-key")
        assert ANSWERED in scoring.calls().says, scoring.calls()
        scoring.leave()


@fault("bench", runbook("judges-fail"), code=0, says=f"{FAILED} {TRIES}.0")
def a_judge_that_is_too_slow(bench: Bench) -> Iterator[Sight]:
    """The reward of an answer is unknown after all tries; a later answer is graded within the longer time."""

    def script(_: int, __: dict[str, Any]) -> Reply:
        time.sleep(SLOW_S)  # the time that the judge takes
        return GRADE

    with judge_in_thread(script) as server, bench.running("join"):
        scoring = Judged(bench, server, KEY, 1)
        scoring.ask("slow-judge")
        yield scoring.seen(f"{FAILED} {TRIES}.0")
        scoring.ask("after-slow-judge")
        bench.work.settled("slow-judge", "after-slow-judge")
        assert ANSWERED in scoring.calls().says, scoring.calls()
        scoring.leave()
