/* The keyboard: Ctrl-K opens the palette, g and a letter goes to a page, p pauses, / filters. */
"use strict";

(() => {
  const dialog = document.getElementById("palette");
  if (!dialog) return;
  const input = document.getElementById("palette-text");
  const list = document.getElementById("palette-list");
  const SHOWN = 12;
  let known = null;
  let found = [];
  let at = 0;

  async function open() {
    if (dialog.open) return;
    dialog.showModal();
    input.value = "";
    if (!known) {
      const answer = await fetch(dialog.dataset.from, { headers: { Accept: "application/json" } });
      known = answer.ok ? await answer.json() : { entries: [], find: null };
    }
    show();
  }

  function show() {
    const text = input.value.trim().toLowerCase();
    found = known.entries.filter((entry) => `${entry.label} ${entry.kind}`.toLowerCase().includes(text));
    found.sort((a, b) => Number(b.label.toLowerCase().startsWith(text)) - Number(a.label.toLowerCase().startsWith(text)));
    found = found.slice(0, SHOWN);
    if (text && known.find) found.push({ label: `Requests with “${input.value.trim()}”`, kind: "find", url: known.find + encodeURIComponent(input.value.trim()) });
    at = 0;
    list.replaceChildren(...found.map((entry, index) => option(entry, index)));
    mark();
  }

  function option(entry, index) {
    const item = document.createElement("li");
    item.id = `palette-${index}`;
    item.setAttribute("role", "option");
    const label = document.createElement("span");
    label.textContent = entry.label;
    const kind = document.createElement("small");
    kind.textContent = entry.keys || entry.kind;
    item.append(label, kind);
    item.addEventListener("click", () => go(index));
    return item;
  }

  function mark() {
    [...list.children].forEach((item, index) => item.setAttribute("aria-selected", String(index === at)));
    if (found.length) input.setAttribute("aria-activedescendant", `palette-${at}`);
    else input.removeAttribute("aria-activedescendant");
    list.children[at]?.scrollIntoView({ block: "nearest" });
  }

  function go(index) {
    if (found[index]) location.href = found[index].url;
  }

  input.addEventListener("input", () => known && show());
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && found.length) {
      at = (at + step + found.length) % found.length;
      mark();
      event.preventDefault();
    } else if (event.key === "Enter") {
      go(at);
      event.preventDefault();
    }
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.getElementById("palette-open").addEventListener("click", open);

  let leader = 0;
  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      open();
      return;
    }
    const typing = event.target.closest("input, textarea, select, [contenteditable]") || dialog.open;
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (Date.now() - leader < 1200) {
      leader = 0;
      const link = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
      if (link) {
        event.preventDefault();
        location.href = link.href;
      }
    } else if (event.key === "g") leader = Date.now();
    else if (event.key === "p") document.getElementById("feed-pause").click();
    else if (event.key === "/") {
      const filter = document.querySelector("[data-filter]");
      if (filter) {
        event.preventDefault();
        filter.focus();
      }
    }
  });
})();
