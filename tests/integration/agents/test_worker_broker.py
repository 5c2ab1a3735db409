"""The worker on a real broker: groups, commits, restarts."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition

from schemas import topics
from schemas.records import AssignmentScope, BackPressure, Task
from tentalis.agents.workers.process import Worker, WorkerOptions
from tentalis.inference.protocol import Inference
from tentalis.kafka.consumer import GroupConsumer, Stored
from tentalis.kafka.identity import LossKind, PartitionLoss
from tentalis.kafka.loss_audit import TOPIC_LOST
from tentalis.kafka.offsets import committed_offsets, end_offsets
from tentalis.local.broker import EmbeddedBroker
from tentalis.policies.assignments import AssignedVersions
from tentalis.text.timestamps import now_ms
from tests.support.kafka_fixture import Kafka, eventually, remove_before
from tests.support.loop_lab import Lab, running
from tests.support.loop_records import ack, assignment, assignment_ack, task
from tests.support.loop_server import LoopServer

pytestmark = pytest.mark.broker


@pytest.fixture
def lab(kafka: Kafka, unique: str) -> Lab:
    return Lab(kafka.bootstrap, unique)


def worker(lab: Lab, server: Inference, worker_id: str = "w1", concurrency: int = 4) -> Worker:
    options = WorkerOptions(lab.name, "", "local", worker_id, concurrency, 20.0)
    return Worker(options, lab.settings, server)


def tasks(lab: Lab, count: int, first: int = 0, **more: Any) -> list[Task]:
    names = {"environment": lab.name, "policy": lab.name, "run_id": lab.name}
    return [task(f"{lab.name}-{i}", **(names | more)) for i in range(first, first + count)]


def results(lab: Lab) -> list[Any]:
    return lab.records(topics.RESULTS, lambda r: r.task.run_id == lab.name)


def ready(lab: Lab) -> LoopServer:
    lab.put(topics.POLICY_ACKS, ack(1, policy=lab.name))
    return LoopServer([f"{lab.name}@v1"])


def uncommitted(lab: Lab, group: str) -> int:
    ends = end_offsets(lab.settings, topics.TASKS)
    return sum(ends.values()) - sum(committed_offsets(lab.settings, group, [topics.TASKS]).values())


def exactly(lab: Lab, wanted: list[Task]) -> Callable[[], bool]:
    return lambda: len({r.result_id for r in results(lab)}) == sum(t.n_samples for t in wanted)


def test_every_task_is_answered_with_the_time_of_its_record_and_committed(lab: Lab) -> None:
    server = ready(lab)
    asked = tasks(lab, 12)
    with running(worker(lab, server).run) as end:
        lab.put(topics.TASKS, *asked)
        lab.publisher.send_bytes(topics.TASKS, b"garbage", b"\xff\xff not a record")
        lab.publisher.flush()
        lab.put(topics.TASKS, task(f"{lab.name}-other", environment="another", run_id=lab.name))
        eventually(exactly(lab, asked), 30)
        eventually(lambda: uncommitted(lab, f"tentalis-worker-{lab.name}") == 0, 30)
        end()
    found = results(lab)
    assert Counter(r.task.task_id for r in found) == {t.task_id: 2 for t in asked}
    assert all(r.opened_at > asked[0].event_time for r in found), "the broker's append time, not the client's"


def test_a_task_waits_for_the_first_version(lab: Lab) -> None:
    server = LoopServer([f"{lab.name}@v1"])
    asked = tasks(lab, 1)
    lab.put(topics.TASKS, *asked)
    with running(worker(lab, server).run):
        eventually(lambda: uncommitted(lab, f"tentalis-worker-{lab.name}") > 0, 30)
        assert not server.calls
        lab.put(topics.POLICY_ACKS, ack(1, policy=lab.name))
        eventually(exactly(lab, asked), 30)


def test_tasks_of_a_run_wait_out_back_pressure_and_somebodys_question_does_not(lab: Lab) -> None:
    server = ready(lab)
    said = BackPressure(
        policy=lab.name,
        run_id=lab.name,
        event_time=now_ms(),
        closed=True,
        waiting=3,
        ahead=0,
        max_staleness=2,
        expires_at=now_ms() + 600_000,
    )
    lab.put(topics.POLICIES, said)
    made, asked = tasks(lab, 3), tasks(lab, 1, first=3, run_id=None)
    with running(worker(lab, server).run):
        lab.put(topics.TASKS, *made, *asked)
        eventually(lambda: lab.records(topics.RESULTS, lambda r: r.task.task_id == asked[0].task_id), 30)
        assert results(lab) == []
        lab.put(topics.POLICIES, said.model_copy(update={"closed": False}))
        eventually(exactly(lab, made), 30)


def test_two_policies_are_served_mixed_and_a_restarted_worker_divides_the_tasks_in_the_same_way(lab: Lab) -> None:
    lab.put(topics.POLICY_ACKS, ack(1, policy=lab.name), assignment_ack(7, policy=f"{lab.name}-b"))
    arms = {f"{lab.name}@v1", f"{lab.name}-b@v7"}
    half = assignment(7, AssignmentScope.WORKER, "w1", policy=f"{lab.name}-b", replaces=lab.name, percent=50.0)
    lab.put(topics.POLICIES, half)
    asked = tasks(lab, 16)
    with running(worker(lab, LoopServer(sorted(arms))).run) as end:
        lab.put(topics.TASKS, *asked)
        eventually(exactly(lab, asked), 30)
        end()
    by_task = {
        r.task.task_id: {s.policy_spans[0].policy for s in results(lab) if s.task == r.task} for r in results(lab)
    }
    assert all(len(versions) == 1 for versions in by_task.values()), "a group has one version"
    assert set.union(*by_task.values()) == arms
    folded = AssignedVersions()
    for record in (half, assignment_ack(7, policy=f"{lab.name}-b")):
        folded.apply(record)
    expected = {
        each.task_id: folded.name(
            "local", lab.name, served=f"{lab.name}@v1".format, worker_id="w1", environment=lab.name, unit=each.task_id
        )
        or f"{lab.name}@v1"
        for each in asked
    }
    assert {name: versions.pop() for name, versions in by_task.items()} == expected
    lab.put(topics.POLICIES, half.model_copy(update={"active": False}))
    more = tasks(lab, 8, first=16)
    with running(worker(lab, LoopServer(sorted(arms))).run):
        lab.put(topics.TASKS, *more)
        eventually(exactly(lab, [*asked, *more]), 30)
    late = {r.policy_spans[0].policy for r in results(lab) if r.task.task_id in {each.task_id for each in more}}
    assert late == {f"{lab.name}@v1"}


def test_what_a_stopped_worker_left_undone_another_one_does(lab: Lab) -> None:
    stuck = ready(lab)
    stuck.gate = asyncio.Event()  # never set: its answers never come
    asked = tasks(lab, 6)
    with running(worker(lab, stuck).run) as end:
        lab.put(topics.TASKS, *asked)
        eventually(lambda: stuck.calls, 30)
        end()
    assert results(lab) == []
    with running(worker(lab, LoopServer([f"{lab.name}@v1"]), "w2").run):
        eventually(exactly(lab, asked), 40)


def test_a_crash_between_answer_and_commit_answers_twice_and_loses_nothing(lab: Lab) -> None:
    server = ready(lab)
    first = worker(lab, server)
    shared = first._consumers[0]
    asked = tasks(lab, 1)

    def crash() -> None:
        if any(stored.key == asked[0].task_id for stored in shared.progress.committable()):
            raise RuntimeError("killed before the commit")

    shared.commit = crash  # type: ignore[method-assign]
    lab.put(topics.TASKS, *asked)
    with pytest.raises(RuntimeError, match="before the commit"), running(first.run) as end:
        eventually(lambda: len(results(lab)) == 2, 30)
        end()
    lab.put(topics.POLICY_ACKS, ack(2, policy=lab.name))
    with running(worker(lab, LoopServer([f"{lab.name}@v2"])).run):
        eventually(lambda: len(results(lab)) == 4, 40)
    assert {r.policy_spans[0].policy for r in results(lab)} == {f"{lab.name}@v1", f"{lab.name}@v2"}
    assert len({r.result_id for r in results(lab)}) == 4


def test_a_second_worker_takes_its_share_and_nothing_is_answered_twice(lab: Lab) -> None:
    one, two = ready(lab), LoopServer([f"{lab.name}@v1"])
    with running(worker(lab, one, "w1").run):
        early = tasks(lab, 16)
        lab.put(topics.TASKS, *early)
        eventually(exactly(lab, early), 30)
        with running(worker(lab, two, "w2").run):

            def shared() -> bool:
                count = len(one.calls) + len(two.calls)
                lab.put(topics.TASKS, *tasks(lab, 8, first=count))
                eventually(lambda: len(results(lab)) >= 2 * (count + 8), 30)
                return bool(two.calls)

            eventually(shared, 60)
    # Two workers answer alike (same seed, same adapter): a record per call of either.
    assert len(results(lab)) == 2 * (len(one.calls) + len(two.calls))


def test_a_task_for_one_worker_is_answered_by_that_one_wherever_it_lies(lab: Lab) -> None:
    one, two = ready(lab), LoopServer([f"{lab.name}@v1"])
    with running(worker(lab, one, "w1").run), running(worker(lab, two, "w2").run):
        asked = tasks(lab, 8, target_worker="w2")
        lab.put(topics.TASKS, *asked)
        eventually(exactly(lab, asked), 40)
        nobody = tasks(lab, 2, first=8, target_worker="w3")
        everybody = tasks(lab, 4, first=10)
        lab.put(topics.TASKS, *nobody, *everybody)
        eventually(exactly(lab, asked + everybody), 40)
    by_worker = Counter(r.worker_id for r in results(lab) if r.task.target_worker)
    assert by_worker == {"w2": 16}
    assert not {t.task_id for t in nobody} & {r.task.task_id for r in results(lab)}


def remove_all(lab: Lab, group: str) -> int:
    """Removes all records of the topic of tasks; returns the number of those after the group's committed offsets."""
    ends = end_offsets(lab.settings, topics.TASKS)
    committed = committed_offsets(lab.settings, group, [topics.TASKS])
    remove_before(lab.settings, topics.TASKS, {p: end for p, end in ends.items() if end})
    return sum(ends[partition] - offset for (_, partition), offset in committed.items())


