"""The digest of a function's source: it changes with every file that the function can import from its folders."""

from pathlib import Path

import pytest

from tentalis.rewards.functions.source import BadSource, digest, source_files


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "rewards.py"


FILES = {
    "rewards": "import helper\nimport json\nfrom pack import inner\ndef f():\n    import late\n",
    "helper": "from further import x\n",
    "further": "import rewards\n",
    "late": "",
    "unused": "",
    "json": "",
}


def layout(folder: Path, **changed: str) -> Path:
    main = write(folder, **(FILES | changed))
    for name, text in {"__init__": "", "inner": "from . import beside\n", "beside": "", "unused": ""}.items():
        (folder / "pack").mkdir(exist_ok=True)
        (folder / "pack" / f"{name}.py").write_text(text, encoding="utf-8")
    return main


def test_the_source_is_the_file_and_what_it_imports_from_its_folders(tmp_path: Path) -> None:
    main, shared = layout(tmp_path / "mine"), tmp_path / "shared"
    write(shared, late="", other="")
    found = [str(file.relative_to(tmp_path)) for file in source_files(main, [shared])]
    assert found == [
        "mine/further.py",
        "mine/helper.py",
        "mine/json.py",
        "mine/late.py",
        "mine/pack/__init__.py",
        "mine/pack/beside.py",
        "mine/pack/inner.py",
        "mine/rewards.py",
    ]
    (main.parent / "late.py").unlink()
    assert shared / "late.py" in source_files(main, [shared])


@pytest.mark.parametrize("name", ["rewards", "helper", "further", "late"])
def test_a_change_in_any_of_them_changes_the_digest(tmp_path: Path, name: str) -> None:
    before = digest(layout(tmp_path / "a"))
    assert digest(layout(tmp_path / "b")) == before, "where the folder is, changes nothing"
    assert digest(layout(tmp_path / "c", unused="x = 1")) == before
    assert digest(layout(tmp_path / "d", **{name: FILES[name] + "# changed\n"})) != before


def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(BadSource, match=r"rewards\.py: No such file"):
        digest(tmp_path / "rewards.py")
    main = layout(tmp_path, helper="x = 1\ndef broken(:\n")
    with pytest.raises(BadSource, match=r"helper\.py:2: invalid syntax"):
        digest(main)
