"""`make pictures`: pictures of the real console for the README, from a yard that runs under replayed load.

Starts everything on free ports and a temporary data folder, lets it work until somebody waits, forces a node there and
back so that there is a switch to see, waits for the planner to have measured, and writes docs/pictures/*.png.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from tools import browser
from tools.smoke import PARTITION, ROOT, Operator, SmokeFailed, running_yard

FOLDER = ROOT / "docs" / "pictures"
LOAD_S = 20.0
DECISION_TIMEOUT_S = 320.0
QUEUE_TIMEOUT_S = 30.0
SWITCH_TIMEOUT_S = 90.0
MAX_BYTES = 250_000
NODE = f"{PARTITION}-1"
# Page and height: as much of each as a reader takes in at once.
PAGES = {
    "overview": ("", 1180), "queues": ("queues/", 1000), "split": ("split/", 1120), "nodes": ("nodes/", 1160),
    "requests": ("requests/", 900), "branches": ("branches/", 1000), "reuse": ("reuse/", 1160), "model": ("model/", 860),
    "whatif": ("what-if/", 1120),
    "tenants": ("tenants/", 640), "alerts": ("alerts/", 1000), "audit": ("audit/", 900), "settings": ("settings/", 1000),
}  # fmt: skip
WIDTH = 1360
# Two short runs; a worker makes them while the yard works.
EXPERIMENT = "adaptation-cost"
EXPERIMENT_TIMEOUT_S = 300.0


def say(text: str) -> None:
    print(f"[pictures] {text}", flush=True)


def switch_there_and_back(operator: Operator) -> None:
    """One node changes its phase and, once that is over, changes it back."""
    was = next(n for n in operator.call("GET", f"/split/{PARTITION}")["current"]["nodes"] if n["name"] == NODE)
    other = {"prefill": "decode", "decode": "prefill"}[was["desired_phase"]]
    for phase, why in ((other, "long answers pile up"), (was["desired_phase"], "back to many prompts")):
        operator.call("PUT", f"/nodes/{NODE}/phase", {"phase": phase, "reason": why, "expires_in_s": 600})
        deadline = time.monotonic() + SWITCH_TIMEOUT_S
        while any(
            order["state"] != "cooling" for order in operator.call("GET", f"/split/{PARTITION}")["active_orders"]
        ):
            if time.monotonic() > deadline:
                raise SmokeFailed(f"{NODE} did not become {phase}")
            time.sleep(1)
        say(f"{NODE} is {phase}")
        time.sleep(12)
    operator.call("DELETE", f"/split/{PARTITION}/force?reason=shown")


def wait_for_decision(operator: Operator) -> None:
    """Until the planner has decided on enough slices to say what each split would gain."""
    deadline = time.monotonic() + DECISION_TIMEOUT_S
    while (operator.call("GET", f"/split/{PARTITION}")["last_decision"] or {}).get("gain") is None:
        if time.monotonic() > deadline:
            raise SmokeFailed("the planner has not measured any gain")
        time.sleep(2)


def wait_for_a_queue(operator: Operator) -> None:
    """Until somebody waits, though not for long: a yard without a queue is worth a picture too."""
    deadline = time.monotonic() + QUEUE_TIMEOUT_S
    while time.monotonic() < deadline:
        if operator.call("GET", f"/partitions/{PARTITION}/live")["requests"]["waiting"] > 3:
            return
        time.sleep(0.5)


def ask_for_a_channel(operator: Operator) -> None:
    """So that Settings shows one; nobody listens there."""
    body = {
        "name": "pager",
        "url": "http://127.0.0.1:9/hook",
        "kinds": ["alert", "switch"],
        "reason": "for the picture",
    }
    operator.call("POST", "/channels", body)


def wait_for_the_experiment(operator: Operator) -> None:
    """Until the worker has made it, though not for ever: one under way is worth a picture too."""
    deadline = time.monotonic() + EXPERIMENT_TIMEOUT_S
    while time.monotonic() < deadline:
        if operator.call("GET", f"/experiments/{EXPERIMENT}")["job"]["state"] == "done":
            return
        time.sleep(2)
    say(f"{EXPERIMENT} is still under way")


def take(page: Page, console: str, name: str) -> None:
    path, height = PAGES[name]
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.goto(f"{console}/p/{PARTITION}/{path}")
    page.wait_for_selector("body[data-feed=live]")
    if name == "overview":
        page.wait_for_selector("[data-chart=split] .main-svg")
    page.wait_for_timeout(1500)
    target = FOLDER / f"{name}.png"
    page.screenshot(path=target)
    size = target.stat().st_size
    if size > MAX_BYTES:
        raise SmokeFailed(f"{target.name} has {size} bytes, more than {MAX_BYTES}")
    say(f"{target.name}: {size // 1000} kB")


def take_request(page: Page, console: str) -> None:
    """The life of the newest request that ended."""
    page.goto(f"{console}/p/{PARTITION}/requests/?outcome=completed")
    page.click("section[aria-labelledby=h-ended] tbody th a >> nth=0")
    page.wait_for_selector(".life-parts")
    page.set_viewport_size({"width": WIDTH, "height": 860})
    page.screenshot(path=FOLDER / "request.png")
    say("request.png")


def photograph(where: dict[str, Any], password: str) -> None:
    console = where["console"].rstrip("/")
    path = browser.find()
    if path is None:
        raise SmokeFailed("no Chromium: run `python -m tools.browser`")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(path), args=list(browser.FLAGS))
        page = chromium.new_context(color_scheme="light").new_page()
        page.goto(f"{console}/login/")
        page.fill("#id_username", "admin")
        page.fill("#id_password", password)
        page.click("button[type=submit]")
        # Watched from now on, so that the overview's charts have a past to show.
        page.goto(f"{console}/p/{PARTITION}/")
        say(f"the yard works for {LOAD_S:.0f} s")
        page.wait_for_timeout(LOAD_S * 1000)
        operator = Operator(console, password)
        operator.call("POST", f"/experiments/{EXPERIMENT}/start", {"reason": "for the picture"})
        ask_for_a_channel(operator)
        wait_for_a_queue(operator)
        take(page, console, "queues")
        page.goto(f"{console}/p/{PARTITION}/")
        switch_there_and_back(operator)
        wait_for_decision(operator)
        wait_for_the_experiment(operator)
        for name in (name for name in PAGES if name != "queues"):
            take(page, console, name)
        take_request(page, console)
        chromium.close()


def main() -> int:
    password = secrets.token_urlsafe(12)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="switchyard-pictures-") as name,
            running_yard(Path(name), password) as where,
        ):
            photograph(where, password)
    except SmokeFailed as error:
        say(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
