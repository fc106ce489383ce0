/* The overview's three charts: the last five minutes, drawn by Plotly once it has arrived. */
"use strict";

(() => {
  const plots = [...document.querySelectorAll("[data-chart]")];
  if (!plots.length) return;
  const KEEP_S = 300;
  const DRAW_EVERY_MS = 1000;
  const KINDS = ["prefill", "decode", "mixed", "draining", "switching", "down"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  let points = [];
  let paused = false;
  let drawnAt = 0;

  document.addEventListener("switchyard:history", (event) => {
    const since = event.detail.length ? event.detail[event.detail.length - 1].t : 0;
    points = event.detail.concat(points.filter((point) => point.t > since));
    draw(true);
  });
  document.addEventListener("switchyard:point", (event) => {
    const last = points.length ? points[points.length - 1].t : 0;
    if (event.detail.t >= last + 0.95) {
      points.push(event.detail);
      points = points.filter((point) => point.t >= event.detail.t - KEEP_S);
    }
    draw(false);
  });
  document.addEventListener("switchyard:paused", (event) => {
    paused = event.detail;
    draw(true);
  });
  document.addEventListener("switchyard:theme", () => draw(true));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));

  function colours() {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(name).trim();
  }

  function layout(colour, more) {
    return {
      margin: { l: 44, r: 10, t: 6, b: 26 },
      height: 190,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 11, color: colour("--ink-2") },
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      hovermode: "x unified",
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      xaxis: { type: "date", gridcolor: colour("--grid"), linecolor: colour("--line"), tickformat: "%H:%M", nticks: 5, zeroline: false },
      yaxis: { gridcolor: colour("--grid"), rangemode: "tozero", zeroline: false, nticks: 5, ...more },
    };
  }

  const line = (name, x, y, colour, extra) => ({ type: "scatter", mode: "lines", name, x, y, line: { color: colour, width: 2, ...extra }, hovertemplate: "%{y}" });

  function traces(kind, x, colour, slo) {
    if (kind === "ttft") {
      const drawn = [
        line("p95", x, points.map((p) => p.p95), colour("--ink")),
        line("p50", x, points.map((p) => p.p50), colour("--ink-2"), { width: 1.5, dash: "dot" }),
      ];
      if (slo) drawn.push(line("target", [x[0], x[x.length - 1]], [slo, slo], colour("--bad"), { dash: "dash", width: 1.25 }));
      return drawn;
    }
    if (kind === "waiting") {
      const bands = [...new Set(points.flatMap((p) => Object.keys(p.waiting)))];
      return bands.map((band, i) => line(band, x, points.map((p) => p.waiting[band]), colour(`--series-${(i % 5) + 1}`), { dash: DASHES[i % 5], shape: "hv" }));
    }
    const shapes = { prefill: "", decode: "|", mixed: "+", draining: "/", switching: "\\", down: "x" };
    return KINDS.filter((name) => points.some((p) => p.split[name])).map((name) => ({
      ...line(name, x, points.map((p) => p.split[name]), colour(`--${name}`), { width: 1, shape: "hv" }),
      stackgroup: "nodes",
      fillpattern: { shape: shapes[name], fgcolor: colour("--panel"), bgcolor: colour(`--${name}`), size: 6, solidity: 0.25 },
    }));
  }

  function draw(force) {
    if (!window.Plotly || document.hidden || !points.length) return;
    if (!force && (paused || performance.now() - drawnAt < DRAW_EVERY_MS)) return;
    drawnAt = performance.now();
    const colour = colours();
    const x = points.map((p) => new Date(p.t * 1000));
    const end = x[x.length - 1].getTime();
    for (const plot of plots) {
      const kind = plot.dataset.chart;
      const ours = layout(colour, kind === "ttft" ? { ticksuffix: " s" } : { tickformat: "d" });
      if (kind === "waiting") ours.yaxis.range = [0, Math.max(5, ...points.flatMap((p) => Object.values(p.waiting))) * 1.06];
      ours.xaxis.range = [new Date(Math.min(x[0].getTime(), end - KEEP_S * 1000)), new Date(end)];
      plot.querySelector(".plot-wait")?.remove();
      window.Plotly.react(plot, traces(kind, x, colour, Number(plot.dataset.slo)), ours, { displayModeBar: false, responsive: true });
    }
  }

  // Five megabytes of Plotly wait until the page itself is up.
  const script = document.createElement("script");
  script.src = document.currentScript.dataset.plotly;
  script.async = true;
  script.onload = () => draw(true);
  script.onerror = () => {
    for (const plot of plots) plot.querySelector(".plot-wait").textContent = "The chart library could not be loaded; the tables have the numbers.";
  };
  window.addEventListener("load", () => document.head.append(script));
})();
