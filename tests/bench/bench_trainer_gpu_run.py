"""A whole training run on one GPU, from the rollouts topic of a broker: killed, continued, and replayed.

The model of `bench_trainer_gpu.py` (the shape of Qwen3-4B, random weights, BENCH_LAYERS and BENCH_WIDTH for a smaller
one) and BENCH_STEPS (4) batches of BENCH_BATCH (64) conversations of 200 to 2,000 tokens. The trainer gets SIGKILL when
its second step is on the log, is started again until the last step, and the run is replayed in a process of its own.

`step_s` is the time from one result on the log to the next without the one that the kill delayed; `step_seconds` are
the phases of the last step. BENCH_FULL=1 trains all parameters (`lora: null`). BENCH_DEVICE=cpu tries the benchmark
itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from schemas import topics
from schemas.records import Rollout, StepResult
from tentalis.kafka.codec import make_codec
from tentalis.kafka.producer import Publisher
from tentalis.service.settings import Settings
from tests.bench.bench_trainer_gpu import DEVICE, MICRO_BATCH, VOCABULARY, in_child
from tests.bench.lab import log, own_kafka, report
from tests.bench.trainer_rollouts import single
from tests.support.trainer_lab import config
from trainer.config.trainer_config import TrainerConfig, config_text
from trainer.run.run_log import read_run

STEPS = int(os.environ.get("BENCH_STEPS", "4"))
BATCH = int(os.environ.get("BENCH_BATCH", "64"))
KILL_AFTER = 2


def run_config(model: Path) -> TrainerConfig:
    """The configuration of the run."""
    full = os.environ.get("BENCH_FULL") == "1"
    return config(
        model,
        policy="bench",
        run_id="gpu-run",
        start="earliest",
        device=DEVICE,
        batch_rollouts=BATCH,
        micro_batch_tokens=MICRO_BATCH,
        max_rollout_tokens=4096,
        steps=STEPS,
        threads=os.cpu_count(),
        lora=None if full else {"rank": 16, "alpha": 32},
        optimizer={"lr": 1e-5 if full else 3e-4},
    )


def put(settings: Settings) -> list[Rollout]:
    """Writes the rollouts of all steps to the topic."""
    made = single(VOCABULARY, STEPS * BATCH, (200, 2000))
    publisher = Publisher(settings, "bench", make_codec(settings))
    for each in made:
        publisher.send(topics.ROLLOUTS, each)
    publisher.flush()
    return made


def results(settings: Settings, run_id: str) -> list[StepResult]:
    """The results that are on the log, by step from 0."""
    run = read_run(settings, make_codec(settings), run_id)
    found = (run.winning_result(step) for step in range(run.last_step + 1))
    return [result for result in found if result is not None]


def environment(settings: Settings) -> dict[str, str]:
    """The variables of the trainer and of the replay."""
    return os.environ | {"TENTALIS_BOOTSTRAP": settings.require_bootstrap(), "TENTALIS_HOME": str(settings.home)}


def train(settings: Settings, config_file: Path, run_id: str) -> tuple[int, float]:
    """Kills the trainer after a step and starts it again; returns how many results were on the log then, and the
    seconds from the new start to the next one. Raises RuntimeError if the trainer ends otherwise."""
    command = [sys.executable, "-m", "trainer", "train", "--config", str(config_file), "--ranks", "1"]
    first = subprocess.Popen(command, env=environment(settings), stdout=sys.stderr)
    while len(results(settings, run_id)) <= KILL_AFTER:
        if first.poll() is not None:
            raise RuntimeError(f"the trainer ended with {first.returncode} before it was killed")
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before, began = len(results(settings, run_id)), time.time()
    log(f"killed with {before - 1} steps on the log")
    done = subprocess.run(command, env=environment(settings), stdout=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"the trainer that was started again ended with {done.returncode}")
    return before, results(settings, run_id)[before].event_time / 1000 - began


def main() -> None:
    """Trains, kills, continues and replays."""
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise SystemExit("trainer_gpu_run needs a CUDA GPU, and torch finds none here")
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder, own_kafka() as settings:
        model = Path(folder) / "model"
        in_child("model", model)
        (model / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
        of, config_file = run_config(model), Path(folder) / "run.yaml"
        config_file.write_text(config_text(of))
        made = put(settings)
        killed_after, back_after = train(settings, config_file, of.run_id)
        found = results(settings, of.run_id)
        for result in found[1:]:
            log(f"step {result.step}: {result.seconds}")
        began = time.monotonic()
        replayed = subprocess.run(
            [sys.executable, "-m", "tentalis.cli", "replay", of.run_id, "-o", "json"],
            env=environment(settings),
            stdout=subprocess.PIPE,
            text=True,
        )
        replay_seconds = time.monotonic() - began
        answer = json.loads(replayed.stdout)
    times = [result.event_time / 1000 for result in found]
    # The first step reads the topic, and the one after the kill waits for the new process.
    gaps = [times[step] - times[step - 1] for step in range(2, len(times)) if step != killed_after]
    report(
        steps=len(found) - 1,
        tokens_per_step=sum(each.n_tokens for each in made) / STEPS,
        step_s=gaps,
        step_seconds=found[-1].seconds,
        back_after_kill_s=back_after,
        distinct_adapters=len({result.adapter_sha256 for result in found}),
        replay_equal=answer["equal"],
        replay_exit_code=replayed.returncode,
        replay_s=replay_seconds,
        device=torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        torch=torch.__version__,
    )


if __name__ == "__main__":
    main()
