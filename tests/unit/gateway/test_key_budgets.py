"""Limits of single keys and budgets per day: set without a new key, kept over a restart, and shown."""

import json
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tentalis.cli.main import app as cli
from tentalis.gateway.http import keys as key_file
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import BadKeys, Caller, Scope, create, load, set_limits
from tentalis.gateway.http.usage import KeyUsage
from tentalis.gateway.http.usage_store import FILE_NAME, KEPT_DAYS, UsageStore
from tests.support.gateway_lab import Lab, Script, lab, wait_for

NOON = datetime(2026, 11, 24, 12, tzinfo=UTC).timestamp()
runner = CliRunner()


class Clock:
    """A wall clock that a test sets (s since the epoch)."""

    def __init__(self, now: float = NOON) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def usage_of(clock: Clock, **limits: Any) -> KeyUsage:
    return KeyUsage(KeyLimits(**limits), clock=clock, wall_clock=clock)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def identifier(key: str) -> str:
    return key.split("-")[1]


# --- the counts -------------------------------------------------------------------------------------------------------


def test_a_budget_is_of_a_utc_day_and_the_call_that_crosses_it_is_answered() -> None:
    clock = Clock(datetime(2026, 11, 24, 23, 59, 0, tzinfo=UTC).timestamp())
    usage, ann, bob = usage_of(clock, tokens_per_day=100), Caller(key_id="ann"), Caller(key_id="bob")
    usage.admit(ann)
    usage.spend(ann, 99)
    usage.admit(ann)
    usage.spend(ann, 50)
    with pytest.raises(APIError, match=r"100 tokens per day \(UTC\)") as error:
        usage.admit(ann)
    assert (error.value.status, error.value.kind, error.value.retry_after_s) == (429, "insufficient_quota", 60)
    assert error.value.headers == {"Retry-After": "60", "x-should-retry": "false"}
    usage.admit(bob)
    clock.now += 60
    usage.admit(ann)
    assert usage.tokens_left("ann", usage.limits) == 100


def test_the_limits_of_a_key_replace_those_of_the_gateway() -> None:
    usage = usage_of(Clock(), tokens_per_day=10, running=1)
    free = Caller(key_id="free", limits={"tokens_per_day": None, "running": 2})
    usage.spend(free, 1_000)
    usage.admit(free)
    with usage.running(free), usage.running(free), pytest.raises(APIError, match="2 calls"), usage.running(free):
        pass
    small = Caller(key_id="small", limits={"requests_per_minute": 1})
    usage.admit(small)
    with pytest.raises(APIError, match="1 requests per minute"):
        usage.admit(small)
    assert usage.limits_of(small).tokens_per_day == 10


def test_a_clock_that_steps_back_over_midnight_gives_no_second_budget() -> None:
    clock = Clock(datetime(2026, 11, 25, 0, 0, 1, tzinfo=UTC).timestamp())
    usage, ann = usage_of(clock, tokens_per_day=10), Caller(key_id="ann")
    usage.spend(ann, 10)
    clock.now -= 2
    with pytest.raises(APIError, match="10 tokens per day"):
        usage.admit(ann)


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_a_restart_keeps_the_counts_of_the_day_and_drops_those_of_old_days(tmp_path: Path) -> None:
    clock, store, ann = (
        Clock(NOON - 86_400 * (KEPT_DAYS + 1)),
        UsageStore(tmp_path / "usage.sqlite"),
        Caller(key_id="a"),
    )
    before = usage_of(clock)
    before.admit(ann)
    before.spend(ann, 7)
    clock.now = NOON
    before.admit(ann)
    before.spend(ann, 11)
    store.save(before.unsaved())
    assert before.unsaved() == []
    days = [(each.key_id, each.requests, each.tokens) for each in store.days("2000-01-01")]
    assert days == [("a", 1, 7), ("a", 1, 11)], "the day before a change of the day is saved too"
    after = usage_of(clock, tokens_per_day=11)
    after.restore(UsageStore(tmp_path / "usage.sqlite").days(after.day))
    with pytest.raises(APIError, match="11 tokens per day"):
        after.admit(ann)
    store.drop_before(after.oldest_day)
    assert [each.tokens for each in store.days("2000-01-01")] == [11]


def test_what_a_full_disk_did_not_take_is_saved_later(tmp_path: Path) -> None:
    usage, ann = usage_of(Clock()), Caller(key_id="a")
    usage.spend(ann, 5)
    (tmp_path / "folder").write_text("a file is in the way")
    lost = usage.unsaved()
    with pytest.raises(OSError, match="usage"):
        UsageStore(tmp_path / "folder" / "usage.sqlite").save(lost)
    usage.spend(ann, 1)
    usage.save_again(lost)
    store = UsageStore(tmp_path / "usage.sqlite")
    store.save(usage.unsaved())
    assert [each.tokens for each in store.days(usage.day)] == [6], "the newer count, not the one that failed"


