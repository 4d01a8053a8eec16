// One session: its properties, its runs and their output, its connections, its isolation.

import { CheckpointsView } from "./checkpoints.js";
import { bytes, clock, el, many, setAttr, patch, setText, span } from "./dom.js";
import { show } from "./output.js";
import { oneLine, visible } from "./plain.js";

const cell = (...options) => el("td", ...options);

/** Return the state of a run, and its badge: ok, warn, bad or live. */
export function stateOf(run) {
  if (!run.end) return run.pid === null ? ["starting", "live"] : ["running", "live"];
  if (run.end.refused) return ["refused", "bad"];
  if (run.end.failed) return ["failed", "bad"];
  const { returncode, reason } = run.end.exited;
  if (run.state === "lost") return [`${visible(reason) || "died"}, state lost`, "bad"];
  if (run.kind === "cell" && run.error && !reason) return [`raised ${oneLine(run.error)}`, "warn"];
  if (run.kind === "cell" && !reason && returncode === 0) return ["done", "ok"];
  if (reason && reason !== "signal") return [visible(reason), "warn"];
  return [`exit ${returncode}`, returncode === 0 ? "ok" : "warn"];
}

export function leaseOf(session) {
  if (session.lease_s !== null) return `no client; expires in ${span(session.lease_s)}`;
  if (session.connections) return `in use by ${many(session.connections, "connection")}`;
  return "in use by a request";
}

function table(id, label, ...heads) {
  return el("div", { class: "scroll" }, el("table", { id, "aria-label": label },
    el("thead", {}, el("tr", {}, ...heads.map(([text, kind]) => el("th", { text, class: kind, scope: "col" })))),
    el("tbody")));
}

export class SessionView {
  #chosen = null; // Number of the run whose output is shown.
  #pinned = false; // The user chose it, so a newer run does not replace it.
  #following = null;

  constructor(name, actions) {
    this.name = name;
    this.actions = actions;
    this.ended = false;
    this.node = this.#build();
  }

