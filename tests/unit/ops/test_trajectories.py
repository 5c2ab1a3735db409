"""The view of the rollouts, without a broker: what it holds after any history of the topic."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import Rollout
from schemas.wire.codec import Codec
from tentalis.kafka.consumer import Stored
from tentalis.ops.forget.core import redacted_rollout
from tentalis.ops.trajectories import BadQuery, Filters, Refreshed, listed, query
from tentalis.ops.trajectories.refresh import ViewFold, _stale
from tentalis.ops.trajectories.rows import COLUMNS, row_of
from tentalis.ops.trajectories.view import FORMAT, TrajectoryView, ViewState
from tests.support import ROOT
from tests.support.trainer_lab import rollout, rollouts

CODEC = Codec()


def stored(records: Iterable[Rollout | None], first: int = 0, key: str = "gone/0") -> list[Stored]:
    """As on one partition; None is a tombstone."""
    return [
        Stored(
            topic=topics.ROLLOUTS,
            partition=0,
            offset=offset,
            timestamp=1_700_000_000_000 + offset,
            key=key if record is None else record.key,
            value=None if record is None else CODEC.encode(topics.ROLLOUTS, record),
            headers=(),
        )
        for offset, record in enumerate(records, first)
    ]


def taken(
    view: TrajectoryView, records: Iterable[Rollout | None], state: ViewState | None = None, first: int = 0
) -> ViewState:
    """The view after more records, as a refresh makes it."""
    state = state or ViewState(format=FORMAT, topic_id="t", next={}, files=(), forgotten=())
    fold = ViewFold(view, Refreshed(), state.forgotten)
    fold.take(stored(records, first), CODEC)
    files = [kept for name in state.files if (kept := view.without(name, fold.gone)) is not None] + fold.files()
    forgotten = tuple(sorted({*state.forgotten, *fold.gone}))
    new = state.model_copy(update={"files": tuple(files), "forgotten": forgotten})
    view.replace(new)
    return new


@pytest.fixture
def view(tmp_path: Path) -> TrajectoryView:
    return TrajectoryView(tmp_path)


def ids(view: TrajectoryView, **filters: object) -> set[str]:
    return {str(row["rollout_id"]) for row in listed(view, Filters(**filters)).dicts()}  # type: ignore[arg-type]


def test_an_empty_view_has_the_columns(view: TrajectoryView) -> None:
    answer = listed(view, Filters())
    assert answer.columns == tuple(COLUMNS) and answer.rows == []
    assert query(view, "SELECT count(*) FROM rollouts").rows == [(0,)]


def test_rollouts_become_rows_with_their_types(view: TrajectoryView) -> None:
    made = rollouts(2)
    unknown = rollout("u", reward=None, teacher=[-1.0, -2.0, -3.0], version=7)
    taken(view, [*made, unknown])
    assert ids(view) == {each.rollout_id for each in [*made, unknown]}
    (row,) = listed(view, Filters(rollout_id="u/0")).dicts()
    assert (row["reward"], row["version"], row["has_opd"], row["trained_tokens"]) == (None, 7, True, 3)
    assert row["time"] == datetime.fromtimestamp(1_700_000_000 + 0.008).replace(tzinfo=None) or row["time"].year == 2023
    assert row["session_id"] is None and row["digest"] == unknown.digest
    assert all(len(COLUMNS) == len(row_of(each, 0, 0, 0)) for each in made)


def test_rollouts_are_filtered_by_each_field(view: TrajectoryView) -> None:
    asked = rollout("d", reward=None)
    said = {"session_id": "s", "environment": "math", "run_id": "r"}
    taken(
        view,
        [
            rollout("a", reward=-0.5, version=1),
            rollout("b", reward=0.5, version=2),
            rollout("c", policy="other"),
            rollout("d", reward=None, head=asked.head.model_copy(update=said)),
        ],
    )
    assert ids(view, least=0.0) == {"b/0", "c/0"}
    assert ids(view, most=0.0) == {"a/0"}
    assert ids(view, policy="tiny", version=2) == {"b/0"}
    assert ids(view, environment="math") == ids(view, session="s") == ids(view, run="r") == {"d/0"}
    assert ids(view, environment="chat") == {"a/0", "b/0", "c/0"} and ids(view, session="none") == set()
    second = datetime.fromtimestamp(1_700_000_000, UTC).replace(tzinfo=None) + timedelta(milliseconds=1)
    assert ids(view, since=second) == {"b/0", "c/0", "d/0"} and ids(view, until=second) == {"a/0"}
    assert len(listed(view, Filters(), limit=2).rows) == 2


def test_a_key_counts_once_and_where_it_was_first(view: TrajectoryView) -> None:
    first = rollout("a")
    state = taken(view, [first, first])
    taken(view, [rollout("a", reward=0.1)], state, first=2)
    (row,) = listed(view, Filters()).dicts()
    assert row["digest"] == first.digest


def test_who_is_forgotten_is_in_no_file_any_more(view: TrajectoryView) -> None:
    leaver, stays = rollout("leaver"), rollout("stays")
    state = taken(view, [leaver, stays])
    before = {path.name: path.read_bytes() for path in view.folder.glob("*.parquet")}
    assert any(b"leaver" in data for data in before.values())
    state = taken(view, [redacted_rollout(leaver)], state)
    assert ids(view) == {"stays/0"}
    assert not any(b"leaver" in path.read_bytes() for path in view.folder.glob("*.parquet"))
    # The content is on the log again, from an archive that was older: it stays out.
    state = taken(view, [leaver], state)
    assert ids(view) == {"stays/0"}
    taken(view, [None], state.model_copy(update={"forgotten": ()}))
    assert ids(view) == {"stays/0"}


def test_forgotten_in_the_same_reading(view: TrajectoryView) -> None:
    gone = rollout("gone")
    taken(view, [gone, redacted_rollout(gone), gone, rollout("other"), None])
    assert ids(view) == {"other/0"}


def test_killed_at_any_point_the_view_is_the_one_before(view: TrajectoryView) -> None:
    state = taken(view, [rollout("a")])
    fold = ViewFold(view, Refreshed())
    fold.take(stored([rollout("b")]), CODEC)
    fold.files()  # its file is written; the process dies here
    assert len(list(view.folder.glob("*.parquet"))) == 2
    assert ids(view) == {"a/0"}
    view.tidy()
    assert [path.name for path in view.folder.glob("*.parquet")] == list(state.files)


def test_a_damaged_or_older_view_is_none(view: TrajectoryView) -> None:
    taken(view, [rollout("a")])
    assert view.state() is not None
    next(view.folder.glob("*.parquet")).unlink()
    assert view.state() is None
    (view.folder / "view.json").write_text("{")
    assert view.state() is None


def test_many_files_become_one(view: TrajectoryView) -> None:
    state = taken(view, [rollout("b")], taken(view, [rollout("a")]))
    assert len(state.files) == 2
    view.replace(state.model_copy(update={"files": (view.merged(state.files),)}))
    assert ids(view) == {"a/0", "b/0"}


def test_when_a_view_is_begun_anew() -> None:
    state = ViewState(format=FORMAT, topic_id="t", next={0: 5}, files=(), forgotten=())
    assert _stale(state, "t", {0: 5, 1: 0}) == ""
    assert "created again" in _stale(state, "other", {0: 5})
    assert "ends before" in _stale(state, "t", {0: 4})
    assert _stale(None, "t", {}) == "there was no view"


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT rewrd FROM rollouts", '"rewrd" not found in FROM clause! Candidate bindings: "reward"'),
        ("SELECT nothing_such", "nothing_such"),
        ("SELECT *\nFRO rollouts", 'near "rollouts"'),
    ],
)
def test_sql_that_makes_no_sense_says_why_in_one_line(view: TrajectoryView, sql: str, said: str) -> None:
    with pytest.raises(BadQuery) as caught:
        query(view, sql)
    (line,) = str(caught.value).splitlines()
    assert said in line and "LINE " not in line and line.endswith("`DESCRIBE rollouts` lists the columns")


def test_the_page_lists_the_columns() -> None:
    page = (ROOT / "docs" / "reference" / "rollouts.md").read_text()
    rows = [f"| `{name}` | {column.type.lower()} | {column.doc} |" for name, column in COLUMNS.items()]
    assert page.endswith("\n".join(["| column | type | what |", "|---|---|---|", *rows, ""]))
