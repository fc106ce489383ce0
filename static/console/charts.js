/* Charts of a page: one time range, one cursor. Five minutes come from the live feed, longer ranges from the kept samples.
   Zooming one zooms all; a double click follows the present again. Solid is observed, dashed is a limit or an ideal. */
"use strict";

(() => {
  const plots = [...document.querySelectorAll("[data-chart]")];
  const residualPlots = [...document.querySelectorAll("[data-residuals]")];
  const barPlots = () => [...document.querySelectorAll("[data-bars]")];
  const experiment = document.getElementById("experiment-found");
  if (!plots.length && !residualPlots.length && !experiment) return;
  const script = document.currentScript;
  const RANGES = { "5m": 300, "1h": 3600, "6h": 21600, "24h": 86400, "7d": 604800, "30d": 2592000 };
  const range = RANGES[script.dataset.range] ? script.dataset.range : "5m";
  const KEEP_S = RANGES[range];
  const live = range === "5m";
  const DRAW_EVERY_MS = 1000;
  const ASK_EVERY_MS = 15000;
  const KINDS = ["prefill", "decode", "mixed", "draining", "switching", "down"];
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
  let points = [];
  let paused = false;
  let drawnAt = 0;
  let zoomed = null;
  let echo = false;

  const colour = () => {
    const style = getComputedStyle(document.documentElement);
    return (name) => style.getPropertyValue(name).trim();
  };

  function layout(paint, more) {
    const axis = { gridcolor: paint("--grid"), linecolor: paint("--line"), zeroline: false };
    return {
      margin: { l: 46, r: 12, t: 6, b: 26 },
      height: 200,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 11, color: paint("--ink-2") },
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      hovermode: "x unified",
      dragmode: "zoom",
      hoverlabel: { bgcolor: paint("--panel"), bordercolor: paint("--line"), font: { color: paint("--ink") } },
      xaxis: { ...axis, type: "date", nticks: 6, tickformat: KEEP_S > 86400 ? "%b %d, %H:%M" : "%H:%M", showspikes: true, spikemode: "across", spikethickness: 1, spikedash: "dot", spikecolor: paint("--ink-2") },
      yaxis: { ...axis, rangemode: "tozero", nticks: 5, fixedrange: true, ...more },
    };
  }

  const line = (name, x, y, paint, extra) => ({ type: "scatter", mode: "lines", name, x, y, line: { color: paint, width: 2, ...extra }, hovertemplate: "%{y:.4~g}", connectgaps: false });
  const column = (read) => points.map((point) => (point ? read(point) : null));
  const ratio = (part, whole) => (part == null || !whole ? null : part / whole);

  const DRAW = {
    ttft(x, paint, plot) {
      const slo = Number(plot.dataset.slo);
      const drawn = [
        line("p95", x, column((p) => p.p95), paint("--ink")),
        line("p50", x, column((p) => p.p50), paint("--ink-2"), { width: 1.5, dash: "dot" }),
      ];
      if (slo && x.length) drawn.push(line("target", [x[0], x[x.length - 1]], [slo, slo], paint("--bad"), { dash: "dash", width: 1.25 }));
      return [drawn, { ticksuffix: " s" }];
    },
    waiting(x, paint) {
      const bands = [...new Set(points.flatMap((p) => Object.keys(p?.waiting || {})))];
      const most = Math.max(5, ...points.flatMap((p) => Object.values(p?.waiting || {})));
      return [bands.map((band, i) => line(band, x, column((p) => p.waiting[band]), paint(`--series-${(i % 5) + 1}`), { dash: DASHES[i % 5], shape: "hv" })), { tickformat: "d", range: [0, most * 1.06] }];
    },
    split(x, paint) {
      const shapes = { prefill: "", decode: "|", mixed: "+", draining: "/", switching: "\\", down: "x" };
      return [
        KINDS.filter((name) => points.some((p) => p?.split[name])).map((name) => ({
          ...line(name, x, column((p) => p.split[name] || 0), paint(`--${name}`), { width: 1, shape: "hv" }),
          stackgroup: "nodes",
          fillpattern: { shape: shapes[name], fgcolor: paint("--panel"), bgcolor: paint(`--${name}`), size: 6, solidity: 0.25 },
        })),
        { tickformat: "d" },
      ];
    },
    throughput(x, paint) {
      return [
        [
          line("requests/s", x, column((p) => p.rps), paint("--ink")),
          { ...line("output tokens/s", x, column((p) => p.out), paint("--series-2"), { dash: "dash", width: 1.5 }), yaxis: "y2" },
        ],
        {},
        { yaxis2: { overlaying: "y", side: "right", rangemode: "tozero", showgrid: false, nticks: 4, fixedrange: true }, margin: { l: 46, r: 52, t: 6, b: 26 } },
      ];
    },
    reuse(x, paint) {
      return [
        [
          line("reused", x, column((p) => ratio(p.reuse?.actual, p.reuse?.prompt)), paint("--reused")),
          line("ideal", x, column((p) => ratio(p.reuse?.ideal, p.reuse?.prompt)), paint("--ink-2"), { dash: "dash", width: 1.5 }),
        ],
        { tickformat: ".0%", range: [0, 1.02] },
      ];
    },
  };

  /* A hole in time is drawn as a hole: a point of nothing between its edges. */
  function withHoles(found) {
    const step = Math.max(live ? 5 : 45, (3 * KEEP_S) / 400);
    const out = [];
    for (const point of found) {
      const last = out[out.length - 1];
      if (last && point.t - last.t > step) out.push({ t: last.t + 1, waiting: {}, split: {}, hole: true });
      out.push(point);
    }
    return out;
  }

  function draw(force) {
    if (!window.Plotly || document.hidden) return;
    if (!force && (paused || performance.now() - drawnAt < DRAW_EVERY_MS)) return;
    drawnAt = performance.now();
    const paint = colour();
    const kept = points;
    points = withHoles(points);
    const x = points.map((p) => new Date(p.t * 1000));
    points = points.map((p) => (p.hole ? null : p));
    const end = live && kept.length ? kept[kept.length - 1].t * 1000 : Date.now();
    for (const plot of plots) {
      plot.querySelector(".plot-wait")?.remove();
      if (!kept.length) {
        note(plot, "Nothing was kept of this time yet; a point is kept every 15 seconds.");
        continue;
      }
      note(plot, "");
      const [traces, yaxis, more] = DRAW[plot.dataset.chart](x, paint, plot);
      const ours = { ...layout(paint, yaxis), ...more };
      ours.xaxis.range = zoomed || [new Date(live ? Math.min(kept[0].t * 1000, end - KEEP_S * 1000) : end - KEEP_S * 1000), new Date(end)];
      if (ours.yaxis2) Object.assign(ours.yaxis2, { linecolor: paint("--line") });
      window.Plotly.react(plot, traces, ours, { displayModeBar: false, responsive: true, doubleClick: false });
      if (!plot.dataset.wired) wire(plot);
    }
    points = kept;
  }

  function note(plot, text) {
    let element = plot.parentElement.querySelector(".plot-note");
    if (!text) {
      element?.remove();
      plot.hidden = false;
      return;
    }
    if (!element) {
      element = document.createElement("p");
      element.className = "empty plot-note";
      plot.after(element);
    }
    plot.hidden = true;
    element.textContent = text;
  }

  function wire(plot) {
    plot.dataset.wired = "yes";
    plot.on("plotly_relayout", (change) => {
      if (echo) return;
      const from = change["xaxis.range[0]"];
      if (from !== undefined) setZoom([from, change["xaxis.range[1]"]]);
      else if (change["xaxis.autorange"]) setZoom(null);
    });
    plot.on("plotly_doubleclick", () => setZoom(null));
    plot.on("plotly_hover", (event) => {
      if (echo || !event.points.length) return;
      echo = true;
      const at = event.points[0].x;
      for (const other of plots) {
        if (other === plot || other.hidden || !other.data?.length) continue;
        const index = nearest(other.data[0].x, at);
        if (index >= 0) window.Plotly.Fx.hover(other, [{ curveNumber: 0, pointNumber: index }]);
      }
      echo = false;
    });
    plot.on("plotly_unhover", () => {
      if (echo) return;
      echo = true;
      for (const other of plots) if (other !== plot && !other.hidden && other.data) window.Plotly.Fx.unhover(other);
      echo = false;
    });
  }

  function nearest(xs, at) {
    const t = new Date(at).getTime();
    let best = -1;
    let gap = Infinity;
    for (let i = 0; i < xs.length; i += 1) {
      const away = Math.abs(new Date(xs[i]).getTime() - t);
      if (away < gap) [best, gap] = [i, away];
    }
    return best;
  }

  function setZoom(to) {
    zoomed = to;
    echo = true;
    draw(true);
    echo = false;
  }

  function drawResiduals() {
    if (!window.Plotly || !residualPlots.length) return;
    const paint = colour();
    const all = JSON.parse(document.getElementById("residuals").dataset.json);
    for (const plot of residualPlots) {
      plot.querySelector(".plot-wait")?.remove();
      const phase = plot.dataset.phase;
      const rows = all[plot.dataset.residuals]?.[phase] || [];
      const most = Math.max(0.001, ...rows.map((row) => Math.max(row.measured_s, row.predicted_s)));
      const dots = (name, kept, symbol) => ({
        type: "scatter", mode: "markers", name, x: kept.map((r) => r.measured_s), y: kept.map((r) => r.predicted_s), text: kept.map((r) => r.node),
        marker: { color: paint(`--${phase}`), symbol, size: 6, opacity: 0.75 }, hovertemplate: "%{text}: measured %{x:.3~g} s, predicted %{y:.3~g} s<extra></extra>",
      });
      const ours = layout(paint, { title: { text: "predicted s" } });
      ours.height = 260;
      ours.hovermode = "closest";
      ours.xaxis = { ...ours.xaxis, type: "linear", title: { text: "measured s" }, range: [0, most * 1.05], showspikes: false };
      ours.margin.b = 42;
      const ideal = { ...line("exact", [0, most], [0, most], paint("--ink-2"), { dash: "dash", width: 1.25 }), hoverinfo: "skip" };
      window.Plotly.react(plot, [ideal, dots("fitted on", rows.filter((r) => !r.held_out), "circle"), dots("held out", rows.filter((r) => r.held_out), "diamond-open")], ours, { displayModeBar: false, responsive: true });
    }
  }

  /* An experiment's figure, case by case: ours filled with its spread, the published one hollow beside it. */
  function drawBars() {
    if (!window.Plotly) return;
    const paint = colour();
    for (const plot of barPlots()) {
      plot.querySelector(".plot-wait")?.remove();
      const { cases, ours, spread, published, unit } = JSON.parse(plot.dataset.bars);
      const bar = (name, x, marker) => ({ type: "bar", orientation: "h", name, x, y: cases, marker, hovertemplate: `%{y}: %{x:.4~g} ${unit}<extra>${name}</extra>` });
      const drawn = [{ ...bar("ours", ours, { color: paint("--decode") }), error_x: { type: "data", array: spread, visible: spread.some(Boolean), color: paint("--ink"), thickness: 1.25 } }];
      if (published) drawn.push(bar("published", published, { color: "rgba(0,0,0,0)", line: { color: paint("--ink"), width: 1.5 } }));
      const form = layout(paint, {});
      form.height = 56 + cases.length * (published ? 34 : 22);
      form.barmode = "group";
      form.hovermode = "closest";
      form.dragmode = false;
      form.legend.traceorder = "normal";
      form.xaxis = { ...form.xaxis, type: "linear", tickformat: "", rangemode: "tozero", showspikes: false, fixedrange: true };
      form.yaxis = { ...form.yaxis, type: "category", rangemode: "normal", nticks: 0, autorange: "reversed", automargin: true, showgrid: false };
      form.margin = { ...form.margin, l: 20 };
      plot.style.height = `${form.height}px`;
      window.Plotly.react(plot, drawn, form, { displayModeBar: false, responsive: true });
    }
  }

  document.addEventListener("switchyard:history", (event) => {
    if (!live) return;
    const since = event.detail.length ? event.detail[event.detail.length - 1].t : 0;
    points = event.detail.concat(points.filter((point) => point.t > since));
    draw(true);
  });
  document.addEventListener("switchyard:point", (event) => {
    if (!live) return;
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
  const repaint = () => {
    draw(true);
    drawResiduals();
    drawBars();
  };
  document.addEventListener("switchyard:theme", repaint);
  if (experiment) document.addEventListener("htmx:afterSwap", drawBars);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

  async function ask() {
    if (document.hidden || paused) return;
    try {
      const answer = await fetch(`${script.dataset.history}?range=${range}`, { headers: { Accept: "application/json" } });
      if (!answer.ok) return;
      points = (await answer.json()).points;
      draw(true);
    } catch {
      /* The feed says that the console is away. */
    }
  }

  for (const button of document.querySelectorAll("[data-png]")) {
    button.addEventListener("click", () => {
      const plot = document.querySelector(`[data-chart="${button.dataset.png}"]`);
      if (window.Plotly && plot.data) window.Plotly.downloadImage(plot, { format: "png", width: 1200, height: 420, filename: `${document.body.dataset.partition}-${button.dataset.png}` });
    });
  }

  // Five megabytes of Plotly wait until the page itself is up.
  const library = document.createElement("script");
  library.src = script.dataset.plotly;
  library.async = true;
  library.onload = () => {
    if (plots.length && !live) {
      ask();
      setInterval(ask, ASK_EVERY_MS);
    } else draw(true);
    drawResiduals();
    drawBars();
  };
  library.onerror = () => {
    for (const plot of [...plots, ...residualPlots, ...barPlots()]) plot.querySelector(".plot-wait").textContent = "The chart library could not be loaded; the tables have the numbers.";
  };
  window.addEventListener("load", () => document.head.append(library));
})();
