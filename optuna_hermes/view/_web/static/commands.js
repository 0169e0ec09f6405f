// What is done to a trial, and the dialogs that ask and tell.

import { duration, energy, number, plural } from "./format.js";
import { make, put } from "./panels.js";

const $ = (id) => document.getElementById(id);
const TOAST_MS = 6000;
const OVERRIDE_OF = { hold: "held", boost: "boosted" };

export class Commands {
  constructor(store) {
    this.store = store;
    this.timer = null;
    this.asked = null; // the trial whose event log was asked for last
    $("help").addEventListener("click", () => $("keys").showModal());
  }

  can(verb, trial) {
    if (!this.store.page.study.commands) return false;
    if (trial.state === "done" || trial.state === "failed" || trial.override === "finishing") return false;
    return verb !== "finish" || trial.units > 0;
  }

  async run(verb, n) {
    const trial = this.store.page.trials[n];
    if (!trial || !this.can(verb, trial)) {
      return this.toast(verb === "finish" && trial?.units === 0
        ? `Trial ${n} has reported no value that it could be finished with.`
        : `Trial ${n} cannot be ${{ hold: "held", boost: "boosted", finish: "finished" }[verb]} now.`);
    }
    if (verb === "finish" && !(await this.sure(n, trial))) return;
    const again = verb in OVERRIDE_OF && trial.override === OVERRIDE_OF[verb];
    try {
      const answer = await fetch(`api/trials/${n}/${again ? "release" : verb}`, {
        method: "POST",
        headers: { "X-Optuna-Hermes": "1" },
      });
      const { done, error } = await answer.json();
      this.toast(done ?? error);
    } catch {
      this.toast("The server of this page does not answer.");
    }
  }

  // Whether a person says yes: a finished trial does not train on.
  sure(n, trial) {
    put($("ask-title"), `Finish trial ${n}?`);
    const value = trial.value === null ? "which is not finite" : number(trial.value);
    put($("ask-text"), `It is closed at its last value, ${value}, after ${plural(trial.units, "unit")}, and does not train on.`);
    const dialog = $("ask");
    dialog.returnValue = "no";
    dialog.showModal();
    return new Promise((resolve) => {
      dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    });
  }

  toast(text) {
    clearTimeout(this.timer);
    put($("toast"), text);
    this.timer = setTimeout(() => put($("toast"), ""), TOAST_MS);
  }

  async tell(n) {
    const body = $("events-body");
    this.asked = n;
    put($("events-title"), `Trial ${n}`);
    body.replaceChildren(make("p", "", "Reading"));
    $("events").showModal();
    try {
      const answer = await fetch(`api/trials/${n}`);
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
      if (this.asked === n) body.replaceChildren(...this.eventLog(found));
    } catch (error) {
      if (this.asked === n) body.replaceChildren(make("p", "", error.message));
    }
  }

  eventLog({ trial, state, curve, params, slices, suspensions, device_seconds, watt_hours, checkpoints, events, events_left_out: earlier }) {
    const last = curve.values[curve.values.length - 1] ?? null;
    const best = curve.best && ` (best ${number(curve.best.value)} at unit ${curve.best.unit})`;
    const what = [
      ["state", state],
      ["value", curve.units ? `${number(last)} after ${plural(curve.units, "unit")}${best ?? ""}` : "nothing reported"],
      ["device time", `${duration(device_seconds)} in ${plural(slices, "slice")}, suspended ${plural(suspensions, "time")}`],
      ["checkpoints", checkpoints.length ? `${checkpoints.length}, the newest of unit ${checkpoints[checkpoints.length - 1].units}` : "none"],
    ];
    if (watt_hours !== null) what.push(["energy", energy(watt_hours)]);
    const told = [facts(what)];
    if (Object.keys(params).length) {
      const shown = Object.entries(params).map(([name, value]) => [name, isFraction(value) ? number(value) : String(value)]);
      told.push(make("h3", "", "Parameters"), facts(shown));
    }
    const left = earlier ? [make("p", "", `${plural(earlier, "earlier event")}: optuna-hermes status ${trial} --json tells all.`)] : [];
    if (events.length) told.push(make("h3", "", "What happened"), ...left, happened(events));
    return told;
  }
}

function isFraction(value) {
  return typeof value === "number" && !Number.isInteger(value);
}

function facts(pairs) {
  return make("dl", "facts", ...pairs.map(([name, text]) => make("div", "", make("dt", "", name), make("dd", "", text))));
}

function happened(events) {
  const lines = events.map(({ at, text }) => {
    const time = make("time", "", new Date(at * 1000).toLocaleString("sv")); // 2026-11-22 13:20:05
    return make("li", "", time, make("span", "", text));
  });
  return make("ul", "events", ...lines);
}
