"""The group `tentalis serve`."""

import typer

from tentalis.cli.serve import (
    env_pool,
    experience,
    gateway,
    hinting,
    join,
    model,
    plain_streams,
    policies,
    scoring,
    sessions,
    vllm,
)

app = typer.Typer(help="Runs one process of the stack until SIGTERM.", no_args_is_help=True, rich_markup_mode=None)

app.command(short_help="The model server.")(model.model)
app.command(short_help="vLLM as the model server.")(vllm.vllm)
app.command(short_help="Loads promoted adapters into the server.")(policies.policies)
app.command(short_help="Makes scores of results and feedback.")(scoring.scoring)
app.command(short_help="Makes hints of feedback.")(hinting.hinting)
app.command(short_help="Extracts a lesson of each session that ended.")(experience.experience)
app.command(short_help="Joins halves to rollouts and outcomes.")(join.join)
app.command(short_help="Links the turns of conversations.")(sessions.sessions)
app.command(short_help="OpenAI-compatible proxy that records conversations.")(gateway.gateway)
app.command(short_help="Offers an environment to other machines.")(env_pool.env_pool)
plain_streams.add_plain_streams(app)