def given_up(lab: Lab) -> list[Any]:
    return lab.records(topics.AUDIT, lambda r: r.record_type == TOPIC_LOST and r.component == "tentalis-worker")


def test_tasks_that_were_removed_before_the_worker_read_them_are_on_record(
    own_broker: EmbeddedBroker, unique: str
) -> None:
    lab = Lab(own_broker.bootstrap, unique)
    server, group, first = ready(lab), f"tentalis-worker-{unique}", tasks(lab, 16)
    lab.put(topics.TASKS, *first)
    with running(worker(lab, server).run) as end:
        eventually(lambda: all(uncommitted(lab, each) == 0 for each in (group, f"{group}-w1")), 60)
        end()
    assert given_up(lab) == [], "the group and the log begin at the same place"
    lab.put(topics.TASKS, *tasks(lab, 24, first=16))
    unread = remove_all(lab, group)
    after = tasks(lab, 4, first=40)
    lab.put(topics.TASKS, *after)
    with running(worker(lab, server).run) as end:
        eventually(exactly(lab, [*first, *after]), 60)
        end()
    found = given_up(lab)
    assert unread and sum(each.offset for each in found) == 2 * unread, "the group of all workers, and its own"
    assert all(each.topic == topics.TASKS and "has lost records" in each.record_id for each in found)


