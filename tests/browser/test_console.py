"""What a person does in the console, in a real browser."""

import json

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.utils import timezone

from apps.flowcontrol.models import Band
from apps.flowcontrol.services import update_band
from apps.planning import experiments, services
from apps.planning.models import ForcedSplit, PlannerPolicy, Proposal, SwitchOrder
from apps.telemetry import webhooks
from apps.telemetry.models import Alert, RequestRecord
from apps.tenancy.models import Tenant
from apps.tenancy.services import issue_key
from tests.browser.conftest import PASSWORD, aside
from tests.console.test_experiments_page import VERDICT
from tests.console.test_split_page import decide, finish, propose
from tests.planning.test_experiments import REPORT

PAGES = ("", "queues", "nodes", "requests", "branches", "reuse", "split", "model", "what-if", "tenants", "alerts", "audit",
         "settings", "requests/req-1", "tenants/of/acme", "settings/versions/1", "what-if/experiments/bands")  # fmt: skip


def text(page, selector):
    return page.inner_text(selector)


def test_signing_in_leads_to_what_was_asked_for(browser, server):
    context = browser.new_context(base_url=server.url)
    page = context.new_page()
    page.goto("/p/gb300/queues/")
    assert "/login/" in page.url
    page.fill("#id_username", "viewer-person")
    page.fill("#id_password", "wrong")
    page.click("button[type=submit]")
    assert "do not match" in text(page, "[role=alert]")
    page.fill("#id_password", PASSWORD)
    page.click("button[type=submit]")
    page.wait_for_url("**/p/gb300/queues/")
    page.click("details.user summary")
    page.click("text=Sign out")
    page.wait_for_url("**/login/")
    context.close()


def test_a_change_in_the_yard_arrives_without_a_reload(open_page, server):
    page = open_page("viewer")
    assert text(page, "#verdict") == "Fine"
    server.state["verdict"] = {"level": "degraded", "stage": "prefill", "reason": "four requests wait"}
    page.wait_for_selector("#verdict:has-text('Degraded at prefill')")
    page.wait_for_selector("section.verdict[data-level=degraded]")
    page.wait_for_selector("[data-chart=ttft] .main-svg")


def test_a_paused_page_stands_still_and_then_catches_up(open_page, server):
    page = open_page("viewer")
    page.click("#feed-pause")
    server.state["verdict"] = {"level": "down", "stage": None, "reason": "no node"}
    page.wait_for_timeout(600)
    assert text(page, "#verdict") == "Fine"
    page.click("#feed-pause")
    page.wait_for_selector("#verdict:has-text('Down')")


def test_a_silent_server_is_shown_as_a_lost_connection(open_page, server):
    page = open_page("viewer")
    server.stop()
    page.wait_for_selector("#feed-banner:has-text('connection to the console is lost')")
    page.context.close()


def test_a_priority_is_edited_in_place_and_runs_in_the_gateway(open_page):
    page = open_page("operator", "queues")
    page.click("[aria-label='Edit band standard']")
    page.fill("#id_band-standard-priority", "100")
    page.click("text=Save band standard")
    page.wait_for_selector("#id_band-standard-priority_error:has-text('premium has priority 100')")
    page.fill("#id_band-standard-priority", "120")
    page.click("text=Save band standard")
    page.wait_for_selector("text=Saved")
    page.wait_for_selector("text=/The gateway runs it since/")
    page.wait_for_selector("tbody[data-id=standard]:first-of-type")
    assert Band.objects.get(name="standard").priority == 120
    assert page.locator("tbody[data-id]").first.get_attribute("data-id") == "standard"


def test_a_tenant_is_paused_after_a_question(open_page):
    page = open_page("operator", "queues")
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#tenant-acme button")
    page.wait_for_selector("#tenant-acme:has-text('new requests are refused')")


