"""The choice of a replica: breaker, versions, prefix and bounded load, for any sequence of calls and outcomes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tentalis.inference.replicas.breaker import FAILURES_TO_OPEN, FIRST_OPEN_S, LONGEST_OPEN_S, BreakerState
from tentalis.inference.replicas.router import (
    LOAD_BOUND,
    PROBE_INTERVAL_S,
    CallOutcome,
    ReplicaLease,
    ReplicaRouter,
    load_limit,
    preferred,
)

URLS = ("http://a:1", "http://b:1", "http://c:1")
V1, V2 = "assistant@v1", "assistant@v2"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def router_of(count: int = 3, versions: tuple[str, ...] = (V1,)) -> tuple[ReplicaRouter, Clock]:
    clock = Clock()
    router = ReplicaRouter(URLS[:count], clock)
    for url in router.urls:
        router.probed(url, ["base", *versions])
    return router, clock


def call(router: ReplicaRouter, outcome: CallOutcome, key: str = "k", model: str = V1) -> str | None:
    lease = router.pick(key, model)
    if lease is None:
        return None
    router.finish(lease, outcome)
    return lease.url


def opened(router: ReplicaRouter, url: str) -> None:
    for _ in range(FAILURES_TO_OPEN):
        router.probed(url, None)


step = st.one_of(
    st.tuples(st.just("pick"), st.sampled_from(["k1", "k2", "k3"]), st.sampled_from([V1, V2, "base"])),
    st.tuples(st.just("finish"), st.integers(0, 20), st.sampled_from(list(CallOutcome))),
    st.tuples(
        st.just("probe"), st.sampled_from(URLS), st.sampled_from([None, ("base",), ("base", V1), ("base", V1, V2)])
    ),
    st.tuples(st.just("wait"), st.sampled_from([0.5, FIRST_OPEN_S, LONGEST_OPEN_S]), st.none()),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(step, max_size=60))
def test_the_rules_of_a_choice_hold_after_any_calls_and_probes(
    steps: list[tuple[str, object, object]],
) -> None:
    clock = Clock()
    router = ReplicaRouter(URLS, clock)
    running: list[ReplicaLease] = []
    listed: dict[str, frozenset[str]] = {}
    for kind, first, second in steps:
        if kind == "pick":
            before = router.health()
            lease = router.pick(str(first), str(second))
            if lease is None:
                for url, health in before.items():
                    has = second == "base" or str(second) in listed.get(url, frozenset())
                    assert not has or health.state is not BreakerState.CLOSED, "a healthy replica has the version"
                continue
            health = before[lease.url]
            assert health.state is not BreakerState.OPEN
            assert second == "base" or str(second) in listed[lease.url], "asked only for what it listed"
            running.append(lease)
        elif kind == "finish" and running:
            assert isinstance(first, int) and isinstance(second, CallOutcome)
            lease = running.pop(first % len(running))
            router.finish(lease, second)
            if second is CallOutcome.MISSING and lease.url in listed:
                listed[lease.url] -= {str(lease.model)}
        elif kind == "probe":
            assert second is None or isinstance(second, tuple)
            router.probed(str(first), second)
            if second is not None:
                listed[str(first)] = frozenset(second) - {"base"}
        elif kind == "wait":
            assert isinstance(first, float)
            clock.now += first
        expected = Counter(each.url for each in running)
        assert {url: health.in_flight for url, health in router.health().items()} == {
            url: expected[url] for url in URLS
        }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["k1", "k2", "k3", "k4"]), min_size=1, max_size=60), st.integers(1, 3))
def test_no_replica_takes_more_than_its_bounded_share(keys: list[str], count: int) -> None:
    router, _ = router_of(count)
    for at, key in enumerate(keys, 1):
        lease = router.pick(key, V1)
        assert lease is not None
        assert router.health()[lease.url].in_flight <= load_limit(at, count)
        assert load_limit(at, count) < LOAD_BOUND * at / count + 1


@given(st.text(max_size=20), st.sets(st.text(min_size=1, max_size=8), min_size=2, max_size=6), st.data())
def test_a_replica_that_leaves_moves_only_its_own_keys(key: str, urls: set[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(urls)))
    before, after = preferred(key, urls), preferred(key, urls - {gone})
    assert after == [url for url in before if url != gone]


def test_the_calls_of_a_key_stay_at_one_replica_and_keys_spread_over_all() -> None:
    router, _ = router_of()
    assert len({call(router, CallOutcome.OK, "session") for _ in range(10)}) == 1
    found = Counter(call(router, CallOutcome.OK, f"session {i}") for i in range(300))
    assert set(found) == set(URLS) and min(found.values()) > 50


def test_a_breaker_opens_after_failures_in_a_row_and_closes_after_a_trial() -> None:
    changes: list[tuple[str, BreakerState]] = []
    clock = Clock()
    router = ReplicaRouter(URLS[:1], clock, lambda url, state: changes.append((url, state)))
    for _ in range(FAILURES_TO_OPEN - 1):
        call(router, CallOutcome.FAILED, model="base")
    call(router, CallOutcome.OK, model="base")
    for _ in range(FAILURES_TO_OPEN - 1):
        assert call(router, CallOutcome.FAILED, model="base")
    assert not changes, "never so many in a row"
    call(router, CallOutcome.FAILED, model="base")
    assert router.pick("k", "base") is None
    clock.now += FIRST_OPEN_S
    trial = router.pick("k", "base")
    assert trial is not None and router.pick("k", "base") is None, "one trial at a time"
    router.finish(trial, CallOutcome.FAILED)
    clock.now += FIRST_OPEN_S
    assert router.pick("k", "base") is None, "twice as long"
    clock.now += FIRST_OPEN_S
    assert call(router, CallOutcome.OK, model="base")
    assert [state for _, state in changes] == [BreakerState.OPEN, BreakerState.OPEN, BreakerState.CLOSED]
    assert router.health()[URLS[0]].state is BreakerState.CLOSED


def test_a_trial_that_its_caller_gave_up_makes_room_for_another() -> None:
    router, clock = router_of(1)
    opened(router, URLS[0])
    clock.now += FIRST_OPEN_S
    assert call(router, CallOutcome.GIVEN_UP) and call(router, CallOutcome.OK)


def test_the_outcomes_of_calls_that_began_before_the_breaker_opened_are_ignored() -> None:
    router, clock = router_of(1)
    early = [router.pick("k", V1) for _ in range(FAILURES_TO_OPEN + 5)]
    slow, *failing = [lease for lease in early if lease is not None]
    for lease in failing:
        router.finish(lease, CallOutcome.FAILED)
    router.finish(slow, CallOutcome.OK)
    assert router.health()[URLS[0]].state is BreakerState.OPEN, "an answer to an old question closes nothing"
    clock.now += FIRST_OPEN_S
    assert router.health()[URLS[0]].state is BreakerState.HALF_OPEN, "many failures at once open it once"


def test_a_probe_that_is_answered_allows_the_trial_at_once_and_keeps_what_was_listed_through_silence() -> None:
    router, _ = router_of(2)
    for url in router.urls:
        opened(router, url)
        assert router.health()[url].versions == {V1}
    assert router.pick("k", V1) is None
    router.probed(URLS[0], ["base"])
    assert router.pick("k", V1) is None, "it came back without its adapters"
    assert call(router, CallOutcome.OK, model="base") == URLS[0]


def test_a_single_replica_is_asked_for_any_version() -> None:
    router, _ = router_of(1)
    assert call(router, CallOutcome.MISSING, model=V2) == URLS[0] == call(router, CallOutcome.OK, model=V2)


def test_a_replica_that_lost_a_version_is_not_asked_for_it_until_it_lists_it_again() -> None:
    router, _ = router_of(2)
    first = call(router, CallOutcome.MISSING)
    assert first is not None
    assert {call(router, CallOutcome.OK, f"{i}") for i in range(20)} == set(router.urls) - {first}
    router.probed(first, ["base", V1])
    assert {call(router, CallOutcome.OK, f"{i}") for i in range(20)} == set(router.urls)


def test_a_new_version_is_asked_only_of_replicas_that_list_it() -> None:
    router, _ = router_of(3)
    assert router.lacks(V2) and router.pick("k", V2) is None
    router.probed(URLS[1], ["base", V1, V2])
    assert {call(router, CallOutcome.OK, f"{i}", V2) for i in range(20)} == {URLS[1]}


def test_the_last_resort_is_the_replica_that_is_tried_next_and_never_one_without_the_version() -> None:
    router, clock = router_of(2)
    opened(router, URLS[0])
    clock.now += 1.0
    opened(router, URLS[1])
    lease = router.pick("k", V1, any_state=True)
    assert lease is not None and lease.url == URLS[0]
    router.finish(lease, CallOutcome.OK)
    assert router.health()[URLS[0]].state is BreakerState.CLOSED
    assert router.pick("k", V2, any_state=True) is None
    assert router.pick("k", V1, without=URLS, any_state=True) is None


def test_probes_are_due_once_per_interval_and_at_once_for_a_version_that_nobody_lists() -> None:
    router, clock = router_of(2)
    assert router.due_probes() == list(URLS[:2]) and router.due_probes(V1) == []
    assert router.due_probes(V2) == list(URLS[:2])
    clock.now += PROBE_INTERVAL_S
    assert router.due_probes(V1) == list(URLS[:2])


@pytest.mark.parametrize("urls", [(), ("http://a", "http://a")])
def test_a_replica_is_given_once(urls: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="give the URL of each replica once"):
        ReplicaRouter(urls, Clock())
