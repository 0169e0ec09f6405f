// Devices over time: who had which. A bar has the colour of its trial's state, and its number.

import { duration } from "./format.js";
import { colour, FONT, placer, Plot, showTip, STEPS } from "./paint.js";
import { short } from "./curves.js";

const ROW = 28;
const AXIS = 40;
const PAD = 16;
const ruler = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  ruler.font = FONT();
  return ruler.measureText(text).width;
}

function fitted(text, room) {
  let shown = text;
  for (let cut = 1; textWidth(shown) > room && cut < text.length; cut += 1) shown = `…${text.slice(cut)}`;
  return shown;
}
const ALPHA = { parked: 0.55, stored: 0.4, pending: 0.4 };

export class Schedule {
  constructor(store, view) {
    this.store = store;
    this.view = view;
    this.rows = [];
    this.bars = [];
    this.near = null;
    this.reset = document.getElementById("schedule-reset");
    this.reset.addEventListener("click", () => this.plot.whole());
    this.plot = new Plot(document.getElementById("schedule"), {
      x: { incrs: STEPS, space: 60, values: (_, ticks) => ticks.map(short) },
      y: {
        size: () => PAD + Math.max(20, ...this.names().map(textWidth)),
        splits: () => this.rows.map((_, i) => -i),
        values: () => this.names(),
        grid: { show: false },
        filter: (_, splits) => splits,
      },
      draw: (plot, ctx, ratio) => this.draw(plot, ctx, ratio),
      hover: (plot, left, top) => this.hover(plot, left, top),
      pick: () => this.near && this.near[1] !== null && view.select(this.near[1], true),
      onZoom: (zoomed) => (this.reset.hidden = !zoomed),
      update: () => this.update(),
    });
  }

  update() {
    const { page } = this.store;
    this.bars = Object.values(page.bars).sort((a, b) => a[2] - b[2]);
    if (!this.bars.length) {
      return this.plot.empty(page.study.named
        ? "No trial has had a device yet."
        : "The schedule is in a study's ledger: start with --storage and --study-name.");
    }
    const count = this.rows.length;
    this.rows = rowsOf(this.bars, page.devices);
    // Its panel may be higher, for it stands beside another.
    if (this.rows.length !== count) this.plot.box.style.minHeight = `${this.rows.length * ROW + AXIS}px`;
    this.plot.show([0, this.end() || 1], [0.5 - this.rows.length, 0.5]);
  }

  redraw() {
    this.plot.plot?.redraw(false);
  }

  end() {
    const now = this.store.now() - this.store.page.begin;
    const ends = this.bars.map((bar) => bar[3] ?? now);
    return ends.reduce((most, end) => Math.max(most, end), 0);
  }

  // The names of devices take a third of the panel at most; what is cut of one is its beginning.
  names() {
    const most = Math.max(90, this.plot.box.clientWidth * 0.34);
    return this.rows.map((row) => fitted(row.label, most - PAD));
  }

  draw(plot, ctx, ratio) {
    const { page } = this.store;
    const [x, y] = [placer(plot, "x"), placer(plot, "y")];
    const place = new Map(this.rows.map((row, i) => [row.device, -i]));
    const high = Math.min(30, (plot.bbox.height / ratio / this.rows.length) * 0.78) * ratio;
    const chosen = this.view.chosen();
    const now = this.store.now() - page.begin;
    ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    for (const [device, trial, begin, end] of this.bars) {
      const state = trial === null ? "pending" : (page.trials[trial]?.state ?? "pending");
      const [left, right] = [x(begin), x(end ?? Math.max(now, begin))];
      const middle = y(place.get(device));
      const wide = Math.max(right - left - ratio, ratio);
      const faint = !this.view.shows(state) || (chosen !== null && chosen !== trial);
      const strength = chosen === trial && trial !== null ? 1 : (ALPHA[state] ?? 0.9);
      ctx.globalAlpha = faint ? 0.13 : strength;
      ctx.fillStyle = colour(trial !== null && trial === page.best?.trial ? "ink" : state);
      ctx.fillRect(left, middle - high / 2, wide, high);
      if (faint || trial === null) continue;
      ctx.globalAlpha = 1;
      const text = String(trial);
      if (ctx.measureText(text).width + 5 * ratio > wide) continue;
      // On a bar that is dimmed the panel's colour would not be read.
      ctx.fillStyle = colour(strength > 0.7 ? "panel" : "ink");
      ctx.fillText(text, left + wide / 2, middle + ratio);
    }
    ctx.globalAlpha = 1;
  }

  hover(plot, left, top) {
    this.near = left < 0 ? null : this.under(plot, left, top);
    this.view.hover(this.near ? this.near[1] : null);
    const box = plot.over.getBoundingClientRect();
    showTip(this.near && this.words(this.near), box.left + left, box.top + top);
  }

  under(plot, left, top) {
    const at = plot.posToVal(left, "x");
    const row = this.rows[Math.round(-plot.posToVal(top, "y"))];
    if (!row) return null;
    const now = this.store.now() - this.store.page.begin;
    const inside = ([device, , begin, end]) => device === row.device && begin <= at && at <= (end ?? now);
    return this.bars.findLast(inside) ?? null;
  }

  words([, trial, begin, end]) {
    const now = this.store.now() - this.store.page.begin;
    const who = trial === null ? "A new trial" : `Trial ${trial}`;
    return `${who}: ${duration((end ?? now) - begin)}, from ${duration(begin)} on`;
  }
}

// Devices in the order of their names, as short as they can be told apart.
function rowsOf(bars, devices) {
  const found = [...new Set(bars.map((bar) => bar[0]))];
  const hosts = new Set(found.map((device) => device.slice(0, device.indexOf("/"))));
  const labels = new Map(devices.map((device) => [device.id, device.label]));
  const order = new Intl.Collator("en", { numeric: true });
  return found.sort(order.compare).map((device) => {
    const cut = device.indexOf("/");
    const [host, id] = [device.slice(0, cut), device.slice(cut + 1)];
    const label = labels.get(id) ?? (id.length > 12 ? id.slice(0, 12) : id);
    return { device, label: hosts.size > 1 ? `${host} ${label}` : label };
  });
}
