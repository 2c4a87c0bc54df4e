"""Just enough of the DevTools protocol to look at a page in a headless Chromium, over its pipe."""

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
)


def find_chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@dataclass
class Tab:
    """One page, with everything that it asked the network for or complained about."""

    browser: "Browser"
    session: str
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self, **parameters)

    def open(self, path: Path, width: int, dark: bool = False, script: bool = True) -> Self:
        self.send("Emulation.setScriptExecutionDisabled", value=not script)
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.absolute().as_uri())
        self.browser.wait("Page.loadEventFired", self)
        return self

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true; the page draws its figures after it has loaded."""
        end = time.monotonic() + 60
        while not self.evaluate(expression):
            assert time.monotonic() < end, expression
            time.sleep(0.05)

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else "")
        pressed = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0), "text": text}
        self.send("Input.dispatchKeyEvent", type="keyDown", **pressed)
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def mouse(self, kind: str, x: float, y: float) -> None:
        down = {"button": "left", "buttons": 1, "clickCount": 1} if kind != "Moved" else {}
        self.send("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **down)

    def note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.complaints.append(json.dumps(parameters))


class Browser:
    def __init__(self, read: int, write: int) -> None:
        self.reader, self.writer = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self.numbers = itertools.count(1)

    def send(self, method: str, tab: Tab | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if tab is not None:
            message["sessionId"] = tab.session
        self.writer.write(json.dumps(message).encode() + b"\0")
        self.writer.flush()
        for answer in self.messages(tab):
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
        raise EOFError("the browser is gone")

    def wait(self, event: str, tab: Tab) -> None:
        next(message for message in self.messages(tab) if message.get("method") == event)

    def messages(self, tab: Tab | None) -> Iterator[dict[str, Any]]:
        text = bytearray()
        while byte := self.reader.read(1):
            if byte != b"\0":
                text += byte
                continue
            message = json.loads(text)
            text.clear()
            if tab is not None and message.get("sessionId") == tab.session and "method" in message:
                tab.note(message["method"], message["params"])
            yield message

    def tab(self) -> Tab:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        return Tab(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])


@contextmanager
def chromium(program: str, profile: Path) -> Iterator[Browser]:
    """A browser that ends with the block. Chromium reads commands from descriptor 3 and answers on 4."""
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    shell = f'exec "$@" 3<&{commands} 4>&{answers}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(commands, answers),
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    browser = Browser(from_browser, to_browser)
    try:
        yield browser
        browser.send("Browser.close")
    finally:
        browser.writer.close()
        browser.reader.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
