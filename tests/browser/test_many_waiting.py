"""The Queues page while 2,000 requests of 200 flows wait: it opens, narrows, edits, cancels, and goes on by itself."""

import re

import pytest

from apps.flowcontrol.models import Band
from apps.telemetry.models import OperatorAction
from apps.topology.configuration import latest
from apps.topology.models import Partition
from apps.topology.services import update_partition
from controlplane.actors import SYSTEM
from tests.browser.conftest import aside
from tests.browser.crowd import FLOWS, WAITING, Crowd

LONGEST_TASK_MS = 200
WINDOWS, WINDOW_MS = 3, 2500
WATCH = """
window.longTasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((e) => longTasks.push(e.duration)))
    .observe({ type: "longtask", buffered: true });
"""


def until(page, script):
    """Playwright's own waiting evaluates text in the page, which the page's security policy refuses."""
    for _ in range(100):
        if page.evaluate(script):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"it never became so: {script}")


def all_are(selector, test):
    return f"[...document.querySelectorAll('{selector}')].every((e) => e.textContent.{test})"


@pytest.fixture
def crowd(partition, server):
    def prepare():
        crowd = Crowd(latest(partition).document)
        update_partition(Partition.objects.get(), SYSTEM, "where the crowd is", gateway_url=crowd.url)
        return crowd

    crowd = aside(prepare)
    server.source = crowd.snapshot
    yield crowd
    server.source = None
    crowd.close()


@pytest.fixture
def page(open_page, crowd):
    """The page, watched for tasks that keep it from answering."""
    page = open_page("operator")
    page.context.add_init_script(WATCH)
    page.goto("/p/gb300/queues/")
    page.wait_for_selector("body[data-feed=live]")
    return page


def test_it_shows_them_bounded_and_stays_quick_while_they_change(page, crowd):
    told = page.inner_text("section[aria-labelledby=h-bands] .head-note")
    assert WAITING - 20 <= int(re.search(r"([\d,]+) waiting", told)[1].replace(",", "")) <= WAITING + 20
    assert page.locator("#waiting-list tbody tr").count() == 50
    assert page.locator("#flow-list tbody tr").count() == 40
    assert f"{FLOWS} flows" in page.inner_text("#flow-list") or f"{2 * FLOWS}" in page.inner_text("#flow-list")
    assert page.evaluate("document.querySelectorAll('*').length") < 4000
    before = page.inner_text("tbody[data-id=premium] td[data-label=dispatched]")
    page.evaluate("setTimeout(() => { const t = performance.now(); while (performance.now() - t < 300); })")
    until(page, f"Math.max(0, ...longTasks) > {LONGEST_TASK_MS}")  # such a task would be seen
    worst = []
    for _ in range(WINDOWS):  # the machine may be busy with something else: the quietest of them counts
        page.evaluate("longTasks.length = 0")
        page.wait_for_timeout(WINDOW_MS)
        worst.append(page.evaluate("Math.max(0, ...longTasks)"))
    assert min(worst) <= LONGEST_TASK_MS, worst
    assert page.inner_text("tbody[data-id=premium] td[data-label=dispatched]") != before


def test_it_is_narrowed_to_one_flow_and_the_address_says_so(page, crowd):
    page.fill("#f-flow", "flow-7")
    page.wait_for_url("**flow=flow-7**")
    until(page, all_are("#waiting-list td[data-label=flow]", "trim() === 'flow-7'"))
    assert page.locator("#waiting-list tbody tr").count() >= 9
    page.fill("#find", "flow-19")
    until(page, all_are("#flow-list tbody th", "includes('flow-19')"))
    page.select_option("#f-band", "premium")
    page.wait_for_url("**band=premium**")
    until(page, all_are("#waiting-list td > span.quiet", "trim() === 'premium'"))


def test_a_priority_is_edited_and_the_next_dispatches_follow_it(page, crowd):
    page.click("[aria-label='Edit band standard']")
    page.fill("#id_band-standard-priority", "200")
    page.click("text=Save band standard")
    page.wait_for_selector("text=/The gateway runs it since/")
    page.wait_for_selector("tbody[data-id=standard]:first-of-type")
    assert Band.objects.get(name="standard").priority == 200
    snapshot = crowd.snapshot()
    sent = {band["name"]: band["dispatched_total"] for band in snapshot["bands"]}
    page.wait_for_timeout(1500)
    later = {band["name"]: band["dispatched_total"] for band in crowd.snapshot()["bands"]}
    assert later["standard"] > sent["standard"] and later["premium"] == sent["premium"]


def test_one_of_them_is_cancelled_with_a_reason(page, crowd):
    page.click("#feed-pause")  # the list holds still under the pointer
    line = page.locator("#waiting-list tbody tr").nth(10)
    request_id = line.locator("th a").get_attribute("title")
    line.locator("button").click()
    page.fill("#id_cancel-reason", "it runs away")
    page.click("text=Cancel this request")
    page.wait_for_selector(f"#said:has-text('{request_id} is cancelled')")
    assert crowd.cancelled == [request_id]
    assert OperatorAction.objects.get().reason == "it runs away"
    page.click("#feed-pause")
    page.fill("#f-q", request_id)
    page.wait_for_selector("#waiting-list:has-text('Nobody that fits these filters')")
