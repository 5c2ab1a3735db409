"""Where a run stands, and how a step is committed to it, in the order that makes each crash safe:

    checkpoint -> verify -> StepResult -> adapter -> PolicyUpdate

Each is idempotent: after a crash what should follow the checkpoint and is not on the log is written again.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from schemas import topics
from schemas.records import BatchPlan, RunManifest, StepResult
from tentalis import tracing
from tentalis.config import Settings
from tentalis.kafka import now_ms
from tentalis.lineage import Lineage, Node
from trainer.checkpoint import Checkpoint, CheckpointState, checkpoint_root, checkpoints, prune, save, sweep
from trainer.config import TrainerConfig
from trainer.engine import Engine
from trainer.model import adapter_sha256
from trainer.plan import PlanHead
from trainer.publish import Ledger, policy_update, prune_adapters, publish_adapter
from trainer.retention import needed
from trainer.runlog import RunLog
from trainer.step import Outcome


@dataclass(slots=True)
class Head:
    """A run at its last complete step, whose `checkpoint` the engine holds. `config` has the id of the run, which is
    another than that of the file after a rollback."""

    settings: Settings
    config: TrainerConfig
    engine: Engine
    run: RunLog
    ledger: Ledger
    manifest: RunManifest
    owner: str
    checkpoint: Checkpoint
    lineage: Lineage

    @property
    def step(self) -> int:
        """The last complete step."""
        return self.checkpoint.state.step

    @property
    def version(self) -> int:
        """The version of the last complete step."""
        return self.manifest.first_version + self.step

    @property
    def depth(self) -> int:
        """Steps from the initial adapter of the family's first run."""
        return self.lineage.depth(Node(self.run.run_id, self.step))

    @property
    def ahead(self) -> int:
        """Steps beyond the version that is served; all there are while none is."""
        served = None if self.run.promoted is None else self.lineage.node(self.run.promoted)
        found = None if served is None else self.lineage.distance(Node(self.run.run_id, self.step), served)
        return self.step if found is None else found

    @property
    def of_plans(self) -> PlanHead:
        """What the plans of this process have in common."""
        config, manifest = self.config, self.manifest
        return PlanHead(
            config.run_id,
            config.policy,
            manifest.digest,
            manifest.world_size,
            config.micro_batch_tokens,
            config.seed,
            self.owner,
            config.loss.pair.weight > 0,
        )

    def write_plan(self, plan: BatchPlan) -> BatchPlan:
        """Puts a plan onto the log. Raises Fenced."""
        self.ledger.write(topics.BATCHES, plan)
        return plan

    def commit(self, plan: BatchPlan, outcome: Outcome, fetching: float) -> dict[str, float]:
        """The step is trained: checkpoint, result, adapter, announcement. Returns the seconds of all its phases. Raises
        Fenced, BadCheckpoint, AdapterExists."""
        began = time.perf_counter()
        adapter, optimizer = self.engine.policy.adapter_bytes(), self.engine.optimizer_state()
        state = CheckpointState(
            run_id=plan.run_id,
            policy=plan.policy,
            step=plan.step,
            attempt=plan.attempt,
            plan_id=plan.plan_id,
            owner=plan.owner,
            manifest_digest=plan.manifest_digest,
            low_water={p.partition: p.offset for p in plan.low_water},
            adapter_sha256=adapter_sha256(adapter),
            optimizer_steps=optimizer.steps,
            metrics=outcome.metrics,
            seconds=outcome.seconds | {"fetch": fetching},
        )
        root = checkpoint_root(self.settings, plan.run_id)
        self.checkpoint = save(root, state, adapter, self.engine.policy.adapter_config(), optimizer)
        self.announce({"checkpoint": time.perf_counter() - began})
        self._prune()
        return state.seconds | {"publish": time.perf_counter() - began}

    def announce(self, seconds: Mapping[str, float]) -> None:
        """Writes of StepResult, adapter and PolicyUpdate what is not there."""
        checkpoint, state, policy = self.checkpoint, self.checkpoint.state, self.config.policy
        traceparent = tracing.derived(step_name(state.run_id, state.step, state.attempt)) if state.step else None
        version = self.version
        if (state.step, state.attempt) not in self.run.results:
            result = StepResult(
                run_id=state.run_id,
                step=state.step,
                attempt=state.attempt,
                plan_id=state.plan_id,
                event_time=now_ms(),
                policy=policy,
                policy_version=version,
                adapter_sha256=state.adapter_sha256,
                metrics=state.metrics,
                seconds={**state.seconds, **seconds},
                owner=state.owner,
            )
            self.ledger.write(topics.BATCHES, result, traceparent)
            self.run.results[state.step, state.attempt] = result
        folder = publish_adapter(self.settings.home, policy, version, checkpoint)
        if version not in self.run.updates:
            name = self.config.base_model_name
            update = policy_update(self.manifest, checkpoint, folder, self.engine.policy, name)
            self.ledger.write(topics.POLICIES, update, traceparent)
            self.run.updates[version] = update

    def _prune(self) -> None:
        promoted = [promotion.version for promotion, _ in self.run.promotions]

        def keeps(present: Collection[int]) -> set[int]:
            return needed(present, self.version, self.config.max_staleness, promoted, self.run.pinned)

        found = {
            checkpoint.folder: (self.lineage.version(Node(run, checkpoint.state.step)), checkpoint)
            for run in self.lineage.branches(self.run.run_id)
            for checkpoint in checkpoints(checkpoint_root(self.settings, run))
        }
        kept = keeps({version for version, _ in found.values()})
        newest = sorted((v for v, c in found.values() if c.state.run_id == self.run.run_id), reverse=True)
        kept.update(newest[: self.config.keep_checkpoints])
        prune(checkpoint for version, checkpoint in found.values() if version not in kept)
        sweep(checkpoint_root(self.settings, self.run.run_id))
        prune_adapters(self.settings.home, self.config.policy, self.config.keep_adapters, keeps)


def step_name(run_id: str, step: int, attempt: int) -> str:
    """Of a step, in traces."""
    return f"{run_id}/{step}/{attempt}"
