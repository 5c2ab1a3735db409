"""A run of TRL's GRPOTrainer with its own `generate`, in TRL's environment: `python -m tests.bench.learn_trl JOB`.

JOB is the JSON file of bench_learn.py: `model` (folder), `prompts` (JSONL with the columns of learn_reward.py),
`steps`, `prompts_per_step`, `group`, `max_tokens`, `temperature`, `lr`, `rank`, `alpha`, `seed`, `threads`, `output`
(folder of the adapter).
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from tests.bench.learn_reward import score


def main() -> None:
    """Trains to the last step and saves the adapter."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text(encoding="utf-8").splitlines()]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["question"]}]
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=score,
        args=GRPOConfig(
            output_dir=job["output"],
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=job["group"],
            gradient_accumulation_steps=job["prompts_per_step"],
            steps_per_generation=job["prompts_per_step"],
            num_generations=job["group"],
            max_completion_length=job["max_tokens"],
            temperature=job["temperature"],
            max_steps=job["steps"],
            learning_rate=job["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            # TRL's default recomputes every layer; here both trainers keep the activations.
            gradient_checkpointing=False,
            seed=job["seed"],
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(
            r=job["rank"], lora_alpha=job["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
