"""The reward of an episode of the environment gui: the conditions of a task, or what a page of MiniWoB says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tentalis.agents.environments.gui_browser import GuiBrowser
from tentalis.agents.environments.gui_pages import ReceivedForm, shown_page
from tentalis.agents.environments.gui_task import GuiCheck
from tentalis.agents.environments.protocol import EnvironmentFault

EPISODE_MS = 100_000_000
"""Milliseconds after which a page of MiniWoB ends its episode by itself: longer than any episode here."""
# The page's own random numbers follow the seed. The line with its rewards is no part of the task.
_BEGIN = """(() => {
  core.EPISODE_MAX_TIME = %d;
  Math.seedrandom(%s);
  core.startEpisodeReal();
  const line = document.getElementById('reward-display');
  if (line) line.remove();
  return core.getUtterance();
})()"""
_STATE = "({done: WOB_DONE_GLOBAL, raw: WOB_RAW_REWARD_GLOBAL})"


@dataclass(frozen=True, slots=True)
class MiniwobState:
    """The state of a page of MiniWoB. `raw`: its reward in [-1, 1], without the part for speed; 0 until it is done."""

    done: bool
    raw: float


async def begin_miniwob(browser: GuiBrowser, seed: int) -> str:
    """Begins the episode of a page of MiniWoB with a seed, and returns its goal. Raises EnvironmentFault."""
    said = await browser.evaluate(_BEGIN % (EPISODE_MS, seed), isolated=False)
    goal = said.get("utterance") if isinstance(said, dict) else said
    if not isinstance(goal, str) or not goal.strip():
        raise EnvironmentFault(f"the page of MiniWoB gave no goal, but {goal!r}")
    return goal.strip()


async def miniwob_state(browser: GuiBrowser) -> MiniwobState:
    """Returns the state of a page of MiniWoB."""
    found: Mapping[str, Any] = await browser.evaluate(_STATE, isolated=False)
    done, raw = found["done"] is True, found["raw"]
    number = float(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else 0.0
    return MiniwobState(done, max(-1.0, min(1.0, number)) if done else 0.0)


async def check_parts(
    browser: GuiBrowser, check: GuiCheck, forms: Sequence[ReceivedForm], answer: str | None
) -> dict[str, float]:
    """Returns the conditions of a task by name, 1 for those that hold.

    Raises:
        DevToolsError: the expression raises an exception on this page, beside what `GuiBrowser.evaluate` raises.
    """
    found: dict[str, bool] = {}
    if check.page is not None:
        found["page"] = shown_page(browser.url) == check.page.lstrip("/")
    if check.form is not None:
        wanted = check.form
        found["form"] = any(
            (form.page, form.method) == (wanted.page.lstrip("/"), wanted.method)
            and wanted.fields.items() <= form.fields.items()
            for form in forms
        )
    if check.most_forms is not None:
        found["most_forms"] = len(forms) <= check.most_forms
    if check.answer is not None:
        found["answer"] = answer is not None and _plain(answer) == _plain(check.answer)
    if check.expression is not None:
        found["expression"] = await browser.evaluate(check.expression) is True
    return {name: float(holds) for name, holds in found.items()}


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
