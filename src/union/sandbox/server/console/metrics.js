// Resource use of the server, from its metrics, with the last minute as a line.

import { bytes, el, setText, span } from "./dom.js";

const MAX_SAMPLES = 60;
const history = [];

/** Return the sums of the samples by name. */
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^sandbox_(\w+)(?:\{[^}]*\})? (\S+)$/.exec(line);
    if (match) found[match[1]] = (found[match[1]] || 0) + Number(match[2]);
  }
  return found;
}

const rate = (name) => (now, before) => (before
  ? Math.max(0, (now[name] - before[name]) / Math.max(now.at - before.at, 0.05)) : 0);

const TILES = [
  ["Sessions", (m, _, seen) => `${m.sessions} of ${seen.max_sessions}`, (m) => m.sessions],
  ["Running", (m, _, seen) => `${m.runs} of ${seen.max_runs}`, (m) => m.runs],
  ["Runs started", (m) => m.runs_started_total.toLocaleString("en"), rate("runs_started_total")],
  ["CPU", (m, b) => `${Math.round(100 * rate("cpu_seconds_total")(m, b))} %`,
    rate("cpu_seconds_total"), "of one core, by the server process"],
  ["Memory, peak", (m) => bytes(m.max_resident_bytes), (m) => m.max_resident_bytes,
    "of the server process"],
  ["Sent to clients", (m, b) => `${bytes(rate("sent_bytes_total")(m, b))}/s`,
    rate("sent_bytes_total")],
  ["Unread output", (m) => bytes(m.buffer_bytes), (m) => m.buffer_bytes,
    "output that clients have not received yet"],
  ["Refused", (m) => (m.requests_refused_total || 0).toLocaleString("en"),
    rate("requests_refused_total"), "requests without a valid token, over a limit, or malformed"],
];

function line(values) {
  const highest = Math.max(...values, 1e-9);
  const step = 100 / (MAX_SAMPLES - 1);
  const left = 100 - step * (values.length - 1);
  return values.map((value, at) => `${at ? "L" : "M"}${(left + at * step).toFixed(1)} ${
    (23 - 21 * (value / highest)).toFixed(1)}`).join("");
}

export function showTiles(place, text, seen) {
  const now = { ...parse(text), at: performance.now() / 1000 };
  now.requests_refused_total ??= 0;
  history.push(now);
  if (history.length > MAX_SAMPLES + 1) history.shift();
  const before = history.at(-2);
  if (!place.firstChild) {
    for (const [name, , , title] of TILES) {
      place.append(el("div", { class: "tile", title },
        el("span", { class: "name", text: name }), el("strong"),
        el("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
          el("path"))));
    }
  }
  TILES.forEach(([, shown, value], at) => {
    const tile = place.children[at];
    setText(tile.querySelector("strong"), shown(now, before, seen));
    const values = history.slice(-MAX_SAMPLES).map((m) => value(m, history[history.indexOf(m) - 1]));
    tile.querySelector("path").setAttribute("d", line(values));
  });
}

export function upFor(seen) {
  return `version ${seen.version}, up for ${span(seen.now - seen.started_at)}`;
}

export function forgetMetrics() {
  history.length = 0;
}
