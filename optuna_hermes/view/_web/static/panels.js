// Everything above and beside the charts: title, notes, tiles, states, devices.

import { duration, energy, number, plural, size, STATES } from "./format.js";

const $ = (id) => document.getElementById(id);

export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#${name}`);
  svg.append(use);
  return svg;
}

export function make(tag, classes, ...children) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...children);
  return element;
}

export function countStates(trials) {
  const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const trial of Object.values(trials)) counts[trial.state] += 1;
  return counts;
}

export function drawTitle({ study, live, notes }) {
  put($("name"), study.name ?? "optuna-hermes");
  document.title = `${study.name ?? "optuna-hermes"} · ${live.text}`;
  showLive(live);
  const goal = study.maximize === null ? "" : study.maximize ? "maximised" : "minimised";
  const policy = study.policy && `policy ${study.policy}`;
  const others = study.others.length && `the broker also serves ${study.others.join(", ")}`;
  put($("about"), [study.named && goal, policy, others].filter(Boolean).join(" · "));
  const now = [...$("notes").children].map((each) => each.textContent);
  if (now.join("\n") !== notes.join("\n")) {
    $("notes").replaceChildren(...notes.map((text) => make("p", "", text)));
  }
}

export function showLive({ is, text }) {
  $("live").dataset.is = is;
  put($("live"), text);
}

export function drawTiles({ best, trials, totals }, deviceSeconds) {
  put($("best"), number(best?.value, 5));
  put($("best-trial"), best ? `trial ${best.trial}` : "no value yet");
  const counts = countStates(trials);
  const all = Object.keys(trials).length;
  put($("count"), String(all));
  const open = totals.unstarted ? `, ${totals.unstarted} to come` : "";
  put($("count-more"), `${counts.done} done${counts.failed ? `, ${counts.failed} failed` : ""}${open}`);
  put($("device-time"), duration(deviceSeconds));
  put($("device-time-more"), all ? `${duration(deviceSeconds / all)} a trial` : "of all trials");
  const { switches, overhead_seconds: lost, spent_seconds: ended } = totals;
  const spent = ended + deviceSeconds - totals.device_seconds;
  const share = switches === null || !spent ? null : (100 * lost) / spent;
  put($("overhead"), share === null ? "–" : `${share.toFixed(1)} %`);
  put($("overhead-more"), share === null ? "" : `of device time, ${plural(switches, "switch", "switches")}`);
  const { watt_hours: spentEnergy } = totals;
  $("energy-tile").hidden = spentEnergy === null;
  if (spentEnergy === null) return;
  put($("energy"), energy(spentEnergy));
  put($("energy-more"), all ? `${energy(spentEnergy / all)} a trial` : "");
}

// The states: legend of the charts, tally, and a choice of what is shown.
export function drawChips({ trials }, view) {
  const box = $("chips");
  const counts = countStates(trials);
  if (!box.children.length) {
    for (const state of STATES) {
      const chip = make("button", "", make("b"), make("span"));
      chip.type = "button";
      const sign = icon(state);
      sign.classList.add(`state-${state}`);
      chip.prepend(sign);
      chip.addEventListener("click", () => view.toggle(state));
      box.append(chip);
    }
  }
  STATES.forEach((state, i) => {
    const chip = box.children[i];
    chip.hidden = counts[state] === 0 && !view.only.has(state);
    chip.setAttribute("aria-pressed", view.only.has(state));
    put(chip.querySelector("b"), String(counts[state]));
    put(chip.querySelector("span"), state);
  });
}

export function drawDevices({ study, devices }, now) {
  put($("host"), study.host ? `of ${study.host}` : "");
  const list = $("devices");
  // Without a broker nobody tells of devices: the schedule has their room.
  list.closest(".panel").hidden = study.host === null;
  if (!devices.length) {
    list.replaceChildren(make("li", "more", "The broker has no device."));
    return;
  }
  const same = list.children.length === devices.length && list.firstChild.dataset.id;
  if (!same) list.replaceChildren(...devices.map(emptyDevice));
  devices.forEach((device, i) => fillDevice(list.children[i], device, now));
}

function emptyDevice() {
  const bar = make("progress", "");
  bar.max = 1;
  return make("li", "", make("span", "id"), make("span", "who"), make("span", "more"), make("span", "left"), bar);
}

function fillDevice(item, device, now) {
  const [id, who, more, left, bar] = item.children;
  const { holder } = device;
  item.dataset.id = device.id;
  put(id, device.label);
  id.title = device.id;
  put(who, holder ? holderName(holder) : device.state);
  put(more, device.problem || memory(device));
  bar.hidden = !holder;
  if (!holder) return put(left, "");
  const rest = Math.max(0, holder.until - now);
  put(left, holder.yielding ? "yielding" : rest > 0 ? `${duration(rest)} left` : "slice is over");
  bar.value = Math.min(1, (now - holder.since) / Math.max(0.1, holder.until - holder.since));
  bar.setAttribute("aria-label", `Slice of ${device.label}`);
}

function memory({ kind, memory_bytes: all, memory_free_bytes: free }) {
  if (!all) return kind;
  return free === null ? size(all) : `${size(all - free)} of ${size(all)}`;
}

function holderName({ trial, study, own }) {
  const who = trial === null ? "a new trial" : `trial ${trial}`;
  return own ? who : `${who} of ${study}`;
}
