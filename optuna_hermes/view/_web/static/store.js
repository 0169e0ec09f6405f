// The page as the server sends it: whole once, then what has changed.

const RETRY_MS = 1500;
// The server sends something every 15 s, and a tunnel that is dead closes no connection.
const SILENT_MS = 40000;
// The whole page is one event, which is heard once its last byte is there.
const WHOLE_MS = 600000;
const CHECK_MS = 5000;

export class Store {
  constructor() {
    this.page = null;
    this.lag = 0; // seconds by which this clock is ahead of the server's
    this.version = { curves: 0, bars: 0 };
  }

  now() {
    return Date.now() / 1000 - this.lag;
  }

  whole(page) {
    this.page = page;
    this.heard(page.now);
    this.version.curves += 1;
    this.version.bars += 1;
  }

  change(changes) {
    this.heard(changes.now);
    for (const [name, part] of Object.entries(changes)) {
      if (name === "trials" || name === "bars") this.entries(name, part);
      else if (name === "curves") this.curves(part);
      else this.page[name] = part;
      if (name in this.version) this.version[name] += 1;
    }
  }

  entries(name, part) {
    for (const [key, entry] of Object.entries(part)) {
      if (entry === null) delete this.page[name][key];
      else this.page[name][key] = entry;
    }
  }

  curves(part) {
    for (const [key, grown] of Object.entries(part)) {
      if (grown === null) {
        delete this.page.curves[key];
        continue;
      }
      const { from, ...columns } = grown;
      const curve = (this.page.curves[key] ??= {});
      for (const [name, column] of Object.entries(columns)) {
        curve[name] = [...(curve[name] ?? []).slice(0, from), ...column];
      }
    }
  }

  heard(now) {
    this.lag = Date.now() / 1000 - now;
  }
}

// Listens while the page can be seen: a browser has six connections for all pages of a server.
export function listen(store, { onChange, onLost }) {
  let source = null;
  let retry = null;
  let heardAt = 0;
  let silentMs = SILENT_MS;
  const open = (stream = window.openStream()) => {
    clearTimeout(retry);
    source?.close();
    source = stream;
    heardAt = Date.now();
    silentMs = WHOLE_MS;
    source.hearAll(({ type, data }) => {
      // It may have to come whole once more, to a page that does not keep up.
      if (type === "page") silentMs = Math.max(SILENT_MS, 2 * (Date.now() - heardAt));
      heardAt = Date.now();
      if (type === "beat") return;
      if (type === "page") store.whole(JSON.parse(data));
      else store.change(JSON.parse(data));
      onChange();
    });
    source.addEventListener("error", lost);
    if (source.readyState === EventSource.CLOSED) retry = setTimeout(again, RETRY_MS);
  };
  const lost = () => {
    onLost();
    source.close();
    retry = setTimeout(again, RETRY_MS);
  };
  const again = async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch("./", { method: "HEAD", signal: AbortSignal.timeout(CHECK_MS) });
      if (answer.status === 401) return location.reload();
    } catch {
      // Not there yet.
    }
    open();
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      clearTimeout(retry);
      source?.close();
    } else open();
  });
  setInterval(() => {
    const state = source?.readyState ?? EventSource.CLOSED;
    const limit = state === EventSource.OPEN ? silentMs : SILENT_MS;
    if (state !== EventSource.CLOSED && Date.now() - heardAt > limit) lost();
  }, CHECK_MS);
  if (!document.hidden) open(window.earlyStream);
  else window.earlyStream?.close();
}
