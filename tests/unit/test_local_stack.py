"""Which processes the local stack has."""

from pathlib import Path

from tentalis.config import Settings
from tentalis.local.spec import in_order
from tentalis.local.stack import StackOptions, build_stack
from tentalis.local.state import StateDir


def test_a_gateway_comes_with_what_links_its_turns(tmp_path: Path) -> None:
    def names(gateway: str | None) -> set[str]:
        with StateDir(tmp_path) as state:
            options = StackOptions(
                state, Settings(home=tmp_path), model=tmp_path, trainer_config=tmp_path / "run.yaml", gateway=gateway
            )
            return {spec.name for spec in in_order(build_stack(options).specs)}

    assert names("assistant") - names(None) == {"gateway", "sessions"}