def test_a_damaged_file_is_set_aside_and_does_not_stop_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.sqlite"
    path.write_bytes(b"not a database, but long enough to be read as a header of one" * 20)
    assert UsageStore(path).days("2000-01-01") == []
    assert (tmp_path / "usage.sqlite.damaged").exists() and "budgets of today begin again" in caplog.text


def test_the_keys_of_a_gateway_have_their_budgets_again_after_a_kill(tmp_path: Path) -> None:
    key = create(tmp_path / "keys.json", [Scope.CHAT], limits={"tokens_per_day": 5})
    with lab(tmp_path, keys=tmp_path / "keys.json") as gateway:
        gateway.serve(1)
        assert gateway.chat("hi", headers=bearer(key)).status_code == 200
        refused = gateway.chat("hi", headers=bearer(key))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "insufficient_quota")
        assert refused.headers["x-should-retry"] == "false"
        assert gateway.metric("tentalis_gateway_key_tokens_left", key=identifier(key)) == 0
        wait_for(lambda: _tokens_on_disk(tmp_path) == 7, "the counts are saved while the gateway runs")
    with lab(tmp_path, keys=tmp_path / "keys.json") as gateway:
        gateway.serve(1)
        assert gateway.chat("hi", headers=bearer(key)).status_code == 429


def _tokens_on_disk(folder: Path) -> int:
    with sqlite3.connect(folder / "spool" / FILE_NAME) as disk:
        found: int = disk.execute("SELECT coalesce(sum(tokens), 0) FROM usage").fetchone()[0]
    return found


def test_a_client_that_hangs_up_pays_for_what_it_received(tmp_path: Path) -> None:
    script = Script(gate=threading.Event())
    with lab(tmp_path, script) as gateway:
        gateway.serve(1)
        with gateway.streaming("hi") as response:
            next(response.iter_lines())
        wait_for(lambda: gateway.metric("tentalis_gateway_key_tokens_total") >= 3, "the prompt's tokens are counted")


# --- the key file -----------------------------------------------------------------------------------------------------


def test_limits_of_a_key_change_without_a_new_key_and_go_back_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = create(path, [Scope.CHAT], limits={"running": 3})
    assert set_limits(path, identifier(key), {"running": 4, "tokens_per_day": 100}, ()) is not None
    assert load(path)[0].limits == {"running": 4, "tokens_per_day": 100}
    set_limits(path, identifier(key), {}, ("running", "tokens_per_day"))
    assert load(path)[0].limits == {}
    assert set_limits(path, "unknown", {"running": 4}, ()) is None
    with pytest.raises(ValueError, match=r"running: .*greater than 0"):
        set_limits(path, identifier(key), {"running": 0}, ())
    with pytest.raises(ValueError, match=r"messages: .*greater than 0"):
        create(path, [Scope.CHAT], limits={"messages": -1})


def test_a_file_without_limits_of_keys_is_as_earlier_versions_read_it(tmp_path: Path) -> None:
    create(tmp_path / "keys.json", [Scope.CHAT])
    assert "limits" not in json.loads((tmp_path / "keys.json").read_text())["keys"][0]


def test_an_unknown_limit_in_the_key_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create(path, [Scope.CHAT], limits={"running": 3})
    path.write_text(path.read_text().replace('"running"', '"runing"'))
    with pytest.raises(BadKeys, match="runing"):
        load(path)


# --- content limits and the bridge ------------------------------------------------------------------------------------


