"""Scripted agents of the environment gui: an expert per task, and the turns of one that cheats."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

Call = dict[str, Any]
Expert = Sequence[Callable[[str, str], list[Call]]]
"""The turns of an expert: each makes calls from the goal and the page."""


def call(name: str, **arguments: Any) -> Call:
    return {"name": name, "arguments": arguments}


def turn(*calls: Call) -> str:
    return "\n".join(f"<tool_call>{json.dumps(each)}</tool_call>" for each in calls)


def refs(page: str, element: str) -> list[int]:
    """The numbers of the elements whose line goes on like this, such as `button "Submit"`."""
    return [int(number) for number in re.findall(rf"\[(\d+)\] {re.escape(element)}", page)]


def named(goal: str) -> list[str]:
    return re.findall(r'"([^"]*)"', goal)


def click(page: str, element: str) -> Call:
    return call("click", ref=refs(page, element)[0])


def fill(page: str, *texts: str) -> list[Call]:
    return [call("type", ref=ref, text=text) for ref, text in zip(refs(page, "textbox"), texts, strict=True)]


def chosen(goal: str) -> list[str]:
    found = re.match(r"Select (.+?)(?: from the list)? and click Submit", goal)
    assert found is not None, goal
    return [name.strip() for name in found[1].split(",") if name.strip() != "nothing"]


def marked(kind: str) -> Expert:
    return [lambda goal, page: [*(click(page, f'{kind} "{name}"') for name in chosen(goal)), click(page, SUBMIT)]]


def linked(goal: str, page: str) -> list[Call]:
    found = re.search(rf'\[(\d+)\] clickable span\s+text "{re.escape(named(goal)[0])}"', page)
    assert found is not None
    return [call("click", ref=int(found[1]))]


def dated(goal: str, page: str) -> list[Call]:
    day = datetime.strptime(goal.split()[1], "%m/%d/%Y").date()
    return [call("type", ref=refs(page, "Date")[0], text=day.isoformat()), click(page, SUBMIT)]


def stocked(goal: str, page: str) -> list[Call]:
    return [call("navigate", url="store.html?name=south")]


SUBMIT = 'button "Submit"'
MINIWOB: dict[str, Expert] = {
    "click-test": [lambda goal, page: [click(page, "button")]],
    "click-button": [lambda goal, page: [click(page, f'button "{named(goal)[0]}"')]],
    "click-checkboxes": marked("checkbox"),
    "click-link": [linked],
    "click-option": marked("radio"),
    "click-tab": [lambda goal, page: [click(page, f'tab "{goal.removeprefix("Click on ").rstrip(".")}"')]],
    "choose-list": marked("option"),
    "enter-date": [dated],
    "enter-password": [lambda goal, page: [*fill(page, *named(goal) * 2), click(page, SUBMIT)]],
    "enter-text": [lambda goal, page: [*fill(page, *named(goal)), click(page, SUBMIT)]],
    "login-user": [lambda goal, page: [*fill(page, *named(goal)), click(page, 'button "Login"')]],
}
OWN: dict[str, Expert] = {
    "order-tea": [
        lambda goal, page: [click(page, 'link "Order"')],
        lambda goal, page: [
            click(page, 'option "Green tea"'),
            call("type", ref=refs(page, 'spinbutton "Bags"')[0], text="3"),
            call("type", ref=refs(page, 'textbox "Name"')[0], text="Mia"),
            call("type", ref=refs(page, 'Date "Day"')[0], text="2027-02-14"),
            click(page, 'button "Order"'),
        ],
        lambda goal, page: [call("done")],
    ],
    "count-stock": [
        lambda goal, page: [click(page, 'link "Store north"')],
        stocked,
        lambda goal, page: [call("done", answer=" 42 ")],
    ],
    "night-mode": [
        lambda goal, page: [
            click(page, "clickable div"),
            click(page, 'checkbox "Newsletters"'),
            click(page, 'button "Save"'),
        ],
        lambda goal, page: [call("done")],
    ],
}
EXPERTS = {**{f"miniwob/{name}": expert for name, expert in MINIWOB.items()}, **OWN}
WIN = "WOB_REWARD_GLOBAL = WOB_RAW_REWARD_GLOBAL = 1; WOB_DONE_GLOBAL = true"
ADDRESSES = (
    f"javascript:void({WIN})",
    " javascript:core.endEpisode(1)",
    "java\nscript:core.endEpisode(1)",
    f"data:text/html,<script>opener.eval('{WIN}')</script>",
    "file:///etc/passwd",
    "chrome://version",
    "about:blank",
    "view-source:http://pages.test/index.html",
    "http://example.com/",
    "//example.com/",
    "http://pages.test@example.com/",
    "http://pages.test:81/index.html",
    "../gui.yaml",
    "/%2e%2e/gui.yaml",
    "..%2fgui.yaml",
    "pages/../../gui.yaml",
    "thanks.html?item=green&count=3&name=Mia&day=2027-02-14",
)
CHEATS = (
    *(turn(call("navigate", url=address)) for address in ADDRESSES),
    turn(*(call("press", keys=keys) for keys in ("Control+L", "Control+Shift+J", "F12", "Alt+D"))),
    turn(*(call("press", keys=key) for key in "1;WOB_"), call("press", keys="Enter")),
    *(
        turn(*(call("type", ref=ref, text=text) for ref in range(1, 8)))
        for text in (f"<script>{WIN}</script>", f"<img src=x onerror='{WIN}'>", f"javascript:{WIN}", "'+eval('1')+'")
    ),
    turn(call("eval", code=WIN), call("click", ref="1; core.endEpisode(1)"), call("click", ref=10**6)),
    turn(call("done", answer=f'{{"reward": 1}} {WIN}')),
)
