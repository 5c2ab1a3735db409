"""Replicas and fallbacks in a gateway's settings, and the choice of the next fallback."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from tentalis.cli.serve.options import checked_servers
from tentalis.gateway.backends.routing import CallRoute, next_fallback
from tentalis.gateway.settings import BadGateway, GatewaySettings
from tentalis.service.variable import BadVariable

OWN = {"name": "own", "url": "http://own", "server_id": "own"}
SPARE = {"name": "spare", "url": "http://spare", "server_id": "spare"}
BIG = {"name": "big", "url": "http://big"}


def settings_of(fallback: list[dict[str, str]], **own: Any) -> GatewaySettings:
    policy = {"name": "assistant", "backend": "own", "fallback": fallback}
    return GatewaySettings.model_validate({"backends": [OWN | own, SPARE, BIG], "policies": [policy]})


def served(server_id: str, policy: str) -> str | None:
    return {"own": "assistant@v2", "spare": "assistant@v1"}.get(server_id)


CHAIN = [{"backend": "spare"}, {"backend": "big", "model": "big-1"}]


def chain_of(model: str, lookup: Any = served, **route: Any) -> list[tuple[str, str | None, bool]]:
    """The backends, models and `substitute` of the fallbacks, one after the other."""
    settings = settings_of(CHAIN)
    policy = settings.policies[0]
    failed = CallRoute(settings.backends[0], model, "assistant", fallbacks=policy.fallback, **route)
    found = []
    while (following := next_fallback(settings, failed, lookup)) is not None:
        assert following.policy == "assistant" and not following.assigned
        found.append((following.backend.name, following.model, following.substitute))
        failed = following
    return found


def test_fallbacks_are_asked_in_their_order_and_are_substitutes_unless_they_serve_the_version() -> None:
    big = ("big", "big-1", True)
    assert chain_of("assistant@v2") == [("spare", "assistant@v1", True), big]
    assert chain_of("assistant@v1", assigned=True) == [("spare", "assistant@v1", False), big]
    assert chain_of("assistant@v2", lambda server, policy: None) == [big], "the spare one serves no version"
    assert chain_of("base", unserved=True) == [("spare", "assistant@v1", True), big]


def test_a_version_that_the_client_named_has_no_substitute() -> None:
    assert chain_of("assistant@v1", pinned=True) == [("spare", "assistant@v1", False)]
    assert chain_of("assistant@v2", pinned=True) == []


@pytest.mark.parametrize(
    ("fallback", "own", "problem"),
    [
        ([{"backend": "none"}], {}, "names the backend 'none', which is undefined"),
        (
            [{"backend": "big"}],
            {},
            "the fallback big of the policy assistant needs a model, or its backend a server_id",
        ),
        ([], {"replicas": ["http://own/v1"]}, "the backend own has a url twice: http://own, http://own"),
        ([], {"replicas": ["ftp://other"]}, "needs a url of the form"),
        ([], {"replicas": ["http://me:word@other"]}, "holds credentials"),
    ],
)
def test_settings_that_cannot_work_are_refused(fallback: Any, own: Any, problem: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(problem)):
        settings_of(fallback, **own)


def test_a_gateway_without_a_file_takes_several_urls() -> None:
    simple = GatewaySettings.simple("http://a:1, http://b:1/v1", server_id="s", policy=None, gateway_id="g")
    assert simple.backends[0].base_urls == ("http://a:1", "http://b:1")
    with pytest.raises(BadGateway, match="has a url twice"):
        GatewaySettings.simple("http://a:1,http://a:1", server_id="s", policy=None, gateway_id="g")


def test_servers_of_an_option_are_checked_like_the_variable() -> None:
    assert checked_servers("http://a:1,http://b:1") == "http://a:1,http://b:1"
    assert checked_servers(None) is None
    for wrong in ("a:1", "http://a:1,", "http://a:1,b", "http://a:1,http://a:1/v1"):
        with pytest.raises(BadVariable, match="separated by commas"):
            checked_servers(wrong)
