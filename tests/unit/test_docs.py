"""The pages name files that exist, their links resolve, and the architecture page answers a newcomer's questions."""

import re
from pathlib import Path

import pytest

from tentalis.opd.hinters import JUDGE_PROMPT
from tentalis.opd.hints import RULE_HINTER
from tentalis.opd.lesson import LESSON_PROMPT
from tests.support import ROOT
from tests.support.commands import LEAVES, options

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "config").rglob("*.md")),
]
FOLDERS = "schemas|streams|trainer|tentalis|tests|config|deploy|docs|extensions|examples|helm"
# A path ends before a placeholder (`docs/NAME.md`, `streams/apps/<app>`): its folder must exist.
PATH = re.compile(rf"(?<![\w/.:*@-])(?:{FOLDERS})/[a-z_][\w./-]*[\w/]")
PLACEHOLDER = re.compile(r"[^/]*\b(?:N|[A-Z]{3,})\b.*$")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:`|^\$ |^)tentalis ([a-z][^`\n#|]*)", re.MULTILINE)
OPTION = re.compile(r"(?<![^\s\[])--[a-z][a-z-]*")
QUESTIONS = [
    "Where does a late reward go?",
    "Where is the group advantage computed?",
    "What decides that an adapter is promoted?",
    "How do I add a scorer?",
    "How do I add a worker?",
    "How do I add a topic?",
    "How do I add a command?",
    "Where does exit code 5 come from?",
    "How do I run one application under a debugger?",
    "What does one rollout's way look like?",
]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub derives them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if ROOT / "config" not in page.parents], ids=page_id)
def test_every_named_file_exists(page: Path) -> None:
    found = {PLACEHOLDER.sub("", path) for path in PATH.findall(page.read_text(encoding="utf-8"))}
    assert [path for path in sorted(found) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_resolves(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(link)
    assert broken == []


def unknown_options(text: str) -> list[str]:
    """Returns the shown command lines that have an option which their command does not have."""
    wrong = []
    for line in COMMAND.findall(re.sub(r"\\\n\s*", " ", text)):
        own, *_ = line.split(" -- ")  # behind it: options of another program
        words = own.split()
        leaf = next((name for size in (3, 2, 1) if (name := " ".join(words[:size])) in LEAVES), None)
        known = {"--help", "--profile", *(options(LEAVES[leaf]) if leaf else ())}
        if leaf and set(OPTION.findall(own)) - known:
            wrong.append(" ".join(words))
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_option_of_a_shown_command_exists(page: Path) -> None:
    assert unknown_options(page.read_text(encoding="utf-8")) == []


def test_a_removed_option_is_found_in_a_page() -> None:
    assert unknown_options("`tentalis topics apply --on-risk stop`\n$ tentalis up \\\n  --getaway") == ["up --getaway"]


def test_the_index_lists_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    apart = ("decisions", "results", "runbooks")  # runbooks: operations/helm.md
    pages = [page for page in PAGES if page.is_relative_to(index.parent) and page.parent.name not in apart]
    assert {page for page in pages if page.parent.parent.name != "results"} - listed == {index}


def other_versions(text: str) -> set[str]:
    """Returns the names with versions of hinters in a text that are not those of the code."""
    current = {RULE_HINTER, f"judge/{JUDGE_PROMPT}", f"experience/{LESSON_PROMPT}"}
    kinds = "|".join(name.partition("/")[0] for name in current)
    return set(re.findall(rf"(?<![\w/])(?:{kinds})/\d+", text)) - current


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name not in ("decisions", "results")], ids=page_id
)
def test_the_versions_of_hinters_are_those_of_the_code(page: Path) -> None:
    assert other_versions(page.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_architecture_page_answers(question: str) -> None:
    page = ROOT / "docs" / "architecture.md"
    answer = re.search(rf"^- \*\*{re.escape(question)}\*\* (.+?)(?=^- |\Z)", page.read_text("utf-8"), re.M | re.S)
    assert answer is not None
    assert PATH.search(answer[1]) or LINK.search(answer[1])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90
