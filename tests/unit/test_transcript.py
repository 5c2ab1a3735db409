"""The transcripts of pages: what is a command, what it must print, and that a wrong page is refused."""

from pathlib import Path

import pytest

from tests.support.transcript import PageMismatch, PageShell, ShownCommand, commands_of, transcripts

PAGE = """
Do this:

```console
$ echo one   two
one two
$ NAME=ann
$ echo "hello
> $NAME"
hello ann
```

```console of-another-test
$ echo one \\
  two; exit 7
exit 7
one   two
```

1. Then:

   ```console
   $ cd /
   $ pwd; false
   exit 1
   /
   $ seq 9
   1
   ...
   9
   ```

- And this, by the other test:

  ```console of-another-test
  $ true
  ```
"""


def test_commands_and_their_output_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    found = commands_of(tmp_path / "page.md")
    assert found[:3] == [
        ShownCommand("echo one   two", ("one two",)),
        ShownCommand("NAME=ann"),
        ShownCommand('echo "hello\n$NAME"', ("hello ann",)),
    ]
    assert found[3:] == [
        ShownCommand("cd /"),
        ShownCommand("pwd; false", ("/",), 1),
        ShownCommand("seq 9", ("1", "...", "9")),
    ]
    with PageShell(tmp_path) as shell:
        shell.follow(found)


def test_blocks_with_a_name_are_apart_and_show_parts(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE, encoding="utf-8")
    named = transcripts(tmp_path / "page.md")["of-another-test"]
    first = ShownCommand("echo one two; exit 7", ("one   two",), 7, whole=False)
    assert named == [first, ShownCommand("true", whole=False)]
    named[0].check(7, "before\none two\nafter\n")
    with pytest.raises(PageMismatch, match="does not print 'one   two'"):
        named[0].check(7, "one\n")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a ... c", "a b\nb c", True),
        ("a ... c", "a c", True),
        ("a ...", "a", True),
        ("1.0...9", "1.0259", True),
        ("a", "a b", False),
        ("a.b", "axb", False),
        ("...", "", True),
    ],
)
def test_an_ellipsis_is_any_text_and_the_rest_is_the_whole(shown: str, printed: str, same: bool) -> None:
    if same:
        ShownCommand("", (shown,)).check(0, printed)
    else:
        with pytest.raises(PageMismatch):
            ShownCommand("", (shown,)).check(0, printed)


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ([ShownCommand("false"), ShownCommand("true")], "`false` ended with 1, the page says 0"),
        ([ShownCommand("true", code=1)], "`true` ended with 0, the page says 1"),
        ([ShownCommand("exit 3")], "ended the shell"),
        ([ShownCommand("echo a", ("b",))], "the page shows\nb"),
    ],
)
def test_a_page_that_is_wrong_is_refused(commands: list[ShownCommand], said: str, tmp_path: Path) -> None:
    with PageShell(tmp_path) as shell, pytest.raises(PageMismatch, match=said):
        shell.follow(commands)


def test_a_command_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    with PageShell(tmp_path, limit_s=0.5) as shell, pytest.raises(PageMismatch, match=r"ended the shell after 0\.5 s"):
        shell.run("echo begun; sleep 600")


def test_the_product_is_on_the_path_with_what_the_test_adds(tmp_path: Path) -> None:
    with PageShell(tmp_path, {"TENTALIS_HOME": "x"}, {"version": ["-o", "json"]}) as shell:
        assert shell.run("tentalis version")[1].startswith("{")
        assert shell.run("echo $TENTALIS_HOME $TENTALIS_BOOTSTRAP; pwd")[1].split() == ["x", str(tmp_path / "work")]
