// The page: signs in, requests the state once a second and shows it.

import * as api from "./api.js";
import { el, many, setAttr, patch, setText, span } from "./dom.js";
import { forgetMetrics, showTiles, upFor } from "./metrics.js";
import { leaseOf, SessionView } from "./session.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 8000;
const by = (id) => document.getElementById(id);

let view = null;
let timer = 0;
let misses = 0;
let turn = 0; // Counts sign-ins: a response to an earlier one is dropped.

// Signing in.

function showLogin(error = "") {
  turn += 1;
  clearTimeout(timer);
  api.forget();
  leave();
  by("console").hidden = true;
  by("login").hidden = false;
  setText(by("login-error"), error);
  setAttr(by("token"), "aria-invalid", error ? "true" : null);
  by("token").value = "";
  by("token").focus();
}

/** Remove all data from the page. */
function leave() {
  view?.close();
  view = null;
  forgetMetrics();
  for (const id of ["detail", "session-list", "tiles", "server", "state", "session-count"]) {
    by(id).replaceChildren();
  }
}

async function enter(token, refusedText) {
  api.use(token);
  try {
    await api.overview();
  } catch (error) {
    showLogin(error.status === 401 ? refusedText
      : error.status ? error.message : "The server does not respond.");
    return;
  }
  api.keep();
  by("login").hidden = true;
  by("console").hidden = false;
  by("logout").hidden = !api.hasToken();
  misses = 0;
  turn += 1;
  await refresh(turn);
}

// Refresh.

async function refresh(mine) {
  clearTimeout(timer);
  try {
    const signal = AbortSignal.timeout(TIMEOUT_MS);
    const [seen, metrics] = await Promise.all([api.overview(signal), api.metrics(signal)]);
    if (mine !== turn) return;
    await update(seen, metrics, signal, mine);
    if (mine !== turn) return;
    misses = 0;
    state(seen.draining ? "shutting down" : "live", seen.draining ? "warn" : "ok");
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) {
      showLogin("The token is no longer valid.");
      return;
    }
    misses += 1;
    state(error.status ? error.message : "the server does not respond; retrying", "bad");
  }
  if (!document.hidden) {
    timer = setTimeout(refresh, INTERVAL_MS * Math.min(1 + misses, 10), mine);
  }
}

function state(text, kind) {
  setText(by("state"), text);
  setAttr(by("state"), "class", `badge ${kind}`);
}

async function update(seen, metrics, signal, mine) {
  setText(by("server"), `${location.host} · ${upFor(seen)}`);
  showTiles(by("tiles"), metrics, seen);
  const sessions = [...seen.sessions].sort((a, b) => b.opened_at - a.opened_at);
  if (!view && sessions.length) choose((sessions.find((s) => s.running) ?? sessions[0]).session);
  showSessions(sessions, seen.now);
  if (!view) {
    const text = "Sessions, runs and their output appear here.";
    if (!by("detail").firstChild) by("detail").append(el("p", { class: "empty", text }));
    return;
  }
  const shown = view;
  if (!sessions.some((s) => s.session === shown.name)) {
    shown.end();
    return;
  }
  try {
    const detail = await api.session(shown.name, signal);
    if (mine === turn && view === shown) shown.update(detail);
  } catch (error) {
    if (error.status !== 404) throw error;
    shown.end();
  }
}

function showSessions(sessions, now) {
  setText(by("session-count"), String(sessions.length));
  by("no-sessions").hidden = sessions.length > 0;
  patch(by("session-list"), sessions, (s) => s.session, (s) => el("li", {},
    el("button", { type: "button", on: { click: () => { choose(s.session); refresh(turn); } } },
      el("span", { class: "row" }, el("code", { text: s.session.slice(0, 8) }),
        el("span", { class: `badge ${s.backend === "none" ? "bad" : ""}`, text: s.backend }),
        el("span", { class: "badge live" })),
      el("span", { class: "quiet" }), el("span", { class: "quiet" }))),
  (item, s) => {
    const [row, age, lease] = item.firstChild.children;
    const live = row.lastChild;
    live.hidden = s.running === 0;
    setText(live, `${s.running} running`);
    setText(age, `${span(now - s.opened_at)} old · ${many(s.runs, "run")}`);
    setText(lease, leaseOf(s));
    setAttr(lease, "class", s.lease_s === null ? "quiet" : "quiet warn");
    setAttr(item.firstChild, "aria-current", view?.name === s.session ? "true" : null);
  });
}

function choose(name) {
  if (view?.name === name) return;
  view?.close();
  view = new SessionView(name, { endRun, endSession });
  by("detail").replaceChildren(view.node);
}

// Ending runs and sessions.

function confirm(title, text) {
  setText(by("ask-title"), title);
  setText(by("ask-text"), text);
  by("ask").showModal();
  return new Promise((resolve) => {
    by("ask-yes").onclick = () => by("ask").close("yes");
    by("ask-no").onclick = () => by("ask").close("");
    by("ask").onclose = () => {
      // The event may belong to the previous dialog, while this one is open.
      if (!by("ask").open) resolve(by("ask").returnValue === "yes");
    };
    by("ask").returnValue = "";
  });
}

async function act(call) {
  try {
    await call();
  } catch (error) {
    if (error.status !== 404) { // It has already ended.
      state(error.message, "bad");
      return;
    }
  }
  refresh(turn);
}

async function endRun(name, run, command) {
  if (await confirm(`End run ${run}?`, `${command.slice(0, 200)} — all processes of this run are ended.`)) {
    await act(() => api.endRun(name, run));
  }
}

async function endSession(name) {
  if (await confirm(`End session ${name.slice(0, 8)}?`,
    "Its commands are ended, and its work dir is removed.")) {
    await act(() => api.endSession(name));
  }
}

// Start.

by("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  enter(by("token").value.trim(), "Invalid token.");
});
by("logout").addEventListener("click", () => showLogin());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !by("console").hidden) refresh(turn);
});

const fromLink = api.tokenOfLink();
if (fromLink) enter(fromLink, "The token in this link is invalid.");
else if (api.hasToken()) enter(sessionStorage.getItem("sandbox-console-token"), "");
else enter(null, ""); // The server may not require a token.