def test_a_member_whose_next_records_are_removed_ends_and_tells_of_it_at_its_next_start(
    own_broker: EmbeddedBroker, unique: str
) -> None:
    lab, losses = Lab(own_broker.bootstrap, unique), list[PartitionLoss]()
    read, assigned = list[Stored](), list[TopicPartition]()
    lab.put(topics.TASKS, *tasks(lab, 16))

    def member() -> GroupConsumer:
        return GroupConsumer(lab.settings, unique, [topics.TASKS], on_assign=assigned.extend, on_loss=losses.extend)

    def read_all(consumer: GroupConsumer, count: int) -> None:
        def enough() -> bool:
            read.extend(consumer.poll(0.5))
            return len(read) == count

        eventually(enough, 60)

    first = member()
    try:
        read_all(first, 16)
        first.commit(read)
        first._consumer.pause(assigned)
        lab.put(topics.TASKS, *tasks(lab, 24, first=16))
        unread = remove_all(lab, unique)
        first._consumer.resume(assigned)
        with pytest.raises(KafkaException, match="out of range"):
            eventually(lambda: first.poll(0.5), 60)
    finally:
        first.close()
    assert losses == []
    lab.put(topics.TASKS, *tasks(lab, 4, first=40))
    second = member()
    try:
        read_all(second, 20)
    finally:
        second.close()
    assert (
        unread
        and sum(each.records for each in losses) == unread
        and {each.kind for each in losses} == {LossKind.UNREAD}
    )
