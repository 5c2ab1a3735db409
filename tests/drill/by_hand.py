"""Every component started by hand, in the order of the page: nothing runs before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from schemas.ids import policy_name
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.drill.bench import Workload
from tests.drill.fault import Sight, fault
from tests.drill.shell import Shell
from tests.support.inference_lab import make_model
from tests.support.kafka_fixture import eventually
from trainer.config.trainer_config import TrainerConfig, config_text

RUN = "hand"


class ByHand:
    """A folder, ports and a model. The page starts everything."""

    def __init__(self, folder: Path) -> None:
        ports: list[int] = []
        for _ in range(4):
            ports.append(free_port(avoid=tuple(ports)))
        self.folder = folder
        self.settings = Settings(bootstrap=f"127.0.0.1:{ports[0]}", home=folder / "home")
        self.log = folder / "command.log"
        names = ("PORT", "CONTROLLER", "MODEL_PORT", "GATEWAY_PORT")
        self.shell = Shell(
            folder,
            dict(zip(names, map(str, ports), strict=True))
            | {
                "TENTALIS_BOOTSTRAP": str(self.settings.bootstrap),
                "TENTALIS_HOME": str(self.settings.home),
                "TENTALIS_SERVER": f"http://127.0.0.1:{ports[2]}",
                "MODEL": str(folder / "tiny"),
                "CONFIG": str(folder / "run.yaml"),
                "POLICY": "assistant",
                "RUN": RUN,
            },
        )
        self.work: Workload | None = None

    def open(self) -> None:
        model = make_model(self.folder / "tiny")
        config = TrainerConfig(
            run_id=RUN, policy="assistant", base_model=str(model), base_model_name="tiny", steps=1, batch_rollouts=4
        )
        (self.folder / "run.yaml").write_text(config_text(config), encoding="utf-8")

    def close(self) -> None:
        self.shell.close()

    def lost(self) -> list[str]:
        """The problems that the verifier finds in what was answered."""
        return [] if self.work is None else self.work.problems()


@fault("by-hand", "start-by-hand.md", code=4, says="no Kafka answers on")
def start_by_hand(site: ByHand) -> Iterator[Sight]:
    yield site.shell.run("tentalis status")
    site.work = Workload(site.settings, policy="assistant")
    served = policy_name("assistant", 0)
    eventually(lambda: served in site.shell.run("tentalis policy list -o json").says, 120, 1.0)
    site.work.ask("by-hand", 4)
    site.work.runs.add(RUN)
    site.work.settled()
