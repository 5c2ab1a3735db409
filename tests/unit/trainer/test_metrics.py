"""The trainer's metrics."""

from pathlib import Path
from types import SimpleNamespace

from trainer.config.trainer_config import TrackingConfig
from trainer.data import batch_stats
from trainer.run.metrics import TrainerMetrics
from trainer.run.tracking import MetricTrackers


def test_the_trainer_says_what_it_waits_for_and_what_a_step_was() -> None:
    made = TrainerMetrics()
    read = made.exporter.registry.get_sample_value
    assert made.not_ready() is not None
    made.set_recovered("p", 3, 7)
    made.set_waiting("rollouts")
    assert made.not_ready() is None
    assert read("tentalis_trainer_waiting", {"reason": "rollouts"}) == 1
    outcome = dict.fromkeys(
        ("rl_loss", "opd_loss", "rl_clip_fraction", "opd_clip_fraction", "rl_advantage_abs", "opd_advantage_abs"), 0.5
    ) | dict.fromkeys(("reward_mean", "staleness_mean", "mismatch_kl", "entropy", "grad_norm", "learning_rate"), 0.25)
    outcome |= dict.fromkeys(("reward_std", "hint_acceptance", "ratio_mean", "effective_sample_size"), 0.5)
    outcome |= dict.fromkeys(batch_stats.count_names(), 0.0) | {
        "staleness_3_4": 6.0,
        "joined_both": 2.0,
        "model_flops": 5e9,
    }
    outcome |= {"tokens": 300.0, "rollouts": 8.0, "trained_rollouts": 6.0, "kl_loss": 0.75, "pair_loss": 1.5}
    told: list[dict[str, float]] = []
    trackers = MetricTrackers(TrackingConfig(), "run", {}, Path())
    trackers._trackers.append(SimpleNamespace(step=lambda step, values: told.append(values)))  # type: ignore[arg-type]
    made.use_trackers(trackers, 1e10)
    made.record_step("p", 4, 8, outcome, {"fetch": 1.0, "forward_backward": 2.0})
    made.record_report(1, {"0": 5}, 2)
    made.record_report(1, {"0": 0}, 3)
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
