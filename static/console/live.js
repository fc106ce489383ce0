/* Keeps a page up to date from its partition's websocket.

   The server presents each snapshot (apps/console/present.py); this file only puts texts and attributes where the
   templates marked them: data-live (text), data-bind (attributes, CSS variables), data-each (one child an item).
   A slow page never falls behind: only the newest snapshot is applied, once a frame. */
"use strict";

(() => {
  const body = document.body;
  const partition = body.dataset.partition;
  if (!partition) return;
  const STALE_AFTER_S = Number(body.dataset.staleAfter);
  const BACKOFF_MS = [500, 1000, 2000, 4000, 8000, 15000];
  const FINAL = { 4401: "Signed out", 4403: "Not allowed", 4404: "No such partition" };

  const word = document.getElementById("feed-word");
  const ageText = document.getElementById("feed-age");
  const banner = document.getElementById("feed-banner");
  const pause = document.getElementById("feed-pause");

  let socket = null;
  let attempts = 0;
  let pending = null;
  let frame = 0;
  let paused = false;
  let ended = "";
  let shownAt = null; // when the shown snapshot was made, on this browser's clock
  let retryAt = 0;

  const lookup = (source, path) => path.split(".").reduce((value, part) => (value == null ? undefined : value[part]), source);
  const text = (value) => (value == null ? "" : String(value));

  function write(element, item) {
    if (element.dataset.live !== undefined) {
      const value = lookup(item, element.dataset.live);
      const next = value === undefined ? "–" : text(value);
      if (element.textContent !== next) element.textContent = next;
    }
    if (element.dataset.bind !== undefined) {
      for (const pair of element.dataset.bind.split(" ")) {
        const [name, path] = pair.split("=");
        const next = text(lookup(item, path));
        if (name.startsWith("--")) {
          if (element.style.getPropertyValue(name) !== next) element.style.setProperty(name, next);
        } else if (element.getAttribute(name) !== next) element.setAttribute(name, next);
      }
    }
  }

  function fill(element, item) {
    write(element, item);
    if (element.dataset.each !== undefined) {
      fillEach(element, lookup(item, element.dataset.each) || []);
      return;
    }
    for (const child of element.children) if (child.tagName !== "TEMPLATE") fill(child, item);
  }

  function fillEach(parent, items) {
    const known = new Map();
    for (const child of parent.children) if (child.dataset.id !== undefined) known.set(child.dataset.id, child);
    const template = parent.querySelector(":scope > template");
    let place = parent.firstElementChild;
    for (const item of items) {
      const id = text(item.id);
      let child = known.get(id);
      if (child) known.delete(id);
      else {
        if (!template) continue;
        child = template.content.firstElementChild.cloneNode(true);
        child.dataset.id = id;
      }
      fill(child, item);
      if (child === place) place = place.nextElementSibling;
      else parent.insertBefore(child, place);
    }
    for (const gone of known.values()) gone.remove();
    const empty = document.querySelector(`[data-empty-for="${parent.dataset.each}"]`);
    if (empty) empty.hidden = items.length > 0;
  }

  function show() {
    frame = 0;
    if (paused || !pending) return;
    const view = pending;
    pending = null;
    if (body.dataset.state === "empty") {
      // The page was rendered without data; ask for it again, though not in a loop should the server see none.
      const last = Number(sessionStorage.getItem("switchyard:reloaded") || 0);
      if (Date.now() - last < 5000) return;
      sessionStorage.setItem("switchyard:reloaded", String(Date.now()));
      location.reload();
      return;
    }
    shownAt = view.received - view.age_s * 1000;
    for (const root of document.querySelectorAll("#main > *")) fill(root, view);
    document.dispatchEvent(new CustomEvent("switchyard:view", { detail: view }));
    tick();
  }

  function schedule() {
    if (!frame && !document.hidden) frame = requestAnimationFrame(show);
  }

  function receive(message) {
    if (message.type === "snapshot") {
      message.view.received = Date.now();
      pending = message.view;
      document.dispatchEvent(new CustomEvent("switchyard:point", { detail: message.view.point }));
      schedule();
    } else if (message.type === "history") {
      document.dispatchEvent(new CustomEvent("switchyard:history", { detail: message.points }));
    } else if (message.type === "event") {
      document.dispatchEvent(new CustomEvent("switchyard:event", { detail: message.data }));
    }
  }

  function connect() {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    socket = new WebSocket(`${scheme}://${location.host}/ws/live/${encodeURIComponent(partition)}/?form=view`);
    socket.onmessage = (event) => {
      attempts = 0;
      receive(JSON.parse(event.data));
    };
    socket.onclose = (event) => {
      socket = null;
      if (FINAL[event.code]) {
        ended = FINAL[event.code];
        tick();
        return;
      }
      const wait = BACKOFF_MS[Math.min(attempts, BACKOFF_MS.length - 1)] * (0.75 + Math.random() / 2);
      attempts += 1;
      retryAt = Date.now() + wait;
      setTimeout(connect, wait);
      tick();
    };
  }

  function ageOf(seconds) {
    if (seconds < 60) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)} s old`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min old`;
    return `${Math.floor(seconds / 3600)} h old`;
  }

  /* The state beside the heading, and the banner when numbers cannot be trusted to be current. */
  function tick() {
    const age = shownAt === null ? null : Math.max(0, (Date.now() - shownAt) / 1000);
    const stale = age !== null && age > STALE_AFTER_S;
    let state = body.dataset.state;
    let label;
    let warning = "";
    if (ended) {
      [state, label] = ["off", ended];
      warning = ended === "Signed out" ? "You are signed out, so these numbers have stopped. Reload the page to sign in again." : `${ended}: these numbers have stopped.`;
    } else if (paused) {
      [state, label] = ["paused", "Paused"];
    } else if (!socket) {
      [state, label] = [shownAt === null ? body.dataset.state : "off", "Reconnecting"];
      const left = Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
      warning = `The connection to the console is lost; trying again${left ? ` in ${left} s` : ""}. What you see is the last state known.`;
    } else if (age === null) {
      [state, label] = [body.dataset.state === "empty" ? "empty" : "waiting", body.dataset.state === "empty" ? "No data" : "Connecting"];
    } else if (stale) {
      [state, label] = ["stale", "Stale"];
      warning = `The gateway has not reported for ${ageOf(age).replace(" old", "")}. What you see is the last state known.`;
    } else {
      [state, label] = ["live", "Live"];
    }
    if (body.dataset.state !== "empty" || state !== "empty") body.dataset.feed = state;
    if (word.textContent !== label) word.textContent = label;
    ageText.textContent = age === null ? "" : ageOf(age);
    banner.hidden = !warning;
    if (banner.textContent !== warning) banner.textContent = warning;
  }

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Resume" : "Pause";
    document.dispatchEvent(new CustomEvent("switchyard:paused", { detail: paused }));
    if (!paused) schedule();
    tick();
  });
  document.addEventListener("visibilitychange", schedule);
  setInterval(tick, 500);
  connect();
})();
