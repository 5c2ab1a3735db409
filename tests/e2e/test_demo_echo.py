"""The demo of the scenario echo: episodes of several turns are played, rewarded turn by turn, trained on and served."""

import os
import signal
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import BatchPlan, PolicyAck, Result, Rollout, StepResult
from schemas.tensors import float32_view, uint8_view
from tentalis.agents.scenarios.echo import TURNS
from tentalis.inference.models import resolve_model
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tests.e2e.lab import Home, pids_of
from tests.support.kafka_fixture import eventually

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 2
CACHE = Path(os.environ.get("TENTALIS_CACHE", "~/.cache/tentalis")).expanduser()


def test_episodes_of_several_turns_are_trained_on_and_their_adapter_answers(tmp_path: Path) -> None:
    # The bundled model: one that is made up never repeats a message, so that no group would have an advantage.
    home = Home(tmp_path / "home", resolve_model(None, CACHE))
    demo = home.start_demo("--scenario", "echo", "--steps", str(STEPS), "--keep")
    try:
        eventually(lambda: list(home.path.glob("runs/*/finished")) or demo.poll() is not None, 1500, interval=1.0)
        assert demo.poll() is None, home.tail()
        codec, settings = make_codec(home.settings()), home.settings()
        names = (topics.RESULTS, topics.ROLLOUTS, topics.BATCHES, topics.POLICY_ACKS)
        records = [each.decode(codec) for name in names for each in read_to_end(settings, name)]
    finally:
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
    check_episodes(records, STEPS)
    assert pids_of(home.path) == []


def check_episodes(records: list[object], steps: int) -> None:
    """Checks the results, rollouts, plans, steps and acknowledgements of a run of the scenario."""
    rollouts = {each.rollout_id: each for each in records if isinstance(each, Rollout)}
    plans = [each for each in records if isinstance(each, BatchPlan)]
    trained = [rollouts[row.rollout_id] for plan in plans for row in plan.rows]
    assert len(plans) == steps and len(trained) == 32 * steps
    whole = [each for each in trained if each.components.get("ending.done") == 1.0]
    assert len(whole) > len(trained) / 4
    for each in whole:
        turns, mask = float32_view(each.step_scores).tolist(), uint8_view(each.loss_mask)
        assert len(turns) == len(each.step_spans) == TURNS and set(turns) <= {0.0, 1.0}
        assert each.reward == pytest.approx(sum(turns) / TURNS), "the share of the turns that are right"
        assert all(mask[span.start : span.end].all() for span in each.step_spans)
        between = zip(each.step_spans, each.step_spans[1:], strict=False)
        assert not any(mask[one.end : after.start].any() for one, after in between), "the user's words are not trained"
    assert {0.0, 1.0} <= {score for each in whole for score in float32_view(each.step_scores).tolist()}
    adapters = {each.step: each.adapter_sha256 for each in records if isinstance(each, StepResult)}
    assert len(set(adapters.values())) == steps + 1, "every step has changed the adapter"
    assert f"echo@v{steps}" in {each.name for each in records if isinstance(each, PolicyAck) and each.ok}
    sampled = {span.policy for each in records if isinstance(each, Result) for span in each.policy_spans}
    assert {f"echo@v{number}" for number in range(steps)} <= sampled
