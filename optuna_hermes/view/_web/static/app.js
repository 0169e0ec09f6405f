// Brings store, charts, table and keys together.

import { Commands } from "./commands.js";
import { Curves, Path } from "./curves.js";
import { forgetColours } from "./paint.js";
import { drawChips, drawDevices, drawTiles, drawTitle, put, showLive } from "./panels.js";
import { Schedule } from "./schedule.js";
import { listen, Store } from "./store.js";
import { Table } from "./table.js";

const TICK_MS = 1000;
const $ = (id) => document.getElementById(id);
const store = new Store();

// What people look at: a trial, and some of the states.
const view = {
  selected: null,
  hovered: null,
  only: new Set(),

  shows(state) {
    return this.only.size === 0 || this.only.has(state);
  },
  chosen() {
    return this.hovered ?? this.selected;
  },
  toggle(state) {
    if (!this.only.delete(state)) this.only.add(state);
    draw();
  },
  hover(trial) {
    if (this.hovered === trial) return;
    this.hovered = trial;
    redrawSoon();
  },
  select(trial, andGo = false) {
    const same = this.selected === trial;
    this.selected = trial;
    if (!same) {
      table.reach();
      redrawSoon();
    }
    if (andGo) table.go(trial);
  },
  // Device time of a trial, or of all, with that of slices which last.
  trialSeconds(number, trial) {
    return trial.device_seconds + this.heldSeconds((holder) => holder.trial === number);
  },
  deviceSeconds() {
    return store.page.totals.device_seconds + this.heldSeconds(() => true);
  },
  heldSeconds(counts) {
    const now = store.now();
    const holders = store.page.devices.map((device) => device.holder).filter((each) => each?.own);
    return holders.filter(counts).reduce((sum, holder) => sum + Math.max(0, now - holder.since), 0);
  },
};

const commands = new Commands(store);
const table = new Table(store, view, commands);
const curves = new Curves(store, view, $("log"));
const path = new Path(store, view);
const schedule = new Schedule(store, view);
const drawn = { curves: -1, bars: -1 };
let frame = null;

function draw() {
  const { page } = store;
  drawTitle(page);
  drawTiles(page, view.deviceSeconds());
  drawChips(page, view);
  if (drawn.curves === store.version.curves) redrawSoon();
  else curves.update();
  path.update();
  schedule.update();
  drawDevices(page, store.now());
  table.update();
  Object.assign(drawn, store.version);
  if (!("ready" in document.body.dataset)) performance.mark("drawn");
  document.body.dataset.ready = "";
}

function redrawSoon() {
  frame ??= requestAnimationFrame(() => {
    frame = null;
    curves.redraw();
    schedule.redraw();
  });
}

function tick() {
  if (document.hidden || $("live").dataset.is === "lost") return;
  if (!store.page?.devices.some((device) => device.holder)) return;
  drawTiles(store.page, view.deviceSeconds());
  drawDevices(store.page, store.now());
  path.update();
  schedule.update();
  table.tick();
}

const THEMES = ["auto", "light", "dark"];

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  put($("theme-name"), theme[0].toUpperCase() + theme.slice(1));
  $("theme-switch").setAttribute("aria-label", `Theme: ${theme}`);
  forgetColours();
  if (store.page) draw();
}

$("theme-switch").addEventListener("click", () => {
  const { dataset } = document.documentElement;
  const next = THEMES[(THEMES.indexOf(dataset.theme ?? "auto") + 1) % THEMES.length];
  if (next === "auto") delete dataset.theme;
  else dataset.theme = next;
  try {
    localStorage.setItem("hermes-theme", next);
  } catch {
    // It lasts as long as this page, then.
  }
  drawn.curves = -1;
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
addEventListener("keydown", (event) => {
  if (event.key === "?" && !document.querySelector("dialog[open]")) $("keys").showModal();
});

showTheme();
listen(store, {
  onChange: draw,
  onLost: () => showLive({ is: "lost", text: "The page has lost its server" }),
});
setInterval(tick, TICK_MS);
