"""`tentalis serve model`: the model server."""

from __future__ import annotations

from typing import Annotated

import typer

from tentalis.cli.serve.options import ListenPort
from tentalis.cli.shared.policy_model import MaxModelLen, PolicyModel, ServedName, prepared_model
from tentalis.cli.shared.settings import resolve_settings
from tentalis.cli.shared.startup import configure_logging
from tentalis.service.imports import without_collections


def model(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: ListenPort = 8000,
    policy_model: PolicyModel = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    served_name: ServedName = None,
    max_model_len: MaxModelLen = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Most samples that are decoded together.")] = 64,
    prefix_mb: Annotated[
        int,
        typer.Option(
            "--prefix-mb",
            min=0,
            help="MiB for ended sequences, so that a prompt that begins like one of them goes on from there. 0: none.",
        ),
    ] = 512,
    draft_tokens: Annotated[
        int,
        typer.Option(
            "--draft-tokens",
            min=0,
            help="Tokens per sample and step that are guessed from repetitions in its text. 0: none.",
        ),
    ] = 0,
    draft_streams: Annotated[
        int,
        typer.Option("--draft-streams", min=1, help="Most samples being decoded with which tokens are guessed."),
    ] = 4,
    max_adapters: Annotated[
        int, typer.Option("--max-adapters", min=1, help="Most adapters that are loaded at the same time.")
    ] = 64,
    max_models: Annotated[
        int,
        typer.Option(
            "--max-models",
            min=0,
            help="Most fully trained versions that are loaded at the same time, each of the model's size.",
        ),
    ] = 8,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s",
            min=0,
            help="Seconds that requests in flight may take after SIGTERM; then they fail. For one of several replicas, "
            "which is to be removed without an effect on its callers.",
        ),
    ] = 0.0,
) -> None:
    """Serves a model with an OpenAI-compatible API: log-probs, token ids, and adapters that load while it serves."""
    configure_logging("INFO")
    from tentalis.service.packages import require

    require("`tentalis serve model`", "serve")
    with without_collections():
        from tentalis.inference.server import serve
        from tentalis.storage.places import adapter_cache

    settings = resolve_settings()
    path = prepared_model(policy_model, settings.cache)
    serve(
        path,
        host=host,
        port=port,
        served_name=served_name,
        threads=threads,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_batch=max_batch,
        prefix_mb=prefix_mb,
        draft_tokens=draft_tokens,
        draft_streams=draft_streams,
        max_adapters=max_adapters,
        max_models=max_models,
        files=adapter_cache(settings),
        drain_s=drain_s,
    )
