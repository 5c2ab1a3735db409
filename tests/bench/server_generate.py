"""Plain `generate` of transformers with PEFT, for bench_server: one JSON line on stdin is a batch, one on stdout its
figures. The process must not share memory with the benchmark, so that its peak is its own."""

import json
import sys
import time

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main(job: dict[str, str]) -> None:
    """Answers batches until stdin ends."""
    torch.set_num_threads(int(job["threads"]))
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    names = sorted(name for name in job if name.startswith("adapter"))
    model = PeftModel.from_pretrained(base, job[names[0]], adapter_name=names[0])
    for name in names[1:]:
        model.load_adapter(job[name], adapter_name=name)
    model.eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = torch.tensor(asked["prompts"])
        options = {"max_new_tokens": asked["tokens"], "min_new_tokens": asked["tokens"], "do_sample": True}
        began = time.perf_counter()
        with torch.inference_mode():
            if asked["adapters"] is None:
                with model.disable_adapter():
                    model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), top_k=0, **options)
            else:
                chosen = ["__base__" if name is None else name for name in asked["adapters"]]
                model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    adapter_names=chosen,
                    top_k=0,
                    **options,
                )
        print(json.dumps({"seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
