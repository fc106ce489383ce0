/* What every page needs besides its live feed: colours, menus, times, forms that say what became of them. */
"use strict";

(() => {
  const root = document.documentElement;

  // Colours: the choice is a cookie, so that the server renders the right ones at once.
  for (const button of document.querySelectorAll("[data-theme-choice]")) {
    button.addEventListener("click", () => {
      const choice = button.dataset.themeChoice;
      root.dataset.theme = choice;
      document.cookie = `theme=${choice}; path=/; max-age=31536000; SameSite=Lax`;
      for (const other of document.querySelectorAll("[data-theme-choice]")) other.setAttribute("aria-pressed", String(other === button));
      document.dispatchEvent(new CustomEvent("switchyard:theme"));
    });
  }

  // Menus close on Escape and on a click elsewhere.
  const openMenus = () => document.querySelectorAll("details.menu[open]");
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    for (const menu of openMenus()) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });
  document.addEventListener("click", (event) => {
    for (const menu of openMenus()) if (!menu.contains(event.target)) menu.open = false;
  });

  // Times of day in the reader's zone, and ages that grow.
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  const longClock = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  function ago(seconds) {
    const ahead = seconds < 0;
    const span = Math.abs(seconds);
    let said;
    if (span < 2) return "now";
    if (span < 60) said = `${Math.floor(span)} s`;
    else if (span < 3600) said = `${Math.floor(span / 60)} min ${Math.floor(span % 60)} s`;
    else if (span < 86400) said = `${Math.floor(span / 3600)} h ${Math.floor((span % 3600) / 60)} min`;
    else said = `${Math.floor(span / 86400)} d ${Math.floor((span % 86400) / 3600)} h`;
    return ahead ? `in ${said}` : `${said} ago`;
  }
  function tellTimes() {
    for (const element of document.querySelectorAll("[data-unix]")) {
      const at = element.dataset.unix;
      if (at && element.dataset.told !== at) {
        element.dataset.told = at;
        const date = new Date(Number(at) * 1000);
        element.textContent = (element.dataset.long === undefined ? clock : longClock).format(date);
        element.title = date.toLocaleString();
      }
    }
    for (const element of document.querySelectorAll("[data-ago]")) {
      const said = ago(Date.now() / 1000 - Number(element.dataset.ago));
      if (element.textContent !== said) element.textContent = said;
    }
  }
  tellTimes();
  setInterval(tellTimes, 1000);
  document.addEventListener("switchyard:view", tellTimes);
  document.addEventListener("htmx:afterSwap", tellTimes);

  // A saved edit says when the gateway runs it: its version is compared with the live one.
  document.addEventListener("switchyard:view", (event) => {
    const view = event.detail;
    for (const element of document.querySelectorAll("[data-applies-version]")) {
      if (view.config_error) {
        element.textContent = `The gateway refused it: ${view.config_error}`;
        element.dataset.tone = "bad";
      } else if (Number(view.config_version) >= Number(element.dataset.appliesVersion)) {
        const took = Math.max(0, view.received / 1000 - view.age_s - Number(element.dataset.savedAt));
        element.textContent = `The gateway runs it since ${took < 1 ? "less than 1 s" : `${took.toFixed(1)} s`} after the save.`;
        element.dataset.tone = "fine";
        element.removeAttribute("data-applies-version");
      }
    }
  });

  // Parts of a page that an event or time makes old ask the server again, unless someone is filling in a form in there.
  document.addEventListener("switchyard:event", (event) => {
    for (const element of document.querySelectorAll("[data-refresh-on]")) {
      if (element.dataset.refreshOn.split(" ").includes(event.detail.kind) && window.htmx) window.htmx.trigger(element, "refresh");
    }
  });
  const CHANGED = "switchyard:changed";
  document.addEventListener("htmx:beforeRequest", (event) => {
    const element = event.detail.elt;
    if (!element.matches(".region, .timeline-bar") || event.detail.requestConfig.triggeringEvent?.type === CHANGED) return;
    const region = element.closest(".region");
    const busy = region.querySelector("form.inset, details[open], .htmx-request") || region.contains(document.activeElement);
    if (busy || document.hidden || document.body.dataset.feed === "paused") event.preventDefault();
  });

  // Nor does an answer that was under way wipe a form that was opened meanwhile, or that has been asked for.
  document.addEventListener("htmx:beforeSwap", (event) => {
    const element = event.detail.requestConfig?.elt;
    if (!element?.matches?.(".region, .timeline-bar") || event.detail.requestConfig.triggeringEvent?.type === CHANGED) return;
    if (element.closest(".region").querySelector("form.inset, .htmx-request")) event.detail.shouldSwap = false;
  });

  // A request that failed says so where the reader looks.
  document.addEventListener("htmx:responseError", (event) => {
    const status = event.detail.xhr.status;
    if (status === 422 || status === 409) return;
    say(status === 403 ? "Your account may not do that; nothing was changed." : `That did not work (${status}). Reload the page and try again.`);
  });
  document.addEventListener("htmx:sendError", () => say("The console cannot be reached. Nothing was changed."));
  function say(message) {
    const banner = document.createElement("p");
    banner.className = "notice";
    banner.dataset.tone = "bad";
    banner.setAttribute("role", "alert");
    banner.textContent = message;
    const main = document.getElementById("main");
    main.insertBefore(banner, main.children[1] || null);
    setTimeout(() => banner.remove(), 12000);
  }

  // What an action did stays for a while.
  let saidUntil = 0;
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id !== "said") return;
    clearTimeout(saidUntil);
    saidUntil = setTimeout(() => event.detail.target.replaceChildren(), 12000);
  });

  // A filter that is not set stays out of the URL.
  document.addEventListener("htmx:configRequest", (event) => {
    if (!event.detail.elt.matches?.("form.filters")) return;
    for (const name of [...event.detail.formData.keys()]) if (!event.detail.formData.get(name)) event.detail.formData.delete(name);
  });

  // The timeline by keyboard: its buttons say which key does what.
  document.addEventListener("keydown", (event) => {
    const timeline = event.target.closest?.("#timeline");
    if (!timeline || event.ctrlKey || event.metaKey || event.altKey) return;
    const key = event.key === "=" ? "+" : event.key;
    const button = timeline.querySelector(`[data-timeline-key="${CSS.escape(key)}"]`);
    if (!button) return;
    event.preventDefault();
    button.click();
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    if (event.detail.target.id === "timeline" && event.detail.requestConfig.elt?.matches("a")) event.detail.target.focus({ preventScroll: true });
  });

  // Copying the page's link, or a text that is shown once.
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy], [data-copy-text]");
    if (!button) return;
    const text = button.dataset.copyText ? document.querySelector(button.dataset.copyText).textContent : location.href;
    const was = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select and copy it";
    }
    setTimeout(() => (button.textContent = was), 2500);
  });

  // How many alerts nobody has taken on, in the rail.
  document.addEventListener("switchyard:event", (event) => {
    const badge = document.getElementById("alert-count");
    if (event.detail.kind !== "alert" || !badge) return;
    const shown = badge.lastChild;
    const change = event.detail.alerts.reduce((sum, alert) => sum + (alert.state === "firing" ? 1 : -1), 0);
    const next = Math.max(0, Number(shown.textContent) + change);
    shown.textContent = String(next);
    badge.hidden = next === 0;
  });

  // Cancel buttons of forms that were opened in place, and focus on what was opened.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-close]");
    if (!button) return;
    const place = document.querySelector(button.dataset.close);
    if (place) place.replaceChildren();
    const opener = document.querySelector(`[hx-target="${button.dataset.close}"]`);
    if (opener) opener.focus();
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    const first = event.detail.target.querySelector("[aria-invalid=true], [data-focus]");
    if (first) first.focus();
  });
})();
