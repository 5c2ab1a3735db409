"""The data of a gateway on disk: API keys, and turns that the broker does not take."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.gateway.http import keys
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.recording.spool import RecordSpool, RecordSpoolFull, SpooledRecord, SpoolTaken

texts = st.text(st.characters(codec="utf-8"), max_size=40)


def test_a_key_is_kept_as_a_hash_and_ends_when_it_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = keys.create(path, [keys.Scope.CHAT], user="ann", label="laptop")
    other = keys.create(path, [keys.Scope.ADMIN])
    assert key not in path.read_text() and key.split("-", 2)[2] not in path.read_text()
    checker = keys.Keys(path)
    assert checker.caller(key, keys.Scope.CHAT).user == "ann"
    assert checker.caller(other, keys.Scope.TASKS).key_id == other.split("-")[1]
    for bad, scope, status in ((None, "chat", 401), ("x", "chat", 401), (key, "tasks", 403)):
        with pytest.raises(APIError) as refused:
            checker.caller(bad, keys.Scope(scope))
        assert refused.value.status == status
    assert keys.revoke(path, key.split("-")[1]) and not keys.revoke(path, key.split("-")[1])
    with pytest.raises(APIError):
        keys.Keys(path).caller(key, keys.Scope.CHAT)
    path.write_text("{}}")
    with pytest.raises(keys.BadKeys):
        keys.Keys(path)


KEYKEEPER = """
import sys
from pathlib import Path
from tentalis.gateway.http import keys
path = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(40):
    kept, gone = (keys.create(path, [keys.Scope.CHAT]).split("-")[1] for _ in range(2))
    assert keys.revoke(path, gone)
    print(kept, gone, flush=True)
"""


def test_processes_that_make_and_revoke_keys_take_nothing_of_each_other_back(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    begin = [sys.executable, "-c", KEYKEEPER, str(path)]
    keepers = [subprocess.Popen(begin, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for keeper in keepers:
        assert keeper.stdout is not None and keeper.stdout.readline() == "ready\n"
    for keeper in keepers:
        assert keeper.stdin is not None
        keeper.stdin.write("go\n")
        keeper.stdin.flush()
    pairs = [line.split() for keeper in keepers for line in keeper.communicate(timeout=240)[0].splitlines()]
    assert [keeper.returncode for keeper in keepers] == [0, 0, 0] and len(pairs) == 120
    found = {key.id: key.revoked is None for key in keys.load(path)}
    assert found == {kept: True for kept, _ in pairs} | {gone: False for _, gone in pairs}


@given(st.binary(max_size=50), texts, st.lists(st.tuples(texts, st.binary(max_size=9)), max_size=3))
def test_a_spooled_record_comes_back_as_it_was(value: bytes, name: str, headers: list[tuple[str, bytes]]) -> None:
    record = SpooledRecord(name, "t", name.encode(), value, tuple(headers), 7)
    data = record.to_bytes()
    assert SpooledRecord.from_bytes(data) == record
    for damaged in (data[:-1] if value else data + b"x", data + b"x", b"", data.replace(b"sha256", b"sha255")):
        with pytest.raises(ValueError):
            SpooledRecord.from_bytes(damaged)


def test_the_spool_keeps_the_first_record_of_an_id_also_when_the_disk_fails_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = RecordSpool(tmp_path)
    spool.put(SpooledRecord("e", "t", b"k", b"first", (), 1))
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "full")))
    spool.put(SpooledRecord("e", "t", b"k", b"second", (), 2))
    assert [record.value for record in spool.records(spool.entries())] == [b"first"]
    spool.close()


def test_the_spool_is_its_owners_alone(tmp_path: Path) -> None:
    with closing(RecordSpool(tmp_path / "gateway" / "gw-1")) as spool:
        assert spool.folder.stat().st_mode & 0o077 == 0, "what people said lies there"


def test_the_spool_knows_whose_records_it_holds(tmp_path: Path) -> None:
    spool = RecordSpool(tmp_path)
    for name, key in (("e1", b"a"), ("e2", b"a"), ("e2", b"a"), ("e3", b"b")):
        spool.put(SpooledRecord(name, "t", key, b"v", (), 1))
    spool.remove("e1")
    spool.remove("e1")
    assert spool.has_key(b"a") and spool.has_key(b"b") and not spool.has_key(b"c")
    spool.remove("e2")
    spool.set_aside("e3", "nobody can read it")
    assert not spool.has_key(b"a") and not spool.has_key(b"b") and (len(spool), spool.set_aside_count) == (0, 1)
    assert len(list(tmp_path.glob("*.damaged"))) == 1
    spool.close()


def test_the_spool_takes_no_more_bytes_than_it_may_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [SpooledRecord(f"e{at}", "t", b"k", b"v" * 100, (), 1) for at in range(4)]
    spool = RecordSpool(tmp_path, max_bytes=3 * len(records[0].to_bytes()))
    spool.put(records[0])
    with monkeypatch.context() as failing, pytest.raises(OSError, match="full"):
        failing.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "full")))
        spool.put(records[1])  # what the disk does not take counts no more
    for record in (records[0], records[1], records[2]):
        spool.put(record)
    with pytest.raises(RecordSpoolFull, match=r"3 turns wait in .* \(spool_bytes\)"):
        spool.put(records[3])
    spool.close()
    again = RecordSpool(tmp_path, max_bytes=3 * len(records[0].to_bytes()))
    with pytest.raises(RecordSpoolFull):
        again.put(records[3])
    again.remove("e1")
    again.put(records[3])
    assert {record.event_id for record in again.records(again.entries())} == {"e0", "e2", "e3"}
    assert len(list(tmp_path.glob("[!.]*"))) == 3, "nothing is left of what was refused"
    again.close()


def test_the_spool_survives_and_sets_damage_aside(tmp_path: Path) -> None:
    spool = RecordSpool(tmp_path)
    records = [SpooledRecord(f"e{at}", "t", b"k", b"v" * at, (), at) for at in range(4)]
    for record in records:
        spool.put(record)
    with pytest.raises(SpoolTaken):
        RecordSpool(tmp_path)
    spool.remove("e0")
    spool.close()
    (tmp_path / "half.tmp").write_bytes(b"never finished")
    again = RecordSpool(tmp_path)
    assert {r.event_id for r in again.records(again.entries())} == {"e1", "e2", "e3"} and not list(
        tmp_path.glob("*.tmp")
    )
    first = next(tmp_path.glob("*.record"))
    first.write_bytes(first.read_bytes()[:-1] + b"?")
    assert len(list(again.records(again.entries()))) == 2 == len(again)
    assert len(list(tmp_path.glob("*.damaged"))) == 1
    again.close()
