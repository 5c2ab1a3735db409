"""The same optimizer step with TRL's GRPOTrainer, in TRL's environment: `python trainer_trl.py JOB`.

JOB is the JSON file of trl_job.py: `model` (folder), `rollouts` (each prompt, response, sampler, advantage),
`batch_size`, `threads`, `dtype`, `device`, `rank`, `alpha`. For each line on stdin it runs one whole step of Trainer
(collate, forward, backward, accumulate, clip, AdamW) and prints one JSON object: `seconds`, `peak_mib`, `peak_gib` (of
a GPU), `positions`. Nothing is sampled: recorded rollouts, with their advantages and the sampler's log-probs, replace
generation, which is outside the measured time.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import pad


def peak_mib(reset: bool = False) -> float:
    """Peak resident memory of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


class Recorded(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with recorded rollouts."""

    batch: dict[str, torch.Tensor]
    positions = 0

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.batch)

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.positions += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
        return super()._compute_loss(model, inputs)


class OnDemand(TrainerCallback):  # type: ignore[misc]
    """Waits for a line before each step, and prints the step's figures after it."""

    trainer: Recorded
    began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        peak_mib(reset=True)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.trainer.positions = 0
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        figures = {
            "seconds": time.perf_counter() - self.began,
            "peak_mib": peak_mib(),
            "positions": self.trainer.positions,
        }
        if torch.cuda.is_available():
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(figures), file=ANSWERS, flush=True)


def batch_of(rollouts: list[dict[str, Any]], pad_id: int) -> dict[str, torch.Tensor]:
    """The batch as the trainer pads its samples: prompts to the left, completions to the right."""
    prompts = [torch.tensor(each["prompt"]) for each in rollouts]
    responses = [torch.tensor(each["response"]) for each in rollouts]
    mask = pad([torch.ones_like(each) for each in responses], padding_value=0)
    return {
        "prompt_ids": pad(prompts, padding_value=pad_id, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(each) for each in prompts], padding_value=0, padding_side="left"),
        "completion_ids": pad(responses, padding_value=pad_id),
        "completion_mask": mask,
        "advantages": torch.tensor([each["advantage"] for each in rollouts]),
        "old_per_token_logps": pad([torch.tensor(each["sampler"]) for each in rollouts], padding_value=0.0),
        "num_items_in_batch": mask.sum(),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    count, size = len(job["rollouts"]), job["batch_size"]
    callback = OnDemand()
    trainer = Recorded(
        model=job["model"],
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=sys.argv[1] + ".out",
            use_cpu=job["device"] == "cpu",
            # Autocast: without it PEFT computes the adapter's products in float32.
            bf16=job["device"] == "cuda",
            model_init_kwargs={"dtype": job["dtype"]},
            per_device_train_batch_size=size,
            gradient_accumulation_steps=count // size,
            steps_per_generation=count // size,
            num_generations=8,
            max_steps=1_000_000,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            # TRL's default recomputes every layer; here both trainers keep the activations.
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(index)} for index in range(count)]),
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=job["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[callback],
    )
    batch = batch_of(job["rollouts"], trainer.processing_class.pad_token_id)
    trainer.batch = {name: values.to(trainer.accelerator.device) for name, values in batch.items()}
    callback.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    # Output of the libraries must not mix with the answers.
    ANSWERS, sys.stdout = sys.stdout, sys.stderr
    main()
