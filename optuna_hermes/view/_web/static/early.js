// Runs before anything is drawn: a chosen theme does not flash, and the study is under way while
// the rest of the page is being read.
"use strict";
try {
  const theme = localStorage.getItem("hermes-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage: the system's theme it is.
}

// A stream of events, each given to `hear` from when there is one; what came before waits for it.
window.openStream = () => {
  const source = new EventSource("api/events");
  const waiting = [];
  for (const name of ["page", "change", "beat"]) {
    source.addEventListener(name, (event) => {
      if (source.hear) source.hear(event);
      else waiting.push(event);
    });
  }
  source.hearAll = (hear) => {
    source.hear = hear;
    waiting.splice(0).forEach(hear);
  };
  return source;
};
if (!document.hidden) window.earlyStream = window.openStream();
