"""A priority edited in the browser changes the very next dispatch of a running yard and loses no queued request."""

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, sync_playwright

from tools import browser as chromium
from tools.smoke import Operator, running_yard

CLUSTERS = Path(__file__).with_name("one_narrow_yard.yaml")
PASSWORD = "a long enough password"
LONG_PROMPT_BLOCKS = 2500  # about ten seconds of prefill


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory):
    with running_yard(tmp_path_factory.mktemp("yard"), PASSWORD, "--clusters", str(CLUSTERS)) as where:
        yield where


def _queues_page(page: Page, console: str) -> None:
    page.goto(f"{console}login/")
    page.fill("[name=username]", "admin")
    page.fill("[name=password]", PASSWORD)
    page.press("[name=password]", "Enter")
    page.wait_for_url("**/p/narrow/")
    page.goto(f"{console}p/narrow/queues/")
    page.wait_for_selector("body[data-feed=live]")


def _wait_until(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


@pytest.mark.processes
@pytest.mark.browser
def test_the_next_dispatch_follows_a_priority_edited_in_the_browser(yard) -> None:
    url = f"{yard['gateways']['narrow']}/completions"
    key = json.loads(Path(yard["keys_file"]).read_text())["demo"]
    finished: list[str] = []

    def ask(name: str, objective: str, first_id: int, blocks: int) -> int:
        answer = httpx.post(
            url,
            json={"model": "glm", "prompt": list(range(first_id, first_id + blocks)), "max_tokens": 1},
            headers={"Authorization": f"Bearer {key}", "x-llm-d-inference-objective": objective},
            timeout=60,
            trust_env=False,
        )
        finished.append(name)
        return answer.status_code

    operator = Operator(yard["console"], PASSWORD)

    def waiting() -> int:
        return operator.call("GET", "/partitions/narrow/live")["requests"]["waiting"]

    with sync_playwright() as playwright, ThreadPoolExecutor(5) as clients:
        chrome = playwright.chromium.launch(executable_path=str(chromium.find()), args=list(chromium.FLAGS))
        page = chrome.new_page()
        _queues_page(page, yard["console"])
        page.click("[aria-label='Edit band best-effort']")
        page.fill("#id_band-best-effort-priority", "50")

        answers: list[Future[int]] = [clients.submit(ask, "running", "standard", 1, LONG_PROMPT_BLOCKS)]
        time.sleep(0.3)
        for number, (name, objective) in enumerate(
            [
                ("standard 1", "standard"),
                ("standard 2", "standard"),
                ("best 1", "best-effort"),
                ("best 2", "best-effort"),
            ]
        ):
            answers.append(clients.submit(ask, name, objective, 100_000 * (number + 1), 4))
            time.sleep(0.1)
        _wait_until(lambda: waiting() == 4)

        page.click("text=Save band best-effort")
        page.wait_for_selector("text=Saved")
        page.wait_for_selector("text=/The gateway runs it since/")
        assert finished == [], "the edit came too late to change the order"

        assert [answer.result(60) for answer in answers] == [200] * 5
        chrome.close()
    assert finished == ["running", "best 1", "best 2", "standard 1", "standard 2"]
