// Two charts of values: every trial's curve, and the best so far against device time.

import { duration, number } from "./format.js";
import { put } from "./panels.js";
import { bounds, colour, placer, Plot, showTip, span, STEPS, suitsLog, usualBounds } from "./paint.js";

// From the back to the front: the parked are dimmed, by colour and by strength.
const LOOKS = {
  failed: { alpha: 0.65, width: 1.2, dash: [2, 3] },
  stored: { alpha: 0.5, width: 1.1, dash: [5, 3] },
  pending: { alpha: 0.5, width: 1.1, dash: [2, 4] },
  parked: { alpha: 0.55, width: 1.2, dash: [] },
  done: { alpha: 0.75, width: 1.3, dash: [] },
  running: { alpha: 1, width: 1.9, dash: [] },
};
const REACH = 22; // pixels: who is farther from every curve points at none

export class Curves {
  constructor(store, view, log) {
    this.store = store;
    this.view = view;
    this.chosenLog = null; // of a scale, null for the one that suits
    this.near = null;
    this.button = log;
    this.more = document.getElementById("curves-more");
    this.reset = document.getElementById("curves-reset");
    log.addEventListener("click", () => {
      this.chosenLog = !this.plot.log;
      this.update();
    });
    this.reset.addEventListener("click", () => this.plot.whole());
    this.plot = new Plot(document.getElementById("curves"), {
      x: { values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick : "")) },
      y: { zooms: true, size: 62, values: (_, ticks) => ticks.map((t) => (t === null ? "" : number(t))) },
      draw: (plot, ctx, ratio) => this.draw(plot, ctx, ratio),
      hover: (plot, left, top) => this.hover(plot, left, top),
      pick: () => this.near && view.select(Number(this.near.key), true),
      onZoom: (zoomed) => (this.reset.hidden = !zoomed),
      update: () => this.update(),
    });
  }

  update() {
    const { curves } = this.store.page;
    const reported = reportedIn(curves);
    const units = Math.max(1, ...Object.values(curves).map((curve) => curve.units[curve.units.length - 1] ?? 1));
    this.button.hidden = !reported.length;
    if (!reported.length) {
      return this.plot.empty(this.store.page.study.named
        ? "No trial has reported a value yet."
        : "Curves are in a study's ledger: start with --storage and --study-name.");
    }
    const { maximize } = this.store.page.study;
    const positive = reported.every((values) => bounds(values)[0] > 0);
    const log = positive && (this.chosenLog ?? suitsLog(usualBounds(reported, true, maximize)));
    this.button.setAttribute("aria-pressed", log);
    this.button.disabled = !positive;
    const usual = usualBounds(reported, log, maximize);
    this.tellOf(usual);
    this.plot.show([Math.min(0.8, units - 1), units + Math.max(0.4, units * 0.03)], span(usual, log), log);
  }

  tellOf([low, high]) {
    const room = (high - low) * 1e-6; // logarithms are not exact
    const outside = (value) => value !== null && (value < low - room || value > high + room);
    const far = Object.entries(this.store.page.curves).filter(([, { values }]) => values.some(outside));
    const who = far.length === 1 ? `trial ${far[0][0]} leaves` : `${far.length} trials leave`;
    const drawn = Object.keys(this.store.page.curves).length;
    const all = Object.values(this.store.page.trials).filter((trial) => trial.units > 0).length;
    const some = drawn < all ? ` · ${drawn} of ${all}: those with a process, and the best` : "";
    put(this.more, `value after each unit${some}${far.length ? ` · ${who} the scale` : ""}`);
  }

  redraw() {
    this.plot.plot?.redraw(false);
  }

  draw(plot, ctx, ratio) {
    const { curves, trials, best } = this.store.page;
    const { log } = this.plot;
    const at = { x: placer(plot, "x"), y: placer(plot, "y", log) };
    const chosen = this.view.chosen();
    const groups = new Map(Object.keys(LOOKS).map((state) => [state, []]));
    for (const [key, curve] of Object.entries(curves)) {
      const state = trials[key]?.state ?? "pending";
      if (this.view.shows(state)) groups.get(state)?.push(curve);
    }
    for (const [state, group] of groups) {
      const look = LOOKS[state];
      ctx.globalAlpha = look.alpha * (chosen === null ? 1 : 0.45);
      ctx.setLineDash(look.dash.map((part) => part * ratio));
      stroke(ctx, group, at, colour(state), look.width * ratio);
    }
    ctx.setLineDash([]);
    ctx.globalAlpha = 1;
    if (best && curves[best.trial] && this.view.shows(trials[best.trial]?.state)) {
      this.emphasize(ctx, best.trial, colour("ink"), 2.2, at, ratio);
    }
    if (chosen !== null && curves[chosen] && chosen !== best?.trial) {
      this.emphasize(ctx, chosen, colour(trials[chosen]?.state ?? "ink"), 3, at, ratio);
    }
  }

  // One curve over all others, with its trial's number at its end.
  emphasize(ctx, trial, paint, width, at, ratio) {
    const curve = this.store.page.curves[trial];
    stroke(ctx, [curve], at, paint, width * ratio);
    let last = curve.values.length - 1;
    while (last >= 0 && curve.values[last] === null) last -= 1;
    if (last < 0) return;
    const [x, y] = [at.x(curve.units[last]), at.y(curve.values[last])];
    ctx.fillStyle = paint;
    ctx.beginPath();
    ctx.arc(x, y, 3.5 * ratio, 0, 2 * Math.PI);
    ctx.fill();
    const text = `${trial}`;
    ctx.font = `600 ${12 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    ctx.lineWidth = 4 * ratio;
    ctx.strokeStyle = colour("panel");
    const place = [x - 5 * ratio, y - 4 * ratio];
    ctx.strokeText(text, ...place);
    ctx.fillText(text, ...place);
  }

  hover(plot, left, top) {
    this.near = left < 0 ? null : this.nearest(plot, left, top);
    this.view.hover(this.near ? Number(this.near.key) : null);
    const box = plot.over.getBoundingClientRect();
    showTip(this.near && this.words(), box.left + left, box.top + top);
  }

  words() {
    const { key, unit, value } = this.near;
    return `Trial ${key}, ${this.store.page.trials[key]?.state ?? ""}: ${number(value)} after unit ${unit}`;
  }

  nearest(plot, left, top) {
    const [x, y] = [placer(plot, "x"), placer(plot, "y", this.plot.log)];
    const ratio = devicePixelRatio;
    const [px, py] = [left * ratio + plot.bbox.left, top * ratio + plot.bbox.top];
    let found = null;
    let least = (REACH * ratio) ** 2;
    for (const [key, { units, values }] of Object.entries(this.store.page.curves)) {
      if (!this.view.shows(this.store.page.trials[key]?.state)) continue;
      for (let i = 0; i < units.length; i += 1) {
        if (values[i] === null) continue;
        const far = (x(units[i]) - px) ** 2 + (y(values[i]) - py) ** 2;
        if (far < least) [least, found] = [far, { key, unit: units[i], value: values[i] }];
      }
    }
    return found;
  }
}

function reportedIn(curves) {
  const all = Object.values(curves).map(({ values }) => values.filter((value) => value !== null));
  return all.filter((values) => values.length);
}

// All curves of one look in one path: hundreds of them are drawn in a few milliseconds.
function stroke(ctx, curves, at, paint, width) {
  ctx.strokeStyle = paint;
  ctx.lineWidth = width;
  ctx.lineJoin = "round";
  ctx.beginPath();
  for (const { units, values } of curves) {
    let pen = false;
    for (let i = 0; i < units.length; i += 1) {
      if (values[i] === null) {
        pen = false;
        continue;
      }
      const [x, y] = [at.x(units[i]), at.y(values[i])];
      if (pen) ctx.lineTo(x, y);
      else if ((values[i + 1] ?? null) === null) {
        // A value without a neighbour has no line: it is a ring.
        ctx.moveTo(x + 1.5 * width, y);
        ctx.arc(x, y, 1.5 * width, 0, 2 * Math.PI);
      } else ctx.moveTo(x, y);
      pen = true;
    }
  }
  ctx.stroke();
}

export class Path {
  constructor(store, view) {
    this.store = store;
    this.view = view;
    this.more = document.getElementById("path-more");
    this.plot = new Plot(document.getElementById("path"), {
      x: { incrs: STEPS, space: 60, values: (_, ticks) => ticks.map(short) },
      y: { size: 62, values: (_, ticks) => ticks.map((t) => (t === null ? "" : number(t))) },
      draw: (plot, ctx, ratio) => this.draw(plot, ctx, ratio),
      hover: (plot, left, top) => this.hover(plot, left, top),
      update: () => this.update(),
    });
  }

  update() {
    const { path, curves, study } = this.store.page;
    if (!path.length) {
      return this.plot.empty(this.store.page.study.named
        ? "The best value so far appears with the first report."
        : "The best value so far is in a study's ledger: start with --storage and --study-name.");
    }
    // First values of a trial that diverged leave the scale, as in the chart of curves. The good end
    // is that of the path: curves are thinned out, so that they may not have the best value.
    const [low, high] = usualBounds(reportedIn(curves), false, study.maximize);
    const all = path.map(([, value]) => value);
    const usual = all.filter((value) => (study.maximize ? value >= low : value <= high));
    put(this.more, `of all reports, by device time${usual.length && usual.length < all.length ? " · first values leave the scale" : ""}`);
    const values = bounds(usual.length ? usual : all);
    const log = suitsLog(values);
    const most = Math.max(this.view.deviceSeconds(), path[path.length - 1][0]);
    this.plot.show([0, most * 1.04 || 1], span(values, log), log);
  }

  draw(plot, ctx, ratio) {
    const { path } = this.store.page;
    const [x, y] = [placer(plot, "x"), placer(plot, "y", this.plot.log)];
    const end = Math.max(this.view.deviceSeconds(), path[path.length - 1][0]);
    ctx.strokeStyle = colour("ink");
    ctx.lineWidth = 2 * ratio;
    ctx.lineJoin = "round";
    ctx.beginPath();
    path.forEach(([spent, value], i) => {
      if (i === 0) ctx.moveTo(x(spent), y(value));
      else {
        ctx.lineTo(x(spent), y(path[i - 1][1]));
        ctx.lineTo(x(spent), y(value));
      }
    });
    ctx.lineTo(x(end), y(path[path.length - 1][1]));
    ctx.stroke();
    ctx.fillStyle = colour("ink");
    for (const [spent, value] of path) {
      ctx.beginPath();
      ctx.arc(x(spent), y(value), 2.6 * ratio, 0, 2 * Math.PI);
      ctx.fill();
    }
  }

  hover(plot, left, top) {
    const { path } = this.store.page;
    const spent = left < 0 ? null : plot.posToVal(left, "x");
    const at = spent === null ? null : path.findLast(([each]) => each <= spent);
    const box = plot.over.getBoundingClientRect();
    showTip(at && `${number(at[1])} (trial ${at[2]}) after ${duration(spent)} of devices`, box.left + left, box.top + top);
  }
}

// A time on an axis: 40 s, 2 min, 1:30 h.
export function short(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 60) return `${Number(seconds.toFixed(1))} s`;
  const [unit, size] = seconds < 3600 ? ["min", 60] : seconds < 86400 ? ["h", 3600] : ["d", 86400];
  const count = seconds / size;
  return Number.isInteger(count) || unit === "d" ? `${Number(count.toFixed(1))} ${unit}` : duration(seconds);
}
