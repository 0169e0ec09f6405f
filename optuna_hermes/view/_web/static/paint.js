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
    grid: { stroke: () => colour("line"), width: 1 },
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

// The lines and labels of a logarithmic axis: uPlot's own are too many, or none, over many decades.
export const LOG = {
  incrs: [1e308], // whatever uPlot takes as the difference of two lines, it is not used
  splits: (_, __, low, high) => {
    const [first, last] = [Math.floor(Math.log10(low)), Math.floor(Math.log10(high))];
    const digits = high / low < 300 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1];
    const every = Math.ceil((last - first) / 12) || 1;
    const found = [];
    for (let decade = Math.ceil(first / every) * every; decade <= last; decade += every) {
      for (const digit of digits) found.push(Number(`${digit}e${decade}`));
    }
    const inside = found.filter((each) => each >= low && each <= high);
    return inside.length > 1 ? inside : [low, high];
  },
  filter: (_, splits) => splits.map((each) => (splits.length < 5 || /[125]/.test(each.toExponential()[0]) ? each : null)),
};

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

// Beyond, what is computed of an axis' ends may overflow.
const MOST = 1e300;
const within = (value, low, high) => Math.max(low, Math.min(value, high));

// The bounds of the curves of trials that do not diverge, which would flatten all others. Only at the
// bad end is anything left out; ``usual_bounds`` of the plots has the same rule.
export function usualBounds(curves, log, maximize) {
  const sign = maximize ? -1 : 1;
  const to = (value) => sign * (log ? Math.log(value) : value);
  const sorted = curves.map((values) => Float64Array.from(values, to).sort());
  const at = (values, share) => values[Math.ceil(share * values.length) - 1];
  const quartile = (values, share) => at(Float64Array.from(values).sort(), share);
  const good = quartile(sorted.map((values) => values[0]), 0.25);
  const bad = quartile(sorted.map((values) => at(values, 0.95)), 0.75); // a few peaks count as little
  const fence = bad + 3 * (Math.max(bad - good, log ? 1 : Math.abs(bad)) || Infinity);
  let [low, high] = [Infinity, -Infinity];
  for (const values of sorted) {
    low = Math.min(low, values[0]);
    for (const value of values) if (value <= fence && value > high) high = value;
  }
  const ends = maximize ? [-high, -low] : [low, high];
  return ends.map((each) => (log ? Math.exp(each) : within(each, -MOST, MOST)));
}

export function span([low, high], log) {
  if (low > high) return [0, 1];
  if (log) {
    const room = low === high ? 2 : high ** 0.05 / low ** 0.05;
    return [low / room, high * room].map((each) => within(each, 1 / MOST, MOST));
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room].map((each) => within(each, -MOST, MOST));
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
        axes: [axis(x), axis(log ? { ...y, ...LOG } : y)],
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