def test_a_key_s_own_limits_hold_for_the_content_of_its_calls(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    small, plain = (
        create(path, [Scope.CHAT], limits={"choices": 1, "messages": 1, "stops": 1}),
        create(path, [Scope.CHAT]),
    )
    with lab(tmp_path, keys=path) as gateway:
        gateway.serve(1)
        for texts, more, why in (
            (("hi",), {"n": 2}, "the limit is 1"),
            (("hi", "hello", "bye"), {}, "there are 3 messages; the limit is 1"),
            (("hi",), {"stop": ["a", "b"]}, "stop has 2 strings; the limit is 1"),
        ):
            answer = gateway.chat(*texts, headers=bearer(small), **more)
            assert (answer.status_code, why in answer.text) == (400, True), answer.text
            assert gateway.chat(*texts, headers=bearer(plain), **more).status_code == 200


# --- shown ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, dict[str, str]]]:
    """A gateway that answered one call of ann, and the keys of ann, bob and an operator."""
    folder = tmp_path_factory.mktemp("usage")
    path = folder / "keys.json"
    made = {
        "ann": create(path, [Scope.CHAT], "ann", "laptop", limits={"tokens_per_day": 10}),
        "bob": create(path, [Scope.CHAT], "bob"),
        "admin": create(path, [Scope.ADMIN]),
    }
    with lab(folder, keys=path) as gateway:
        gateway.serve(1)
        assert gateway.chat("hi", headers=bearer(made["ann"])).status_code == 200
        yield gateway, made


def test_a_key_sees_its_own_usage_and_an_operator_that_of_all(shown: tuple[Lab, dict[str, str]]) -> None:
    gateway, made = shown
    answer = gateway.http.get("/v1/usage", headers=bearer(made["ann"]))
    (own,) = answer.json()["keys"]
    today = datetime.now(UTC).date().isoformat()
    assert (own["key"], own["user"], own["label"]) == (identifier(made["ann"]), "ann", "laptop")
    assert own["days"] == [{"day": today, "requests": 1, "refused": 0, "tokens": 7}]
    assert (own["limits"]["tokens_per_day"], own["tokens_left"], own["running"]) == (10, 3, 0)
    assert answer.json()["resets_at"] == f"{(datetime.now(UTC).date() + timedelta(days=1)).isoformat()}T00:00:00Z"
    everybody = gateway.http.get("/v1/usage?days=2", headers=bearer(made["admin"])).json()["keys"]
    assert {each["key"] for each in everybody} == {identifier(key) for key in made.values()}
    assert gateway.http.get("/v1/usage").status_code == 401
    assert gateway.http.get("/v1/usage?days=0", headers=bearer(made["admin"])).status_code == 422
    assert gateway.http.get("/v1/usage?days=1000", headers=bearer(made["admin"])).status_code == 422


@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_the_command_shows_usage(
    shown: tuple[Lab, dict[str, str]], form: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gateway, made = shown
    monkeypatch.setenv("TENTALIS_URL", gateway.url)
    monkeypatch.setenv("TENTALIS_API_KEY", made["admin"])
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    done = runner.invoke(cli, ["keys", "usage", "-o", form])
    assert done.exit_code == 0, done.stderr
    if form == "table":
        (head, *rows) = [line.split() for line in done.stdout.splitlines()]
        assert head == ["KEY", "USER", "LABEL", "DAY", "REQUESTS", "REFUSED", "TOKENS", "TOKENS_PER_DAY", "LEFT"]
        (ann,) = [row for row in rows if row[0] == identifier(made["ann"])]
        assert ann[4:] == ["1", "0", "7", "10", "3"]
    else:
        assert identifier(made["ann"]) in done.stdout and "tokens_left: 3" in done.stdout.replace('"', "")


def test_the_command_says_why_it_has_no_answer(
    shown: tuple[Lab, dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENTALIS_HOME", str(tmp_path))
    monkeypatch.setenv("TENTALIS_URL", shown[0].url)
    monkeypatch.setenv("TENTALIS_API_KEY", "tk-wrong")
    refused = runner.invoke(cli, ["keys", "usage"])
    assert refused.exit_code == 1 and "unknown or was revoked" in refused.stderr
    away = runner.invoke(cli, ["keys", "usage", "--gateway", "http://127.0.0.1:9"])
    assert away.exit_code == 4 and "http://127.0.0.1:9" in away.stderr


def test_the_command_sets_limits_and_asks_first(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    file = ("--keys", str(path))
    create_ = runner.invoke(cli, ["keys", "create", "--limit", "running=2", "-o", "json", *file])
    key = json.loads(create_.stdout)["key"]
    limit = ["keys", "limit", identifier(key)]
    asked = runner.invoke(cli, [*limit, "running=5", *file], input="n\n")
    assert asked.exit_code == 1 and load(path)[0].limits == {"running": 2}
    dry = runner.invoke(cli, [*limit, "running=5", "--dry-run", *file])
    assert dry.exit_code == 0 and "would be" in dry.stderr and load(path)[0].limits == {"running": 2}
    done = runner.invoke(cli, [*limit, "running=default", "tokens_per_day=1000", "--yes", "-o", "json", *file])
    assert json.loads(done.stdout)["limits"] == {"tokens_per_day": 1000} == load(path)[0].limits
    assert "tokens_per_day=1000" in runner.invoke(cli, ["keys", "list", *file]).stdout
    assert runner.invoke(cli, [*limit, "tokens_per_day=none", "--yes", *file]).exit_code == 0
    assert load(path)[0].limits == {"tokens_per_day": None}
    for words, why in ((["running"], "NAME=VALUE"), (["walking=2"], "walking"), (["running=two"], "two")):
        bad = runner.invoke(cli, [*limit, *words, "--yes", *file])
        assert bad.exit_code == 2 and why in bad.stderr, (words, bad.stderr)
    assert key_file.revoke(path, identifier(key))
    gone = runner.invoke(cli, [*limit, "running=5", "--yes", *file])
    assert gone.exit_code == 1 and "no active key" in gone.stderr
