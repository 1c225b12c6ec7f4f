"""Drives a headless Chromium by its DevTools protocol; ended by process id.

    with chromium(folder) as browser:
        page = browser.open(path, width=390, dark=True)
        page.click("button.differs")
        assert page.problems() == []

Where no browser is found, `CHROMIUM` is None, and a test that needs one says that it was not run.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell")
CHROMIUM = next((found for found in map(shutil.which, NAMES) if found), None)
WAIT_S = 60.0


@dataclass(kw_only=True)
class Page:
    """One tab at one size."""

    socket: ClientConnection
    session: str
    numbers: Iterator[int]
    events: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, method: str, **parameters: Any) -> Any:
        """Send one command and wait for its answer; events that come meanwhile are kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters, "sessionId": self.session}
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv(timeout=WAIT_S))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def wait_for(self, method: str) -> None:
        """Wait for an event."""
        deadline = time.monotonic() + WAIT_S
        while not any(event.get("method") == method for event in self.events):
            assert time.monotonic() < deadline, f"no event {method}"
            self.events.append(json.loads(self.socket.recv(timeout=WAIT_S)))

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first element."""
        x, y = self.evaluate(
            f"(() => {{ const e = document.querySelector({selector!r});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key on what has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def problems(self) -> list[str]:
        """What the console has shown of errors, warnings and exceptions."""
        self.evaluate("1")  # what was said before has arrived by then
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event) for event in self.events if event.get("method") in bad]

    def screenshot(self, path: Path, *, height: int) -> None:
        """Write the page's top as a PNG."""
        metrics = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": metrics["width"], "height": height, "scale": 1}
        taken = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@dataclass(kw_only=True)
class Browser:
    """A running browser."""

    socket: ClientConnection
    numbers: Iterator[int]

    def open(self, path: Path, *, width: int, dark: bool = False, height: int = 900) -> Page:
        """Open a file in a tab of this size and wait until it is loaded."""
        root = Page(socket=self.socket, session="", numbers=self.numbers)
        target = self._ask_browser(root, "Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask_browser(root, "Target.attachToTarget", targetId=target, flatten=True)
        page = Page(socket=self.socket, session=attached["sessionId"], numbers=self.numbers)
        for domain in ("Page", "Runtime", "Log"):
            page.ask(f"{domain}.enable")
        page.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 700,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", features=[scheme])
        page.events.clear()
        page.ask("Page.navigate", url=path.resolve().as_uri())
        page.wait_for("Page.loadEventFired")
        return page

    @staticmethod
    def _ask_browser(root: Page, method: str, **parameters: Any) -> Any:
        number = next(root.numbers)
        root.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(root.socket.recv(timeout=WAIT_S))
            if answer.get("id") == number:
                return answer["result"]


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own in `folder`, and end its process group."""
    assert CHROMIUM is not None
    log = folder / "chromium.log"
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    profile = ("--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [CHROMIUM, *options, *profile, "--no-first-run", "about:blank"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        with connect(_address(log, process), max_size=None) as socket:
            yield Browser(socket=socket, numbers=iter(range(1, 10**9)))
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"DevTools listening on (ws://\S+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"Chromium did not start: {log.read_text(errors='replace')[-2000:]}")
