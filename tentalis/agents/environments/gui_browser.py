"""One browser with one page, for one episode: a headless Chromium behind the wall, and what it is asked to do.

The browser reaches no network: the wall denies it, its proxy does not exist, and each request of the page is answered
here from the task's files (`gui_pages`). Further windows are refused and dialogs accepted; both are reported.
"""

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tentalis.agents.environments.gui_chromium import ChromiumFiles
from tentalis.agents.environments.gui_devtools import DevTools, DevToolsError, PageCrashed
from tentalis.agents.environments.gui_pages import LocalPages
from tentalis.agents.environments.gui_tree import quoted
from tentalis.agents.environments.protocol import EnvironmentFault
from tentalis.agents.sandbox import Limits, RunningCommand, SandboxFault, Wall

START_S = 60.0
"""Seconds in which the browser must have started and shown the first page."""
SETTLE_S = 0.1
"""Seconds after an action before the page is looked at; a page that loads is waited for."""
WIDTH, HEIGHT = 800, 600
"""Size of the page in pixels."""
MOST_NOTES = 8
"""Reports of windows and dialogs that are kept between two looks at the page."""
_WORLD = "tentalis"
# The program of the package is a browser without a window. Its own sandbox needs rights that a worker does not have.
_OPTIONS = (
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--in-process-gpu",  # a process of its own looks into /proc, which the wall does not show
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--block-new-web-contents",
    "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--no-first-run",
    "--mute-audio",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--lang=en-US",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--remote-debugging-pipe",
    "about:blank",
)
# The browser reads its commands from descriptor 3 and answers on 4; a wall gives the three standard ones.
_BEGIN = 'exec "$@" 3<&0 4>&1 0</dev/null 1>&2'


