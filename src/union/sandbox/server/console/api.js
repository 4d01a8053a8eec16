// Requests to this server, each with the token in a header. No cookie is used, so another page or
// another service on this host cannot make the browser send the token.

const KEY = "sandbox-console-token";
const ROOT = new URL("../v1/", location.href);

export class HttpError extends Error {
  constructor(status, payload) {
    super(payload?.message || `HTTP status ${status}`);
    this.status = status;
    this.code = payload?.code || "";
    this.hint = payload?.hint || "";
  }
}

let token = sessionStorage.getItem(KEY);

/** Return the token in the fragment of the address, and remove the fragment. */
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

async function request(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(new URL(path, ROOT), {
    cache: "no-store", credentials: "omit", redirect: "error", referrerPolicy: "no-referrer",
    ...options, headers,
  });
  if (response.ok) return response;
  let payload = null;
  try {
    payload = (await response.json()).error;
  } catch {
    // The body is not JSON: only the status is reported.
  }
  throw new HttpError(response.status, payload);
}

export const overview = async (signal) => (await request("console", { signal })).json();
export const session = async (name, signal) => (await request(`console/${name}`, { signal })).json();
export const metrics = async (signal) => (await request("metrics", { signal })).text();
export const difference = async (name, checkpoint) => (await request(`console/${name}/diff/${checkpoint}`)).json();
export const endRun = (name, run) => request(`console/${name}/runs/${run}`, { method: "DELETE" });
export const endSession = (name) => request(`sessions/${name}`, { method: "DELETE" });

/** Yield the lines of a run as they arrive, until it has ended or `signal` is aborted. */
export async function* follow(name, run, signal) {
  const response = await request(`console/${name}/runs/${run}`, { signal });
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
