// The table of trials: sorted by any column, one row at a time within reach of the keyboard.

import { duration, energy, number, where } from "./format.js";
import { icon, make, put } from "./panels.js";

const SHOWN = 300;

const COLUMNS = [
  { id: "number", name: "Trial", of: (trial, n) => n, left: true },
  { id: "state", name: "State", of: (trial) => trial.state, left: true },
  { id: "value", name: "Value", of: (trial) => trial.value },
  { id: "units", name: "Units", of: (trial) => trial.units, down: true, classes: "more-room" },
  { id: "slices", name: "Slices", of: (trial) => trial.slices, down: true, classes: "extra" },
  { id: "suspensions", name: "Suspensions", of: (trial) => trial.suspensions, down: true, classes: "extra" },
  { id: "device_seconds", name: "Device time", of: (trial) => trial.device_seconds, down: true, classes: "more-room" },
  { id: "watt_hours", name: "Energy", of: (trial) => trial.watt_hours, down: true, classes: "extra energy" },
];

const KEYS = { h: "hold", b: "boost", f: "finish" };
const VERBS = {
  hold: { name: "Hold", override: "held" },
  boost: { name: "Boost", override: "boosted" },
  finish: { name: "Finish", override: "finishing" },
};

export class Table {
  constructor(store, view, commands) {
    this.store = store;
    this.view = view;
    this.commands = commands;
    this.sort = { id: "value", down: false };
    this.all = false;
    this.order = [];
    this.rows = new Map();
    this.body = document.getElementById("rows");
    this.more = document.getElementById("all");
    this.head();
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("focusin", (event) => this.enter(event));
    this.body.addEventListener("pointerover", (event) => view.hover(numberOf(event)));
    this.body.addEventListener("pointerleave", () => view.hover(null));
    this.more.addEventListener("click", () => {
      this.all = true;
      this.update();
    });
  }

  head() {
    const columns = COLUMNS.map((column) => {
      const button = make("button", "", column.name);
      button.type = "button";
      button.addEventListener("click", () => this.sortBy(column));
      const cell = make("th", `${column.left ? "left " : ""}${column.classes ?? ""}`, button);
      cell.scope = "col";
      cell.dataset.id = column.id;
      return cell;
    });
    const acts = make("th", "acts", make("span", "", ""));
    acts.setAttribute("aria-label", "What to do with it");
    document.getElementById("columns").append(...columns, acts);
  }

  sortBy({ id, down = false }) {
    const again = this.sort.id === id;
    this.began = true;
    this.sort = { id, down: again ? !this.sort.down : id === "value" ? this.store.page.study.maximize === true : down };
    this.update(true);
  }

  // While somebody points at a row, or is in one, rows stay where they are.
  get busy() {
    return this.body.contains(document.activeElement) || this.body.matches(":hover");
  }

  update(force = false) {
    const { trials, study, totals } = this.store.page;
    if (!this.began && study.maximize !== null) {
      this.began = true;
      this.sort.down = study.maximize;
    }
    const wanted = Object.keys(trials).map(Number).filter((n) => this.view.shows(trials[n].state));
    const known = new Set(wanted);
    if (force || !this.busy) this.order = this.sorted(wanted);
    else {
      const there = new Set(this.order);
      const fresh = this.sorted(wanted.filter((n) => !there.has(n)));
      this.order = [...this.order.filter((n) => known.has(n)), ...fresh];
    }
    const shown = this.all ? this.order : this.order.slice(0, SHOWN);
    this.place(shown);
    for (const n of shown) this.fill(n, trials[n]);
    this.tick();
    for (const cell of document.querySelectorAll("th[data-id]")) {
      const sorted = cell.dataset.id === this.sort.id;
      if (sorted) cell.setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    }
    for (const cell of document.querySelectorAll(".energy")) cell.hidden = totals.watt_hours === null;
    this.more.hidden = shown.length === this.order.length;
    put(this.more, `Show all ${this.order.length}`);
    this.explain(wanted.length, Object.keys(trials).length);
    this.reach();
  }

  explain(shown, all) {
    const empty = document.getElementById("empty");
    empty.hidden = shown > 0;
    document.querySelector("table").hidden = shown === 0;
    put(empty, all ? "No trial is in a state that is shown." : "No trial has had a device yet. It is here as soon as `optuna-hermes optimize` gives it one.");
    put(document.getElementById("trials-more"), shown < all ? `${shown} of ${all}` : "");
  }

  sorted(numbers) {
    const { trials } = this.store.page;
    const { of } = COLUMNS.find((column) => column.id === this.sort.id);
    const sign = this.sort.down ? -1 : 1;
    const compare = (a, b) => {
      const [x, y] = [of(trials[a], a), of(trials[b], b)];
      if (x === y) return a - b;
      if (x === null || y === null) return x === null ? 1 : -1;
      return x < y ? -sign : sign;
    };
    return numbers.sort(compare);
  }