def test_forcing_a_split_needs_the_typed_confirmation(open_page):
    page = open_page("administrator", "split")
    page.click("text=Force a split")
    page.check("input[value=gb300-3]")
    page.fill("#id_force-reason", "evening peak")
    page.click("text=Force this split")
    page.wait_for_selector("#id_force-confirm_error")
    assert not ForcedSplit.objects.exists()
    assert page.input_value("#id_force-reason") == "evening peak"
    page.fill("#id_force-confirm", "gb300")
    page.click("text=Force this split")
    page.wait_for_selector("#said:has-text('forced to 3P1D')")
    page.wait_for_selector("#plan-headline:has-text('Switching to 3P1D')")
    assert page.locator("#act-slot form").count() == 0
    assert SwitchOrder.objects.get().reason == "evening peak"


def test_an_open_form_survives_what_happens_meanwhile(open_page, partition):
    page = open_page("administrator", "split")
    page.click("button:text-is('Freeze')")
    page.fill("#id_freeze-reason", "half written")
    aside(propose, partition)
    page.wait_for_timeout(700)
    assert page.input_value("#id_freeze-reason") == "half written"
    page.click("#act-slot button[type=submit]")
    page.wait_for_selector("#plan-headline:has-text('Frozen')")
    assert PlannerPolicy.objects.get().mode == "frozen"


def test_a_new_proposal_appears_by_itself_and_is_rejected_with_a_reason(open_page, partition):
    page = open_page("operator", "split")
    aside(propose, partition)
    page.wait_for_selector("#plan-headline:has-text('Proposes 3P1D')")
    page.click("button:text-is('Reject')")
    page.fill("#id_reject-reason", "not tonight")
    page.click("text=Reject it")
    page.wait_for_selector("#said:has-text('is rejected')")
    assert Proposal.objects.get().closed_reason.endswith("not tonight")


def test_a_node_is_forced_from_its_card(open_page):
    page = open_page("administrator", "nodes")
    page.click("li[data-id=gb300-3] button:has-text('Force')")
    page.fill("#id_force-gb300-3-reason", "more prompts")
    page.fill("#id_force-gb300-3-confirm", "gb300-3")
    page.click("button:text-is('Force gb300-3')")
    page.wait_for_selector("#said:has-text('gb300-3 is forced to prefill')")
    assert ForcedSplit.objects.get().phases == {"gb300-3": "prefill"}


def test_the_keyboard_reaches_the_content_and_opens_a_form(open_page):
    page = open_page("operator", "queues")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.focus("[aria-label='Edit band premium']")
    page.keyboard.press("Enter")
    page.wait_for_selector("#id_band-premium-priority")
    page.click("text=Cancel")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Edit band premium"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page, partition, theme):
    decide(partition)
    aside(propose, partition)
    aside(_more_to_see, partition)
    page = open_page("administrator", theme=theme)
    for path in PAGES:
        page.goto(f"/p/gb300/{path}/" if path else "/p/gb300/")
        page.wait_for_selector("body[data-feed=live]")
        if path == "split":
            page.click("text=Force a split")
            page.wait_for_selector("#act-slot form")
        if path == "queues":
            page.click("[aria-label='Edit band premium']")
            page.wait_for_selector("#id_band-premium-priority")
        if path == "tenants/of/acme":
            page.click("text=New key")
            page.wait_for_selector("#tenant-slot form")
        found = [v for v in Axe().run(page).response["violations"] if v["impact"] in ("serious", "critical")]
        said = [(v["id"], [n["html"][:160] + str(n["any"][:1]) for n in v["nodes"][:3]]) for v in found]
        assert said == [], path


def test_axe_finds_nothing_serious_outside_the_shell(browser, server):
    context = browser.new_context(base_url=server.url)
    page = context.new_page()
    for path in ("/login/", "/no/such/page/"):
        page.goto(path)
        found = [v["id"] for v in Axe().run(page).response["violations"] if v["impact"] in ("serious", "critical")]
        assert found == [], path
    context.close()


