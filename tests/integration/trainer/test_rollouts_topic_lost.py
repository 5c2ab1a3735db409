"""Topics of a run that are deleted and created again: the trainer refuses, gives up on record what it lost, or goes on
after an import."""

import json
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import AuditRecord, BatchPlan
from tentalis.kafka.consumer import read_to_end
from tentalis.local.broker import EmbeddedBroker
from tentalis.ops.lost_topics import lost_topics
from tentalis.service import variables
from tentalis.service.exit_codes import ExitCode
from tests.integration.streams.test_topic_loss import recreate
from tests.integration.trainer.test_trainer_run import Lab, promote
from tests.support import forked
from tests.support.kafka_fixture import Kafka
from tests.support.trainer_lab import tiny_model

pytestmark = pytest.mark.broker


def command(lab: Lab, *arguments: str) -> tuple[int, str]:
    """Runs a command in a process that has the trainer's libraries; its exit code and what it says."""
    out, err = lab.folder / "command.json", lab.folder / "command.log"
    for path in (out, err):
        path.unlink(missing_ok=True)
    process = forked.start(forked.commands, json.dumps([arguments]), lab.environment(), out, err)
    try:
        process.join(180)
        code, _, said = json.loads(out.read_text())
        return code, said + err.read_text()
    finally:
        forked.end(process)


def trained(lab: Lab, steps: int, *options: str) -> tuple[int, str]:
    """Runs `tentalis train` up to a step; its exit code and what it says."""
    return command(lab, "train", "--config", str(lab.write_config(lab.config(steps=steps))), *options)


def test_a_recreated_topic_is_refused_until_its_loss_is_accepted_with_an_import_too(
    own_broker: EmbeddedBroker, unique: str, tmp_path: Path
) -> None:
    lab = Lab(Kafka(own_broker.bootstrap, "embedded", own_broker), unique, tmp_path, tiny_model(tmp_path / "model"))
    lab.put_groups(2)
    assert trained(lab, 1)[0] == 0
    archive = tmp_path / "archive"
    assert command(lab, "export", lab.config().run_id, "--into", str(archive))[0] == 0
    recreate(lab.settings, topics.ROLLOUTS)
    code, said = command(lab, "import", str(archive))
    assert code == 0, said
    lab.put_groups(5)
    code, said = trained(lab, 2)
    assert code == ExitCode.PERMANENT, said
    assert f"{topics.ROLLOUTS} was deleted and created again" in said and "needed after an import too" in said
    assert lost_topics(lab.settings)[0].startswith("trainer, run ")
    code, said = trained(lab, 1, "--accept-loss")  # without a new step
    assert code == 0 and "given up" in said, said
    assert lost_topics(lab.settings) == [], "the acceptance is on record"
    code, said = trained(lab, 2)
    assert code == 0 and "given up" not in said, said
    assert lost_topics(lab.settings) == [], "the new checkpoint is about the new topic"
    plans = [stored.decode(lab.codec) for stored in read_to_end(lab.settings, topics.BATCHES)]
    rows = [row.rollout_id for each in plans if isinstance(each, BatchPlan) for row in each.rows]
    assert len(rows) == len({*rows}) == 16, "no imported rollout is trained again"
    audit = [stored.decode(lab.codec) for stored in read_to_end(lab.settings, topics.AUDIT)]
    assert {each.topic for each in audit if isinstance(each, AuditRecord)} == {topics.ROLLOUTS}


@pytest.mark.long
def test_a_topic_that_is_recreated_before_the_first_step_of_a_run_or_of_a_branch_is_refused(
    own_broker: EmbeddedBroker, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of all topics has the new ids at once: only the checkpoint of step 0 tells. The command turns the
    error into exit code 7."""
    lab = Lab(Kafka(own_broker.bootstrap, "embedded", own_broker), unique, tmp_path, tiny_model(tmp_path / "model"))
    run, refused = lab.config(steps=None), f"{topics.ROLLOUTS} was deleted and created again"
    log = lab.folder / f"{run.run_id}.log"

    def said(code: int, *options: str) -> str:
        before = log.stat().st_size if log.exists() else 0
        assert lab.train(run, *options) == code, lab.log_text(run)
        return log.read_text()[before:]

    said(0, "caught_up")  # no rollouts: the run begins and has no step
    recreate(lab.settings, topics.ROLLOUTS)
    lab.put_groups(2)
    assert refused in said(ExitCode.ERROR, "steps=1")
    (named,) = lost_topics(lab.settings)
    assert refused in named and named.startswith("trainer, run ")
    with monkeypatch.context() as accepted:
        accepted.setenv(variables.ACCEPT_LOSS.name, "1")
        said(0, "steps=1")
    lab.put_groups(5)
    said(0, "steps=1")
    promote(lab, 1, "rollback")
    recreate(lab.settings, topics.ROLLOUTS)  # before the trainer acts on the decision
    for _ in range(2):
        assert refused in said(ExitCode.ERROR, "steps=1")


@pytest.mark.long  # the recreated topic above is refused and imported in the same way
def test_a_run_whose_plans_are_gone_is_refused_until_they_are_imported(
    own_broker: EmbeddedBroker, unique: str, tmp_path: Path
) -> None:
    lab = Lab(Kafka(own_broker.bootstrap, "embedded", own_broker), unique, tmp_path, tiny_model(tmp_path / "model"))
    lab.put_groups(6)
    assert trained(lab, 1)[0] == 0
    run_id, archive = lab.config().run_id, tmp_path / "archive"
    assert command(lab, "export", run_id, "--into", str(archive))[0] == 0
    recreate(lab.settings, topics.BATCHES)
    code, said = trained(lab, 2)
    assert code == ExitCode.PERMANENT, said
    assert f"{topics.BATCHES} deleted or created again" in said and "tentalis import" in said
    (lost,) = lost_topics(lab.settings)
    assert f"{topics.BATCHES} was deleted and created again" in lost
    code, said = command(lab, "import", str(archive))
    assert code == 0, said
    assert lost_topics(lab.settings) == []
    code, said = trained(lab, 2)
    assert code == 0 and "continues after step 1" in said, said
