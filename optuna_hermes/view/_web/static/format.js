// How figures are written for people; as `view/formats.py` writes them.

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 10 ** digits)) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (Math.round(10 * seconds) < 600) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60);
  const rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes}:${String(rest).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")} h`;
}

export function size(bytes) {
  if (Math.round(bytes) < 1000) return `${bytes.toFixed(0)} B`;
  for (const unit of ["KiB", "MiB"]) {
    bytes /= 1024;
    if (Math.round(10 * bytes) < 10000) return `${bytes.toFixed(1)} ${unit}`;
  }
  return `${(bytes / 1024).toFixed(1)} GiB`;
}

export function energy(wattHours) {
  const units = ["GWh", "MWh", "kWh", "Wh"];
  while (wattHours >= 999.5 && units.length > 1) {
    wattHours /= 1000;
    units.pop();
  }
  return `${(wattHours >= 1e-4 ? wattHours : 0).toPrecision(3)} ${units.at(-1)}`;
}

export function plural(count, noun, nouns = `${noun}s`) {
  return `${count} ${count === 1 ? noun : nouns}`;
}

export const STATES = ["running", "parked", "stored", "pending", "done", "failed"];

const TIERS = { resident: "on its device", host: "in host memory", disk: "on disk" };

export function where(trial) {
  if (trial.state === "running") return trial.device ?? trial.host ?? "";
  if (trial.state === "parked") return TIERS[trial.tier] ?? "";
  return trial.state === "stored" ? TIERS.disk : "";
}
