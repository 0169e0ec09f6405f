// What all charts share: colours of the theme, axes, the small box beside the cursor.

const probe = document.createElement("span");
probe.hidden = true;
document.documentElement.append(probe);
let colours = new Map();

export function colour(name) {
  if (!colours.has(name)) {
    probe.style.color = `var(--${name})`;
    colours.set(name, getComputedStyle(probe).color);
  }
  return colours.get(name);
}

export function forgetColours() {
  colours = new Map();
}

export const FONT = () => `12px ${getComputedStyle(document.body).fontFamily}`;

export function axis(options) {
  return {
    stroke: () => colour("soft"),
    font: FONT(),
    grid: { stroke: () => colour("line"), width: 1, filter: fewer },
    ticks: { show: false },
    gap: 6,
    size: 30,
    ...options,
  };
}

// Steps of an axis of seconds that people count in.
const [MINUTE, HOUR, DAY] = [60, 3600, 86400];
export const STEPS = [
  ...[0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30],
  ...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE),
  ...[1, 2, 4, 6, 12].map((n) => n * HOUR),
  ...[1, 2, 5, 10, 20, 50, 100, 200].map((n) => n * DAY),
];

// On a logarithmic axis of many decades only the decades have lines.
function fewer(plot, splits, index) {
  const scale = plot.scales[plot.axes[index].scale];
  if (scale.distr !== 3 || scale.max / scale.min < 300) return splits;
  return splits.map((each) => (Number.isInteger(Math.log10(each)) ? each : null));
}

// Values of very different sizes are read on a logarithmic scale.
export function suitsLog([low, high]) {
  return low > 0 && high / low > 10;
}

export function bounds(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// The bounds of nearly all values: a trial that diverges must not flatten all others. Only at the
// bad end is anything left out.
export function usualBounds(values, log, maximize) {
  const to = log ? Math.log : (value) => value;
  const back = log ? Math.exp : (value) => value;
  const sorted = Float64Array.from(values, to).sort();
  const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
  const room = 1.5 * (at(0.95) - at(0.05));
  const [low, high] = [sorted[0], sorted[sorted.length - 1]];
  const bad = maximize ? [Math.max(low, at(0.05) - room), high] : [low, Math.min(high, at(0.95) + room)];
  return bad.map(back);
}

export function span([low, high], log) {
  if (low > high) return [0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

// From values to pixels of the canvas, much faster than asking for each.
export function placer(plot, key, log) {
  const { min, max } = plot.scales[key];
  const { left, top, width, height } = plot.bbox;
  const to = log ? Math.log : (value) => value;
  const [low, high] = [to(min), to(max)];
  if (key === "x") return (value) => left + ((to(value) - low) / (high - low)) * width;
  return (value) => top + height - ((to(value) - low) / (high - low)) * height;
}

export function clipped(plot, draw) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  draw(ctx, devicePixelRatio);
  ctx.restore();
}

const tip = document.getElementById("tip");

export function showTip(text, x, y) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, y - tip.offsetHeight - 10)}px`;
}

// A plot that is as wide as its box, and made again when its scales are of another kind.
export class Plot {
  constructor(box, options) {
    this.box = box;
    this.options = options;
    this.plot = null;
    this.zoomed = false;
    this.none = document.createElement("p");
    this.none.className = "none";
    this.none.hidden = true;
    box.append(this.none);
    new ResizeObserver(() => this.resize()).observe(box);
  }

  make(log = false) {
    this.plot?.destroy();
    this.log = log;
    const { x, y, draw, hover, pick } = this.options;
    this.plot = new uPlot(
      {
        width: this.box.clientWidth,
        height: this.box.clientHeight,
        padding: [10, 28, 0, 0], // the last label of an x axis is centred at its end
        legend: { show: false },
        cursor: {
          points: { show: false },
          y: false,
          drag: { x: true, y: Boolean(y.zooms), uni: 24, setScale: true },
          bind: { dblclick: () => () => this.whole() },
        },
        scales: {
          x: { time: false, auto: false, range: (_, min, max) => [min, max] },
          y: { auto: false, distr: log ? 3 : 1, range: (_, min, max) => [min, max] },
        },
        axes: [axis(x), axis(y)],
        series: [{}, {}],
        hooks: {
          draw: [(plot) => clipped(plot, (ctx, ratio) => draw(plot, ctx, ratio))],
          setSelect: [(plot) => plot.select.width > 0 && this.zoom(true)],
          setCursor: [(plot) => hover?.(plot, plot.cursor.left, plot.cursor.top)],
        },
      },
      [[0, 1], [null, null]],
      this.box,
    );
    this.plot.over.addEventListener("click", () => pick?.());
    this.plot.over.addEventListener("mouseleave", () => hover?.(this.plot, -1, -1));
  }

  resize() {
    if (!this.plot || !this.box.clientWidth) return;
    this.plot.setSize({ width: this.box.clientWidth, height: this.box.clientHeight });
  }

  zoom(zoomed) {
    this.zoomed = zoomed;
    this.options.onZoom?.(zoomed);
  }

  whole() {
    this.zoom(false);
    this.options.update();
  }

  // Show this part; one that was chosen by hand stays.
  show(x, y, log = false) {
    if (!this.plot || log !== this.log) {
      this.zoom(false);
      this.make(log);
    }
    this.none.hidden = true;
    if (this.zoomed) this.plot.redraw(false);
    else {
      this.plot.batch(() => {
        this.plot.setScale("x", { min: x[0], max: x[1] });
        this.plot.setScale("y", { min: y[0], max: y[1] });
      });
      this.plot.redraw(false);
    }
  }

  empty(text) {
    this.plot?.destroy();
    this.plot = null;
    this.none.textContent = text;
    this.none.hidden = false;
  }
}
