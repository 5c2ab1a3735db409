"""A llama.cpp server from the package xllamacpp, for bench_server: serves a GGUF model until stdin ends."""

import json
import sys
from typing import Any

import xllamacpp as llama_cpp


def main(job: dict[str, Any]) -> None:
    """Starts the server and prints its URL."""
    params = llama_cpp.CommonParams()
    params.model.path = job["gguf"]
    params.n_ctx, params.n_parallel = job["context"] * job["streams"], job["streams"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.lora_adapters = [llama_cpp.CommonAdapterLoraInfo(path, 0.0) for path in job["adapters"]]
    server = llama_cpp.Server(params)
    print(json.dumps({"url": server.listening_address}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