def test_a_phone_shows_every_page_without_scrolling_sideways(open_page, partition):
    decide(partition)
    aside(services.force_split, partition, 3, services.SYSTEM, "peak")
    aside(_more_to_see, partition)
    page = open_page("administrator", width=390)
    for path in PAGES:
        page.goto(f"/p/gb300/{path}/" if path else "/p/gb300/")
        page.wait_for_selector("body[data-feed=live]")
        wide = page.evaluate(
            "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > 391 && "
            "!e.closest('.scroll, nav')).slice(0, 4).map((e) => e.outerHTML.slice(0, 120))"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, (path, wide)


def _more_to_see(partition):
    """A request with its life, a key and an alert that fires."""
    story = [[100.0, "queued", "prefilling", "to gb300-1"], [100.4, "prefilling", "handing-over", "prefilled"],
             [100.5, "handing-over", "decoding", "first token"]]  # fmt: skip
    term = dict.fromkeys(("remaining_s", "queue_s", "service_s", "fetch_s", "fetch_overflow_s", "duplicate_s"), 0.1)
    terms = [term | {"node": f"gb300-{i}", "total_s": 0.4 + i, "cached_tokens": 10, "fetch_tokens": 0, "mode": "local",
                     "why_not": "wrong-phase" if i > 2 else None} for i in (1, 2, 3)]  # fmt: skip
    RequestRecord.objects.create(
        partition=partition, request_id="req-1", at=timezone.now(), tenant="acme", band="standard", outcome="completed",
        prefill_node="gb300-1", decode_node="gb300-3", prompt_tokens=1000, cached_tokens=900, ttft_s=0.4, e2e_s=2.0,
        detail={"story": story, "router_terms": terms, "arrived_at": 99.0, "t": 102.0, "lost": {"evicted": 64}},
    )  # fmt: skip
    issue_key(Tenant.objects.get(name="acme"), "first", services.SYSTEM)
    experiments.folder().mkdir(exist_ok=True)
    (experiments.folder() / "bands.json").write_text(json.dumps(REPORT | {"verdicts": [VERDICT]}))
    experiments.job("fairness").ask({"asked_by": "robin", "quick": True, "reason": "for the meeting"})
    webhooks.create_channel("pager", "http://127.0.0.1:9/a/rather/long/address/of/a/hook", services.SYSTEM)
    Alert.objects.create(
        partition=partition,
        rule="node-down",
        subject="gb300-4",
        severity="critical",
        summary="gb300-4 does not answer",
        state="firing",
    )


def test_a_request_is_followed_from_the_list_to_its_candidates(open_page, partition):
    aside(_more_to_see, partition)
    page = open_page("viewer", "requests")
    page.click("text=req-1")
    page.wait_for_url("**/requests/req-1/")
    assert "Completed" in text(page, "#h-outcome")
    assert page.locator(".life-parts li").count() >= 3
    assert "chosen" in text(page, "tr[data-taken]")
    assert "Not weighed, wrong phase: gb300-3" in page.content()


def test_an_experiment_is_drawn_and_asked_for_again(open_page, partition):
    aside(_more_to_see, partition)
    experiments.job("fairness").cancel()
    page = open_page("operator", "what-if/experiments/bands")
    page.wait_for_selector("[data-bars] .main-svg")
    assert "1.09x" in text(page, "section[aria-labelledby=h-lines]")
    page.click("text=Run again")
    page.select_option("#id_run-experiment-how", "full")
    page.click("text=Run it in the simulator")
    page.wait_for_selector("#said:has-text('A worker runs')")
    page.wait_for_selector("#experiment-found .job:has-text('until a worker takes it')")
    page.wait_for_selector("[data-bars] .main-svg")
    page.click("#experiment-found button:has-text('Cancel')")
    page.click("text=Cancel the experiment")
    page.wait_for_selector("#experiment-found .badge:has-text('cancelled')")


def test_filters_go_into_the_url_and_come_back_from_it(open_page, partition):
    aside(_more_to_see, partition)
    page = open_page("viewer", "requests")
    page.select_option("#f-outcome", "failed")
    page.wait_for_url("**outcome=failed**")
    page.wait_for_selector("text=No request ended in this time that fits")
    page.goto("/p/gb300/requests/?outcome=completed&tenant=acme")
    assert page.input_value("#f-tenant") == "acme"
    assert page.locator("text=req-1").count() == 1


def test_a_form_that_was_asked_for_comes_though_its_region_is_renewed_meanwhile(open_page, partition):
    """The form's answer is held back until the region's own has come."""
    aside(propose, partition)
    page = open_page("operator", "split")
    page.click("button:text-is('Approve')")
    page.click("#proposal-slot button[type=submit]")
    page.wait_for_selector("#plan-headline:has-text('Switching to 3P1D')")
    aside(finish, SwitchOrder.objects.get())
    page.wait_for_selector("section[aria-labelledby=h-history] button:has-text('Roll back')")
    page.evaluate(
        """() => {
          const send = XMLHttpRequest.prototype.send;
          XMLHttpRequest.prototype.send = function (...given) {
            setTimeout(() => send.apply(this, given), this.__late_ms);
          };
          const open = XMLHttpRequest.prototype.open;
          XMLHttpRequest.prototype.open = function (method, address, ...more) {
            this.__late_ms = address.includes("roll-back") ? 2500 : 1000;
            return open.call(this, method, address, ...more);
          };
        }"""
    )
    page.evaluate("document.activeElement.blur(); window.htmx.trigger('#split-state', 'refresh')")
    page.click("section[aria-labelledby=h-history] button:has-text('Roll back')")
    page.wait_for_selector("td.slot input[name$=reason]", timeout=6000)


def test_a_proposal_is_approved_and_the_switch_rolled_back(open_page, partition):
    aside(propose, partition)
    page = open_page("operator", "split")
    page.click("button:text-is('Approve')")
    page.click("#proposal-slot button[type=submit]")
    page.wait_for_selector("#plan-headline:has-text('Switching to 3P1D')")
    aside(finish, SwitchOrder.objects.get())
    page.click("section[aria-labelledby=h-history] button:has-text('Roll back')")
    page.fill("td.slot input[name$=reason]", "peak is over")
    page.click("td.slot button[type=submit]")
    page.wait_for_selector("#said:has-text('undoes order')")
    assert SwitchOrder.objects.count() == 2


def test_the_palette_goes_anywhere_by_keyboard_alone(open_page):
    page = open_page("viewer")
    page.keyboard.press("Control+k")
    page.wait_for_selector("#palette[open] [role=option]")
    page.keyboard.type("audit")
    page.keyboard.press("Enter")
    page.wait_for_url("**/audit/")
    page.keyboard.press("g")
    page.keyboard.press("a")
    page.wait_for_url("**/alerts/")


def test_the_timeline_is_zoomed_by_keyboard(open_page):
    page = open_page("viewer", "nodes")
    page.focus("#timeline")
    page.keyboard.press("+")
    page.wait_for_selector(".timeline-bar[hx-get*='span=450']", state="attached")
    assert page.evaluate("document.activeElement.id") == "timeline"


def test_a_stale_edit_shows_what_somebody_else_did(open_page, partition):
    page = open_page("operator", "queues")
    page.click("[aria-label='Edit band standard']")
    page.fill("#id_band-standard-priority", "55")
    aside(update_band, Band.objects.get(name="standard"), services.SYSTEM, "night run", max_requests=77)
    page.click("text=Save band standard")
    page.wait_for_selector(".stale-edit:has-text('night run')")
    assert Band.objects.get(name="standard").priority == 0
    page.click("text=Save band standard")
    page.wait_for_selector("strong:text-is('Saved')")
    stored = Band.objects.get(name="standard")
    assert (stored.priority, stored.max_requests) == (55, 77)


def test_a_new_key_is_shown_once(open_page):
    page = open_page("administrator", "tenants/of/acme")
    page.click("text=New key")
    page.fill("#id_key-name", "agents")
    page.click("text=Issue the key")
    page.wait_for_selector("#new-key")
    secret = text(page, "#new-key")
    assert secret.startswith("sy_")
    page.reload()
    assert secret not in page.content() and "agents" in page.content()


def test_colours_follow_the_choice_without_a_reload(open_page):
    page = open_page("viewer")
    page.click("[data-theme-choice=dark]")
    assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"
