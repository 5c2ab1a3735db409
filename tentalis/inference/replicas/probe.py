"""The probe of a replica: its health, and the models that it lists."""

import httpx

PROBE_TIMEOUT_S = 5.0


async def listed_models(http: httpx.AsyncClient) -> list[str] | None:
    """Returns the names of the models of a replica; none for a server that lists none; None if it is not healthy.

    A server without `/health` is healthy if it answers. `http`: a client whose base URL is the replica's.
    """
    try:
        health = await http.get("/health", timeout=PROBE_TIMEOUT_S)
        if health.status_code >= 500:
            return None
        cards = await http.get("/v1/models", timeout=PROBE_TIMEOUT_S)
        if cards.status_code >= 500:
            return None
        if cards.is_error:
            return []
        return [str(card["id"]) for card in cards.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
