// The requests: to this server only, each with the token in a header. There is no cookie, so no
// other page and no other service on this host can make the browser send it.

const KEY = "sandbox-console-token";
const ROOT = new URL("../v1/", location.href);

export class Refused extends Error {
  constructor(status, told) {
    super(told?.message || `the server answered with ${status}`);
    this.status = status;
    this.code = told?.code || "";
    this.hint = told?.hint || "";
  }
}

let token = sessionStorage.getItem(KEY);

/** A token that came behind the # of a link; the link is cleaned before anything else happens. */
export function tokenOfLink() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (location.hash) history.replaceState(null, "", location.pathname + location.search);
  return found;
}

export function use(next) {
  token = next;
}

export function keep() {
  if (token) sessionStorage.setItem(KEY, token);
}

export function forget() {
  token = null;
  sessionStorage.removeItem(KEY);
}

export function hasToken() {
  return token !== null;
}

async function ask(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(new URL(path, ROOT), {
    cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer",
    ...options, headers,
  });
  if (response.ok) return response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // Not an answer of ours: the status is all there is to say.
  }
  throw new Refused(response.status, told);
}

export const overview = async (signal) => (await ask("console", { signal })).json();
export const session = async (name, signal) => (await ask(`console/${name}`, { signal })).json();
export const metrics = async (signal) => (await ask("metrics", { signal })).text();
export const endRun = (name, run) => ask(`console/${name}/runs/${run}`, { method: "DELETE" });
export const endSession = (name) => ask(`sessions/${name}`, { method: "DELETE" });

/** The lines of a run, as they come, until it has ended or `signal` says so. */
export async function* follow(name, run, signal) {
  const response = await ask(`console/${name}/runs/${run}`, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) yield JSON.parse(line);
  }
}
