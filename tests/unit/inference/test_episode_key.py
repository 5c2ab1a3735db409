"""The keys of episodes: signed by a worker, refused when they are foreign, changed or expired."""

import base64
import json
import stat
from pathlib import Path

import pytest

from schemas.records import Sampling
from tentalis.inference.episode_key import CLOCK_SLACK_S, BadEpisodeKey, EpisodeGrant, granted, signed_key
from tentalis.inference.episode_secret import FILE_NAME, BadEpisodeSecret, shared_secret
from tentalis.service.settings import Settings

SECRET = b"a secret of sixteen and more"
GRANT = EpisodeGrant(
    session_id="episode/t/0/1-abc",
    task_id="t",
    policy="assistant",
    environment="pong",
    worker_id="w",
    least_version=3,
    sampling=Sampling(temperature=0.7, max_tokens=99),
    expires=1000.0,
)


def test_a_key_gives_its_permission_back_until_it_expires() -> None:
    key = signed_key(GRANT, SECRET)
    assert granted(key, SECRET, 999.0) == GRANT == granted(key, SECRET, 1000.0 + CLOCK_SLACK_S)
    with pytest.raises(BadEpisodeKey, match="has expired"):
        granted(key, SECRET, 1000.1 + CLOCK_SLACK_S)


def test_a_key_of_another_secret_is_refused() -> None:
    with pytest.raises(BadEpisodeKey, match="another secret"):
        granted(signed_key(GRANT, b"another secret of sixteen"), SECRET, 0.0)


@pytest.mark.parametrize("field, value", [("session_id", "episode/other/0/1-abc"), ("expires", 9e9), ("policy", "p")])
def test_changed_claims_are_refused(field: str, value: object) -> None:
    claims, _, signature = signed_key(GRANT, SECRET).removeprefix("te-").partition(".")
    changed = json.loads(base64.urlsafe_b64decode(claims + "==")) | {field: value}
    forged = base64.urlsafe_b64encode(json.dumps(changed).encode()).decode().rstrip("=")
    with pytest.raises(BadEpisodeKey, match="another secret"):
        granted(f"te-{forged}.{signature}", SECRET, 0.0)


@pytest.mark.parametrize(
    "key", ["te-", "te-a", "te-a.", "te-.", "te-a.b!", "te-\xe9.\xe9", "tk-a.b", "te-a." + "A" * 43]
)
def test_text_that_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(BadEpisodeKey):
        granted(key, SECRET, 0.0)


def test_the_worker_makes_the_secret_once_and_for_its_user_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    with pytest.raises(BadEpisodeSecret, match="TENTALIS_EPISODE_SECRET"):
        shared_secret(settings)
    made = shared_secret(settings, create=True)
    assert len(made) >= 32 and shared_secret(settings) == shared_secret(settings, create=True) == made
    assert stat.S_IMODE((settings.home / FILE_NAME).stat().st_mode) == 0o600
    assert [each.name for each in settings.home.iterdir()] == [FILE_NAME]


def test_a_given_secret_comes_first_and_must_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(home=tmp_path)
    monkeypatch.setenv("TENTALIS_EPISODE_SECRET", SECRET.decode())
    assert shared_secret(settings, create=True) == SECRET and not list(tmp_path.iterdir())
    monkeypatch.setenv("TENTALIS_EPISODE_SECRET", "short")
    with pytest.raises(BadEpisodeSecret, match="TENTALIS_EPISODE_SECRET has fewer than 16"):
        shared_secret(settings)


def test_a_secret_may_be_in_a_file_that_a_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, file = Settings(home=tmp_path / "home"), tmp_path / "secret"
    monkeypatch.setenv("TENTALIS_EPISODE_SECRET_FILE", str(file))
    with pytest.raises(BadEpisodeSecret, match=r"TENTALIS_EPISODE_SECRET_FILE=.*no such file"):
        shared_secret(settings, create=True)
    file.write_text(f"{SECRET.decode()}\n")
    assert shared_secret(settings, create=True) == SECRET and not settings.home.exists()
    file.write_text("short")
    with pytest.raises(BadEpisodeSecret, match="TENTALIS_EPISODE_SECRET_FILE has fewer than 16"):
        shared_secret(settings)
    monkeypatch.setenv("TENTALIS_EPISODE_SECRET", SECRET.decode())
    with pytest.raises(BadEpisodeSecret, match="both set"):
        shared_secret(settings)
