"""The messages when a disk is full."""

from pathlib import Path

from tentalis.local.disk import MIB, Space, space


def test_a_shortage_is_told_with_what_is_free() -> None:
    found = Space(Path("/data"), free=12 * MIB, total=3 * 2**30, inodes=5)
    assert found.shortage(10 * MIB) is None
    assert found.shortage(20 * MIB) == "no space left on /data (free 12.0 MiB of 3.0 GiB)"
    assert Space(Path("/data"), free=2**40, total=2**41, inodes=None).shortage(2**30) is None
    assert "no inode is free" in str(Space(Path("/data"), free=2**40, total=2**41, inodes=0).shortage(1))


def test_it_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    assert space(tmp_path / "a" / "b").total == space(tmp_path).total > 0
