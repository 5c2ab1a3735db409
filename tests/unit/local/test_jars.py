"""The pinned closure: every archive is the pinned one, or the caller is told which is not and what to do."""

import hashlib
import multiprocessing
from pathlib import Path

import pytest

from tentalis.local.jars import Jar, JarError, fetch_jars, pinned_jars


def jar(name: str, content: bytes | None = None) -> Jar:
    return Jar("org.example", name, "1.0", hashlib.sha256(content or name.encode()).hexdigest())


def from_name(jar: Jar, place: Path) -> Path:
    place.mkdir(parents=True)
    path = place / jar.filename
    path.write_bytes(jar.artifact.encode())
    return path


def no_network(jar: Jar, place: Path) -> Path:
    raise ConnectionError("name resolution failed")


def test_the_pinned_closure_has_the_broker_and_a_digest_for_every_archive() -> None:
    jars = pinned_jars()
    assert len({jar.filename for jar in jars}) == len(jars) == 46
    assert all(set(jar.sha256) <= set("0123456789abcdef") for jar in jars)
    assert "org.apache.kafka:kafka_2.13:4.1.0" in {jar.coordinates for jar in jars}


def test_a_damaged_manifest_names_the_line(tmp_path: Path) -> None:
    manifest = tmp_path / "jars.txt"
    manifest.write_text("a:b:1 " + "0" * 64 + "\nno checksum here\n")
    with pytest.raises(JarError, match=r"jars\.txt:2"):
        pinned_jars(manifest)


def test_a_complete_set_needs_no_network_and_progress_ends_full(tmp_path: Path) -> None:
    jars, seen = [jar("a"), jar("b"), jar("c")], []
    paths = fetch_jars(tmp_path, lambda *step: seen.append(step[:2]), jars=jars, fetch=from_name)
    assert [path.read_bytes() for path in paths] == [b"a", b"b", b"c"]
    assert seen == [(1, 3), (2, 3), (3, 3), (3, 3)]
    assert fetch_jars(tmp_path, jars=jars, fetch=no_network) == paths
    assert {path.name for path in paths[0].parent.iterdir()} == {*(path.name for path in paths), ".complete.json"}


def test_without_marker_only_what_differs_is_fetched_again(tmp_path: Path) -> None:
    jars, again = [jar("a"), jar("b"), jar("c")], []
    paths = fetch_jars(tmp_path, jars=jars, fetch=from_name)
    (paths[0].parent / ".complete.json").unlink()
    paths[0].write_bytes(b"z")
    paths[1].unlink()

    def counting(wanted: Jar, place: Path) -> Path:
        again.append(wanted.artifact)
        return from_name(wanted, place)

    fetch_jars(tmp_path, jars=jars, fetch=counting)
    assert sorted(again) == ["a", "b"]
    assert [path.read_bytes() for path in paths] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("change", ["truncated", "gone", "another closure"])
def test_the_marker_file_does_not_hide_missing_truncated_or_changed_archives(tmp_path: Path, change: str) -> None:
    jars = [jar("a"), jar("b")]
    paths = fetch_jars(tmp_path, jars=jars, fetch=from_name)
    if change == "truncated":
        paths[0].write_bytes(b"")
    elif change == "gone":
        paths[0].unlink()
    else:
        jars = [jar("a", b"other content"), jar("b")]
    with pytest.raises(JarError):
        fetch_jars(tmp_path, jars=jars, fetch=no_network)


def test_a_missing_network_says_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JarError) as error:
        fetch_jars(tmp_path, jars=[jar("a"), jar("b")], fetch=no_network)
    for part in ("org.example:", "name resolution failed", str(tmp_path), "TENTALIS_CACHE", "TENTALIS_BOOTSTRAP"):
        assert part in str(error.value)


def test_a_passing_fault_of_the_network_is_overcome(tmp_path: Path) -> None:
    tries = []

    def flaky(wanted: Jar, place: Path) -> Path:
        tries.append(place)
        if len(tries) == 1:
            raise ConnectionError("reset")
        return from_name(wanted, place)

    assert fetch_jars(tmp_path, jars=[jar("a")], fetch=flaky)[0].read_bytes() == b"a"
    assert len(tries) == 2


def test_a_wrong_checksum_names_the_archive_and_stores_nothing(tmp_path: Path) -> None:
    wanted = jar("a", b"what it should be")
    with pytest.raises(JarError) as error:
        fetch_jars(tmp_path, jars=[wanted], fetch=from_name)
    for part in ("org.example:a:1.0", wanted.sha256, hashlib.sha256(b"a").hexdigest()):
        assert part in str(error.value)
    assert not list(tmp_path.rglob("*.jar"))


def test_a_cache_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JarError, match="TENTALIS_CACHE"):
        fetch_jars(tmp_path / "file", jars=[jar("a")], fetch=from_name)


def _fill(cache: Path) -> None:
    fetch_jars(cache, jars=[jar(f"jar{number}") for number in range(20)], fetch=from_name)


def test_processes_that_fill_one_cache_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_fill, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    jars = [jar(f"jar{number}") for number in range(20)]
    assert [path.read_bytes().decode() for path in fetch_jars(tmp_path, jars=jars, fetch=no_network)] == [
        jar.artifact for jar in jars
    ]