  #build() {
    this.badges = el("span", { class: "badges" });
    this.endButton = el("button", {
      type: "button", class: "danger", text: "End session",
      on: { click: () => this.actions.endSession(this.name) },
    });
    this.facts = el("dl", { class: "facts" });
    this.runs = table("runs", "Runs", ["#", "n"], ["Command"], ["State"], ["Started"], ["Duration", "n"],
      ["Output", "n"], ["CPU", "n"], ["Memory", "n"], ["Network", "n"], [""]);
    this.noRuns = el("p", { class: "empty", text: "No runs yet." });
    this.outputTitle = el("h3", { text: "Output" });
    this.screen = el("div", {
      id: "screen", class: "screen", tabindex: "0", role: "log", "aria-live": "off",
      "aria-label": "Output of the chosen run",
    });
    this.decisions = table("decisions", "Network decisions", ["Time"], ["Run", "n"], ["Destination"],
      ["Decision"], ["Reason"], ["Sent", "n"], ["Received", "n"]);
    this.noDecisions = el("p", { class: "empty" });
    this.checkpoints = new CheckpointsView(this.name);
    this.requests = table("requests", "HTTP requests", ["Time"], ["Run", "n"], ["Request"],
      ["Decision"], ["Status", "n"], ["Reason"], ["Sent", "n"], ["Received", "n"]);
    this.requestsTitle = el("h3", { text: "HTTP requests" });
    this.isolation = el("dl", { class: "facts", id: "isolation" });
    this.paths = el("div", { class: "paths" });
    return el("article", { "aria-label": `Session ${this.name.slice(0, 8)}` },
      el("div", { class: "title" },
        el("h2", {}, "Session ", el("code", { text: this.name.slice(0, 8), title: this.name })),
        this.badges, this.endButton),
      this.facts,
      el("section", { class: "card" }, el("h3", { text: "Runs" }), this.runs, this.noRuns),
      el("section", { class: "card", id: "output" }, this.outputTitle, this.screen),
      el("section", { class: "card" }, el("h3", { text: "Network" }), this.decisions, this.noDecisions,
        this.requestsTitle, this.requests),
      this.checkpoints.node,
      el("section", { class: "card" }, el("h3", { text: "Isolation" }), this.isolation,
        el("details", {}, el("summary", { text: "Paths visible in the sandbox" }), this.paths)));
  }

  update(seen) {
    const [mode, allow, deny] = [seen.network_mode, seen.network_allowlist, seen.network_denylist];
    this.#badges([[seen.backend, seen.backend === "none" ? "bad" : ""],
      [`network ${mode}`, mode === "open" ? "warn" : ""]]);
    this.#facts(this.facts, [
      ["Age", span(seen.now - seen.opened_at)],
      ["Lease", leaseOf(seen), seen.lease_s === null ? "" : "warn"],
      ["Timeout", seen.timeout_s === null ? "none" : span(seen.timeout_s)],
      ["Runs", `${many(seen.runs, "run")}, ${seen.running} running`],
      ["CPU", `${span(seen.cpu_s)} of ended runs`],
      ["Memory, peak", seen.peak_bytes ? bytes(seen.peak_bytes) : "–"],
      ["Work dir", oneLine(seen.work_dir)],
      ["Path on the host", oneLine(seen.host_dir)],
    ]);
    const runs = [...seen.recorded].reverse();
    this.#runs(runs, seen.now);
    this.#choose(runs);
    this.#decisions(seen.decisions, mode, allow, deny);
    this.checkpoints.update(seen.checkpoints ?? []);
    this.#requests(seen.requests);
    this.#isolation(seen);
  }

  /** Mark the session as ended; its data stays until another session is chosen. */
  end() {
    if (this.ended) return;
    this.ended = true;
    this.#badges([["ended", "warn"]]);
    this.endButton.disabled = true;
    for (const button of this.runs.querySelectorAll("button.danger")) button.disabled = true;
  }

  close() {
    this.#following?.abort();
  }

  #badges(wanted) {
    patch(this.badges, wanted, ([text]) => text, ([text]) => el("span", { text }),
      (node, [, kind]) => setAttr(node, "class", `badge ${kind}`));
  }

  #facts(place, wanted) {
    patch(place, wanted, ([name]) => name,
      ([name]) => el("div", {}, el("dt", { text: name }), el("dd")),
      (node, [, text, kind]) => {
        setText(node.lastChild, text);
        setAttr(node.lastChild, "class", kind || null);
      });
  }

  #runs(runs, now) {
    this.noRuns.hidden = runs.length > 0;
    this.runs.hidden = runs.length === 0;
    patch(this.runs.querySelector("tbody"), runs, (run) => run.run, (run) => this.#row(run),
      (row, run) => {
        const [state, kind] = stateOf(run);
        const usage = run.end?.exited?.usage;
        const badge = row.children[2].firstChild;
        setText(badge, state);
        setAttr(badge, "class", `badge ${kind}`);
        setAttr(badge, "title", visible(run.end?.failed?.reason || run.end?.refused?.message || "") || null);
        setText(row.children[3], `${span(Math.max(0, now - run.started_at))} ago`);
        setText(row.children[4], span((run.ended_at ?? now) - run.started_at));
        setText(row.children[5], bytes((run.stdout_bytes ?? 0) + (run.stderr_bytes ?? 0)));
        setText(row.children[6], usage ? span(usage.cpu_user_s + usage.cpu_system_s) : "–");
        setText(row.children[7], usage ? bytes(usage.peak_memory_bytes ?? usage.max_rss_bytes) : "–");
        setText(row.children[8], run.allowed + run.refused ? `${run.allowed} ✓ ${run.refused} ✗` : "–");
        row.lastChild.firstChild.hidden = run.end !== null;
        setAttr(row, "aria-selected", run.run === this.#chosen ? "true" : null);
      });
  }

  #row(run) {
    const command = oneLine(run.command);
    const choose = el("button", {
      type: "button", class: "command", title: visible(run.command), "aria-label": `Show the output of run ${run.run}`,
      on: { click: () => { this.#pinned = true; this.#follow(run.run); } },
    }, ...this.#label(run), el("code", { text: command || "(empty)" }));
    const end = el("button", {
      type: "button", class: "danger small", text: "End", "aria-label": `End run ${run.run}`,
      on: { click: () => this.actions.endRun(this.name, run.run, command) },
    });
    return el("tr", {}, cell({ class: "n", text: run.run }), cell({ class: "wide" }, choose),
      cell({}, el("span")), cell({ title: clock(run.started_at) }), cell({ class: "n" }),
      cell({ class: "n" }), cell({ class: "n" }), cell({ class: "n" }),
      cell({ class: "n", title: "connections allowed and refused" }), cell({ class: "n" }, end));
  }

  /** Name the context of a cell, and its network where it has one. */
  #label(run) {
    if (run.kind !== "context" && run.kind !== "cell") return [];
    const network = run.network_mode === "blocked" ? "" : ` · network ${run.network_mode}`;
    const text = run.kind === "context" ? run.language : `context ${run.context} · cell ${run.cell}${network}`;
    return [el("span", { class: "badge", text }), " "];
  }

  #choose(runs) {
    if (!runs.length) {
      if (!this.screen.firstChild) {
        this.screen.append(el("div", { class: "note", text: "Output appears here." }));
      }
      return;
    }
    if (this.#pinned || (this.#chosen !== null && !runs.find((r) => r.run === this.#chosen)?.end)) return;
    const wanted = runs.find((run) => !run.end) ?? runs[0];
    if (this.#chosen === null || (wanted.run !== this.#chosen && !wanted.end)) this.#follow(wanted.run);
  }

  #follow(run) {
    if (run === this.#chosen) return;
    this.#following?.abort();
    this.#chosen = run;
    this.#following = new AbortController();
    setText(this.outputTitle, `Output of run ${run}`);
    for (const row of this.runs.querySelectorAll("tbody tr")) {
      setAttr(row, "aria-selected", row.dataset.key === String(run) ? "true" : null);
    }
    show(this.screen, this.name, run, this.#following.signal);
  }

  #decisions(decisions, mode, allow, deny) {
    this.decisions.hidden = decisions.length === 0;
    this.noDecisions.hidden = decisions.length > 0;
    const lists = [allow.length ? `allowed: ${allow.join(", ")}` : "",
      deny.length ? `denied: ${deny.join(", ")}` : ""].filter(Boolean).join("; ");
    setText(this.noDecisions, mode === "blocked"
      ? "The network is blocked."
      : `No connections yet. Mode ${mode}${lists ? `; ${visible(lists)}` : ""}.`);
    // Decisions never change.
    patch(this.decisions.querySelector("tbody"), [...decisions].reverse(),
      (d) => d.number, (d) => this.#decision(d), () => {});
  }

  #decision(d) {
    const why = d.allowed ? d.error || d.rule || d.reason : d.reason || d.rule;
    const hint = d.suggestion ? `; allow it with ${d.suggestion}` : "";
    const [word, kind] = d.allowed ? (d.error ? ["failed", "warn"] : ["allowed", "ok"]) : ["refused", "bad"];
    const target = d.door === "dns" ? d.host : `${d.host}:${d.port}`;
    return el("tr", {}, cell({ text: clock(d.time) }), cell({ class: "n", text: d.run }),
      cell({ class: "wide" }, el("code", { text: oneLine(`${d.door} ${target}`), title: visible(d.address) })),
      cell({}, el("span", { class: `badge ${kind}`, text: word })),
      cell({ class: "wide why", text: oneLine(why + hint), title: visible(why + hint) }),
      cell({ class: "n", text: bytes(d.bytes_up) }), cell({ class: "n", text: bytes(d.bytes_down) }));
  }

  /** Requests to hosts with an Http entry: the server records no header, query, body or value. */
  #requests(requests) {
    this.requests.hidden = this.requestsTitle.hidden = requests.length === 0;
    patch(this.requests.querySelector("tbody"), [...requests].reverse(),
      (r) => r.number, (r) => this.#request(r), () => {});
  }

  #request(r) {
    const why = r.error || r.reason;
    const [word, kind] = r.allowed ? (r.error ? ["failed", "warn"] : ["allowed", "ok"]) : ["refused", "bad"];
    const text = `${r.method} ${r.host}${r.path}`;
    return el("tr", {}, cell({ text: clock(r.time) }), cell({ class: "n", text: r.run }),
      cell({ class: "wide" }, el("code", { text: oneLine(text), title: visible(text) })),
      cell({}, el("span", { class: `badge ${kind}`, text: word })),
      cell({ class: "n", text: r.status || "–" }),
      cell({ class: "wide why", text: oneLine(why), title: visible(why) }),
      cell({ class: "n", text: bytes(r.bytes_up) }), cell({ class: "n", text: bytes(r.bytes_down) }));
  }

  #isolation(seen) {
    const isolation = seen.isolation;
    const yes = (good, text) => [text, good ? "ok" : "warn"];
    const limits = Object.entries(isolation.limits).map(([name, by]) => `${name}: ${by}`).join(", ");
    const caps = isolation.capabilities;
    this.#facts(this.isolation, [
      ["Backend", ...yes(isolation.backend !== "none", isolation.backend)],
      ["Namespaces", ...yes(isolation.namespaces.length > 0, isolation.namespaces.join(" ") || "none")],
      ["Root", ...yes(isolation.root !== "host", isolation.root)],
      ["/proc", ...yes(isolation.proc === "fresh", isolation.proc)],
      ["User ids", ...yes(isolation.ids !== "host", isolation.ids)],
      ["Capabilities", ...yes(caps && !caps.length, caps ? caps.join(" ") || "none" : "not restricted")],
      ["No new privileges", ...yes(isolation.no_new_privs, isolation.no_new_privs ? "yes" : "no")],
      ["System calls", ...yes(isolation.seccomp, isolation.seccomp ? `filter ${isolation.seccomp.slice(0, 12)}` : "not filtered")],
      ["Landlock", ...yes(isolation.landlock_abi, isolation.landlock_abi ? `ABI ${isolation.landlock_abi}` : "not available or not used")],
      ["Egress", ...yes(isolation.egress === "kernel", isolation.egress)],
      ["Limits enforced by", limits || "none"],
    ]);
    const lists = [["read-only", seen.fs_allowlist.read_only], ["read-write", seen.fs_allowlist.read_write]];
    patch(this.paths, lists, ([name]) => name,
      ([name]) => el("p", {}, el("strong", { text: name }), " ", el("code")),
      (node, [, paths]) => setText(node.lastChild, paths.map(oneLine).join("  ") || "none"));
  }
}
