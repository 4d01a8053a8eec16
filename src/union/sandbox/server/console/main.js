// The page: signs in, asks once a second, shows the answer.

import * as api from "./api.js";
import { el, many, mark, patch, say, span } from "./dom.js";
import { forgetMetrics, showTiles, upFor } from "./metrics.js";
import { leaseOf, SessionView } from "./session.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 8000;
const by = (id) => document.getElementById(id);

let view = null;
let timer = 0;
let misses = 0;
let turn = 0; // counts sign-ins: an answer to an earlier one is dropped

// Signing in.

function showLogin(error = "") {
  turn += 1;
  clearTimeout(timer);
  api.forget();
  leave();
  by("console").hidden = true;
  by("login").hidden = false;
  say(by("login-error"), error);
  mark(by("token"), "aria-invalid", error ? "true" : null);
  by("token").value = "";
  by("token").focus();
}

/** Nothing of what was shown stays in the page. */
function leave() {
  view?.close();
  view = null;
  forgetMetrics();
  for (const id of ["detail", "session-list", "tiles", "server", "state", "session-count"]) {
    by(id).replaceChildren();
  }
}

async function enter(token, said) {
  api.use(token);
  try {
    await api.overview();
  } catch (error) {
    showLogin(error.status === 401 ? said
      : error.status ? error.message : "The server does not answer.");
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

// Once a second.

async function refresh(mine) {
  clearTimeout(timer);
  try {
    const signal = AbortSignal.timeout(PATIENCE_MS);
    const [seen, metrics] = await Promise.all([api.overview(signal), api.metrics(signal)]);
    if (mine !== turn) return;
    await update(seen, metrics, signal, mine);
    if (mine !== turn) return;
    misses = 0;
    state(seen.draining ? "shutting down" : "live", seen.draining ? "warn" : "ok");
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) {
      showLogin("The server does not accept this token any more.");
      return;
    }
    misses += 1;
    state(error.status ? error.message : "the server does not answer; trying again", "bad");
  }
  if (!document.hidden) {
    timer = setTimeout(refresh, EVERY_MS * Math.min(1 + misses, 10), mine);
  }
}

function state(text, kind) {
  say(by("state"), text);
  mark(by("state"), "class", `badge ${kind}`);
}

async function update(seen, metrics, signal, mine) {
  say(by("server"), `${location.host} · ${upFor(seen)}`);
  showTiles(by("tiles"), metrics, seen);
  const sessions = [...seen.sessions].sort((a, b) => b.opened_at - a.opened_at);
  if (!view && sessions.length) choose((sessions.find((s) => s.running) ?? sessions[0]).session);
  showSessions(sessions, seen.now);
  if (!view) {
    const text = "Sessions, their runs and what those write appear here.";
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
  say(by("session-count"), String(sessions.length));
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
    say(live, `${s.running} running`);
    say(age, `${span(now - s.opened_at)} old · ${many(s.runs, "run")}`);
    say(lease, leaseOf(s));
    mark(lease, "class", s.lease_s === null ? "quiet" : "quiet warn");
    mark(item.firstChild, "aria-current", view?.name === s.session ? "true" : null);
  });
}

function choose(name) {
  if (view?.name === name) return;
  view?.close();
  view = new SessionView(name, { endRun, endSession });
  by("detail").replaceChildren(view.node);
}

// Ending something.

function ask(title, text) {
  say(by("ask-title"), title);
  say(by("ask-text"), text);
  by("ask").showModal();
  return new Promise((resolve) => {
    by("ask-yes").onclick = () => by("ask").close("yes");
    by("ask-no").onclick = () => by("ask").close("");
    by("ask").onclose = () => {
      // Told late: it may be about the question before, and this one stands open.
      if (!by("ask").open) resolve(by("ask").returnValue === "yes");
    };
    by("ask").returnValue = "";
  });
}

async function act(call) {
  try {
    await call();
  } catch (error) {
    if (error.status !== 404) { // gone already: what was wanted
      state(error.message, "bad");
      return;
    }
  }
  refresh(turn);
}

async function endRun(name, run, command) {
  if (await ask(`End run ${run}?`, `${command.slice(0, 200)} — it and everything that it started ends.`)) {
    await act(() => api.endRun(name, run));
  }
}

async function endSession(name) {
  if (await ask(`End session ${name.slice(0, 8)}?`,
    "Its commands end, and its work dir is removed with everything in it.")) {
    await act(() => api.endSession(name));
  }
}

// The beginning.

by("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  enter(by("token").value.trim(), "The server does not accept this token.");
});
by("logout").addEventListener("click", () => showLogin());
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !by("console").hidden) refresh(turn);
});

const fromLink = api.tokenOfLink();
if (fromLink) enter(fromLink, "The server does not accept the token of this link.");
else if (api.hasToken()) enter(sessionStorage.getItem("sandbox-console-token"), "");
else enter(null, ""); // a server that asks for no token needs no question either
