"""GET /v1/usage: the usage of API keys and their limits."""

import asyncio
from datetime import date, timedelta
from typing import Annotated

from fastapi import FastAPI, Query, Request
from pydantic import BaseModel

from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import ApiKey, Caller, Keys, presented
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.http.usage_store import KEPT_DAYS, DayUse, UsageStore

_STATUSES = {
    401: "Missing, unknown or revoked API key.",
    503: "The key file or the file of usage cannot be read: retrying is safe.",
}


class UsageOfDay(BaseModel):
    """The usage of a key on a UTC day (YYYY-MM-DD). `requests`: those that were admitted."""

    day: str
    requests: int
    refused: int
    tokens: int


class UsageOfKey(BaseModel):
    """The usage of a key. `key`: its id, "" for calls without a key. `running`: calls at this moment. `tokens_left`: of
    the budget of today; null without a budget. `days`: the newest first, today always."""

    key: str
    user: str | None
    label: str
    limits: KeyLimits
    running: int
    tokens_left: int | None
    days: list[UsageOfDay]


class UsageAnswer(BaseModel):
    """The usage of keys at this gateway. `resets_at`: the time at which the budgets of the day begin again."""

    day: str
    resets_at: str
    keys: list[UsageOfKey]


def add_usage_route(app: FastAPI, keys: Keys, usage: KeyUsage, store: UsageStore) -> None:
    """Adds the route. A key sees its own usage; one with the scope admin and without a user sees that of all keys."""

    @app.get("/v1/usage", responses={code: {"description": text} for code, text in _STATUSES.items()})
    async def usage_of_keys(
        request: Request,
        days: Annotated[int, Query(ge=1, le=KEPT_DAYS, description="UTC days, with today.")] = 1,
    ) -> UsageAnswer:
        """Returns the requests and tokens of the caller's key per UTC day, and its limits; for an operator, of all
        keys."""
        caller = keys.caller(presented(request.headers.raw), None)
        today = date.fromisoformat(usage.day)
        earlier: list[DayUse] = []
        if days > 1:
            try:
                earlier = await asyncio.to_thread(store.days, (today - timedelta(days=days - 1)).isoformat())
            except OSError as error:
                raise APIError(503, str(error), "server_error", retry_after_s=5) from error
        shown = [_of_key(key, usage, earlier) for key in _visible(caller, keys)]
        return UsageAnswer(
            day=today.isoformat(), resets_at=f"{(today + timedelta(days=1)).isoformat()}T00:00:00Z", keys=shown
        )


def _visible(caller: Caller, keys: Keys) -> list[ApiKey]:
    if not caller.key_id:
        return [ApiKey(id="", sha256="", scopes=())]
    return [key for key in keys.listed if caller.sees_everybody or key.id == caller.key_id]


def _of_key(key: ApiKey, usage: KeyUsage, earlier: list[DayUse]) -> UsageOfKey:
    limits = usage.limits.replaced_by(key.limits)
    now = usage.of_key(key.id)
    found = {each.day: each for each in earlier if each.key_id == key.id} | {now.today.day: now.today}
    return UsageOfKey(
        key=key.id,
        user=key.user,
        label=key.label,
        limits=limits,
        running=now.running,
        tokens_left=usage.tokens_left(key.id, limits),
        days=[
            UsageOfDay(day=day, requests=each.requests, refused=each.refused, tokens=each.tokens)
            for day, each in sorted(found.items(), reverse=True)
        ],
    )