  place(numbers) {
    const wanted = new Set(numbers);
    for (const [n, row] of this.rows) {
      if (wanted.has(n)) continue;
      row.remove();
      this.rows.delete(n);
    }
    numbers.forEach((n, i) => {
      if (!this.rows.has(n)) this.rows.set(n, this.row(n));
      const row = this.rows.get(n);
      if (this.body.children[i] !== row) this.body.insertBefore(row, this.body.children[i] ?? null);
    });
  }

  row(n) {
    const number = make("button", "open", String(n));
    number.type = "button";
    number.title = "Its event log";
    number.addEventListener("click", () => this.commands.tell(n));
    const cells = COLUMNS.map(({ id, left, classes }) => make("td", `${id} ${left ? "left " : ""}${classes ?? ""}`));
    cells[0].append(number);
    const acts = make("div", "");
    for (const [verb, { name }] of Object.entries(VERBS)) {
      const button = make("button", "", icon(verb), make("span", "", name));
      button.type = "button";
      button.dataset.verb = verb;
      button.addEventListener("click", () => this.commands.run(verb, n));
      acts.append(button);
    }
    const row = make("tr", "", ...cells, make("td", "acts", acts));
    row.dataset.trial = n;
    row.addEventListener("click", () => this.view.select(n));
    return row;
  }

  // Device time grows by itself where a slice lasts.
  tick() {
    const { trials, devices } = this.store.page;
    for (const { holder } of devices) {
      const trial = trials[holder?.trial];
      const cell = this.rows.get(holder?.trial)?.children[6];
      if (trial && cell) put(cell, duration(this.view.trialSeconds(holder.trial, trial)));
    }
  }

  // What is shown of a trial; the store has another object where anything has changed.
  fill(n, trial) {
    const row = this.rows.get(n);
    row.classList.toggle("best", this.store.page.best?.trial === n);
    if (row.shown === trial) return;
    row.shown = trial;
    const [, state, value, units, slices, suspensions, time, watts] = row.children;
    this.state(state, trial);
    put(value, number(trial.value));
    put(units, String(trial.units));
    put(slices, String(trial.slices));
    put(suspensions, String(trial.suspensions));
    put(time, duration(this.view.trialSeconds(n, trial)));
    put(watts, trial.watt_hours === null ? "–" : energy(trial.watt_hours));
    for (const button of row.querySelectorAll("[data-verb]")) this.button(button, n, trial);
  }

  state(cell, trial) {
    const at = where(trial);
    const { override } = trial;
    const shown = `${trial.state} ${at} ${override}`;
    if (cell.dataset.shown === shown) return;
    cell.dataset.shown = shown;
    const sign = icon(trial.state);
    sign.classList.add(`state-${trial.state}`);
    const words = [sign, make("span", "", trial.state)];
    if (override) words.push(make("b", "override", override));
    if (at) words.push(make("span", "tag more-room", ` · ${at}`));
    cell.replaceChildren(...words);
  }

  button(button, n, trial) {
    const { verb } = button.dataset;
    const { name, override } = VERBS[verb];
    const can = this.commands.can(verb, trial);
    const done = trial.override === override;
    button.hidden = !can;
    if (verb !== "finish") button.setAttribute("aria-pressed", done);
    button.setAttribute("aria-label", `${name} trial ${n}`);
  }

  key(event) {
    const n = numberOf(event);
    if (n === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const verb = KEYS[event.key.toLowerCase()];
    const to = this.target(event.key, n);
    if (verb) this.commands.run(verb, n);
    else if (to !== undefined) this.go(to);
    else return;
    event.preventDefault();
  }

  target(key, n) {
    const shown = [...this.body.children].map((row) => Number(row.dataset.trial));
    const at = shown.indexOf(n);
    const places = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1 };
    return key in places ? shown[Math.min(Math.max(places[key], 0), shown.length - 1)] : undefined;
  }

  go(n) {
    const row = this.rows.get(n);
    row?.querySelector(".open").focus();
    row?.scrollIntoView({ block: "nearest" });
  }

  enter(event) {
    const n = numberOf(event);
    if (n !== null) this.view.select(n);
  }

  // Tab reaches one row of them all; the arrows go from row to row.
  reach() {
    const chosen = this.rows.has(this.view.selected) ? this.view.selected : this.order[0];
    for (const [n, row] of this.rows) {
      row.classList.toggle("current", n === this.view.selected);
      for (const button of row.querySelectorAll("button")) button.tabIndex = n === chosen ? 0 : -1;
    }
  }
}

function numberOf(event) {
  const row = event.target.closest?.("tr[data-trial]");
  return row ? Number(row.dataset.trial) : null;
}
