"""`tentalis serve vllm`: vLLM as the model server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.serve.options import ListenPort
from tentalis.cli.shared.options import variable_option
from tentalis.cli.shared.policy_model import MaxModelLen, PolicyModel, ServedName, prepared_model
from tentalis.cli.shared.settings import resolve_settings
from tentalis.cli.shared.startup import configure_logging
from tentalis.service import variables


def vllm(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Further arguments of `vllm serve`, after --: -- --gpu-memory-utilization 0.5", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: ListenPort = 8000,
    policy_model: PolicyModel = None,
    executable: Annotated[Path | None, variable_option(variables.VLLM, "--vllm")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (bfloat16 with a GPU, else float32), float32, bfloat16 or float16.")
    ] = "auto",
    served_name: ServedName = None,
    max_model_len: MaxModelLen = None,
    max_adapters: Annotated[int, typer.Option("--max-adapters", min=1, help="Most adapters in memory.")] = 16,
    max_rank: Annotated[int, typer.Option("--max-rank", min=1, help="Highest rank of an adapter.")] = 16,
    tool_parser: Annotated[
        str, typer.Option("--tool-parser", help="vLLM's parser of tool calls; empty for none.")
    ] = "hermes",
) -> None:
    """Starts vLLM with what training needs: the log-probs of the sampling distribution, token ids, and adapters that
    load while it serves. Checks them, and ends vLLM with itself."""
    configure_logging("INFO")
    import os

    from tentalis.inference.vllm.command import VllmOptions, default_context, find_vllm, has_gpu, server_dtype
    from tentalis.local.vllm_server import serve
    from tentalis.service.lifecycle import run_service

    cache = resolve_settings().cache
    program = find_vllm(executable, cache)
    model = prepared_model(policy_model, cache)
    options = VllmOptions(
        model,
        served_name or model.name,
        host=host,
        port=port,
        dtype=server_dtype() if dtype == "auto" else dtype,
        max_model_len=max_model_len or default_context(model),
        max_adapters=max_adapters,
        max_rank=max_rank,
        tool_parser=tool_parser,
        gpu=has_gpu(),
        threads=threads or os.cpu_count() or 1,
        extra=tuple(arguments or ()),
    )
    run_service("model", lambda stop: serve(program, options, stop))