class GuiBrowser:
    """A running browser. `start` first, then `open`; `close` at the end."""

    def __init__(self, pages: LocalPages) -> None:
        self.pages = pages
        self.main_frame = ""
        self.crashed = False
        """True if the page crashed: it answers nothing any more."""
        self.documents = 0
        """Number of documents that the page has shown."""
        self.url = "about:blank"
        self._command: RunningCommand | None = None
        self._devtools: DevTools | None = None
        self._session = ""
        self._loading = False
        self._loaded = asyncio.Event()
        self._notes: list[str] = []

    async def start(self, wall: Wall, chromium: ChromiumFiles, folder: Path, limits: Limits) -> None:
        """Starts the browser with its profile in `folder`. Raises EnvironmentFault."""
        variables = {**chromium.variables, "TZ": "UTC", "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
        command = [
            *("/usr/bin/env", *(f"{name}={value}" for name, value in variables.items())),
            *("/bin/sh", "-c", _BEGIN, "browser", str(chromium.program)),
            *(f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},{HEIGHT}", *_OPTIONS),
        ]

        def started() -> None:
            self._command = wall.start(command, folder, limits, readable=(chromium.folder,))

        try:
            await _in_lasting_thread(started)
            assert self._command is not None
            self._devtools = DevTools(self._command)
            self._devtools.begin(self._event)
            async with asyncio.timeout(START_S):
                await self._attach()
        except TimeoutError as error:
            raise EnvironmentFault(f"the browser has not started within {START_S:g} s") from error
        except (SandboxFault, OSError, DevToolsError, PageCrashed) as error:
            raise EnvironmentFault(f"the browser could not be started: {error}") from error

    async def _attach(self) -> None:
        attached = await self._browser("Target.attachToTarget", targetId=await self._page_target(), flatten=True)
        self._session = attached["sessionId"]
        await self._browser("Browser.setDownloadBehavior", behavior="deny")
        for method in ("Page.enable", "DOM.enable", "Accessibility.enable", "Inspector.enable"):
            await self.call(method)
        await self.call("Page.setInterceptFileChooserDialog", enabled=True)
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Fetch.enable", patterns=[{"urlPattern": "*"}])
        self.main_frame = (await self.call("Page.getFrameTree"))["frameTree"]["frame"]["id"]

    async def _page_target(self) -> str:
        """Returns the first page of the browser. One that answers may not have made it yet, and is asked again."""
        while True:
            for each in (await self._browser("Target.getTargets"))["targetInfos"]:
                if each["type"] == "page":
                    return str(each["targetId"])
            await asyncio.sleep(SETTLE_S)

    async def open(self, url: str) -> None:
        """Shows a page and waits until it is loaded. Raises BrowserGone, DevToolsError, PageCrashed or TimeoutError."""
        done = await self.call("Page.navigate", url=url)
        if "errorText" in done:
            raise DevToolsError(f"{url} cannot be shown: {done['errorText']}")
        await self.settle()

    async def settle(self) -> None:
        """Waits until the page has reacted to an action: a moment, and the end of its loading."""
        await asyncio.sleep(SETTLE_S)
        while self._loading:
            self._loaded.clear()
            await self._loaded.wait()

    async def call(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a command to the page; see DevTools.call."""
        assert self._devtools is not None, "call before start"
        if self.crashed:
            raise PageCrashed("the page crashed")
        return await self._devtools.call(method, parameters, self._session)

    async def alive(self) -> None:
        """Returns if the browser answers, whatever its page does. Raises BrowserGone."""
        await self._browser("Browser.getVersion")

    async def evaluate(self, expression: str, *, isolated: bool = True) -> Any:
        """Returns the value of an expression on the page.

        Args:
            isolated: in a world of its own, which shares the document with the page and none of its variables and
                functions, so that no script of the page can change what the expression means.

        Raises:
            DevToolsError: it raises an exception or cannot be evaluated, beside what `call` raises.
        """
        where = {"contextId": await self.world()} if isolated else {}
        found = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, **where
        )
        return _value(found)

    async def on_node(self, node: int, function: str, *arguments: object) -> Any:
        """Returns what a function returns that is called on a node as `this`, in the isolated world. Raises as
        `evaluate`."""
        resolved = await self.call("DOM.resolveNode", backendNodeId=node, executionContextId=await self.world())
        found = await self.call(
            "Runtime.callFunctionOn",
            functionDeclaration=function,
            objectId=resolved["object"]["objectId"],
            arguments=[{"value": value} for value in arguments],
            returnByValue=True,
        )
        return _value(found)

    async def world(self) -> int:
        """Returns the context of the isolated world of the document that is shown."""
        made = await self.call("Page.createIsolatedWorld", frameId=self.main_frame, worldName=_WORLD)
        context: int = made["executionContextId"]
        return context

    async def screenshot(self) -> bytes:
        """Returns a picture of the page as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    def notes(self) -> Sequence[str]:
        """Returns the reports of windows and dialogs since the last call, for the policy."""
        found, self._notes = self._notes, []
        return found

    async def close(self) -> None:
        """Kills the browser."""
        if self._devtools is not None:
            await self._devtools.close()
        elif self._command is not None:
            await asyncio.to_thread(self._command.close)

    async def _browser(self, method: str, **parameters: Any) -> dict[str, Any]:
        assert self._devtools is not None, "call before start"
        return await self._devtools.call(method, parameters)

    def _event(self, method: str, parameters: Mapping[str, Any], session: str | None) -> Any:
        """Takes an event of the browser; returns what is to be done, None for nothing."""
        if session != self._session or not session:
            return None
        if method == "Fetch.requestPaused":
            return self._answer(parameters)
        if method == "Page.javascriptDialogOpening":
            self._note(f"[the page showed a dialog, which was accepted: {quoted(parameters['message'])}]")
            return self._accept()
        if method == "Page.windowOpen":
            self._note("[the page wanted to open another window, which was refused: there is one page]")
        elif method == "Inspector.targetCrashed":
            self.crashed = True
            assert self._devtools is not None
            self._devtools.crashed(session)
            self._loading = False
            self._loaded.set()
        elif method == "Page.frameNavigated" and "parentId" not in parameters["frame"]:
            self.documents += 1
            self.url = parameters["frame"]["url"]
        elif method == "Page.navigatedWithinDocument" and parameters["frameId"] == self.main_frame:
            self.url = parameters["url"]
        elif parameters.get("frameId") == self.main_frame and method == "Page.frameStartedLoading":
            self._loading = True
        elif parameters.get("frameId") == self.main_frame and method == "Page.frameStoppedLoading":
            self._loading = False
            self._loaded.set()
        return None

    def _note(self, text: str) -> None:
        if len(self._notes) < MOST_NOTES:
            self._notes.append(text)

    async def _accept(self) -> None:
        await self._expired("Page.handleJavaScriptDialog", accept=True, session=self._session)

    async def _answer(self, paused: Mapping[str, Any]) -> None:
        """Answers a request of the page, from the files of the task or with a refusal."""
        document = paused["resourceType"] == "Document"
        number = paused["requestId"]
        if str(paused["request"]["url"]).startswith(("data:", "blob:")):
            await self._expired("Fetch.continueRequest", requestId=number, session=self._session)
            return
        found = await asyncio.to_thread(self.pages.answer, paused["request"], document=document)
        if found is None and document:
            self._note("[the page wanted to show an address that is not a page of the task; it stayed]")
            stay = {"requestId": number, "responseCode": 204}  # a browser that gets no content shows what it had
            await self._expired("Fetch.fulfillRequest", **stay, session=self._session)
            return
        if found is None:
            refused = {"requestId": number, "errorReason": "BlockedByClient"}
            await self._expired("Fetch.failRequest", **refused, session=self._session)
            return
        headers = [{"name": name, "value": value} for name, value in found.headers.items()]
        body = base64.b64encode(found.body).decode()
        answer = {"requestId": number, "responseCode": found.status, "responseHeaders": headers, "body": body}
        await self._expired("Fetch.fulfillRequest", **answer, session=self._session)

    async def _expired(self, method: str, *, session: str | None = None, **parameters: Any) -> None:
        """Sends the answer to an event. The browser refuses it if the request, the dialog or the window is gone, which
        is what the answer is for."""
        assert self._devtools is not None
        try:
            await self._devtools.call(method, parameters, session)
        except DevToolsError:
            await self.alive()


async def _in_lasting_thread(work: Callable[[], None]) -> None:
    """Runs work in a thread of the event loop's pool, to its end also if the caller is cancelled. A command behind the
    wall ends with the thread that started it, so it must be one that lives on."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _value(found: Mapping[str, Any]) -> Any:
    if "exceptionDetails" in found:
        details = found["exceptionDetails"]
        said = details.get("exception", {}).get("description") or details.get("text", "an exception")
        raise DevToolsError(str(said))
    return found["result"].get("value")
