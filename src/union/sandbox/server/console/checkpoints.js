// The checkpoints of a session: what was done with them, and what has changed since one.

import { difference } from "./api.js";
import { bytes, clock, el, many, patch, setText } from "./dom.js";
import { oneLine, visible } from "./plain.js";

const SIGNS = { added: ["+", "ok"], changed: ["~", "warn"], deleted: ["−", "bad"] };
const KINDS = { "+": "added", "-": "deleted", "@": "place" };

export class CheckpointsView {
  #session;
  #asked = 0; // Only the answer to the latest question is shown.

  constructor(session) {
    this.#session = session;
    this.list = el("tbody");
    this.table = el("div", { class: "scroll" }, el("table", { id: "checkpoints", "aria-label": "Checkpoints" },
      el("thead", {}, el("tr", {}, ...["Time", "Action", "Checkpoint", "Name", ""].map(
        (text) => el("th", { text, scope: "col" })))),
      this.list));
    this.title = el("h4", { hidden: true });
    this.changes = el("div", {
      id: "changes", class: "screen", tabindex: "0", hidden: true, "aria-label": "Changes since the checkpoint",
    });
    this.node = el("section", { class: "card", hidden: true }, el("h3", { text: "Checkpoints" }),
      this.table, this.title, this.changes);
  }

  update(events) {
    this.node.hidden = events.length === 0;
    const dropped = new Set(events.filter((e) => e.action === "drop").map((e) => e.id));
    // Events never change; the latest is first.
    const items = events.map((event, at) => ({ ...event, at: `${event.time} ${at}` })).reverse();
    patch(this.list, items, (e) => e.at, (e) => this.#row(e), (row, e) => {
      row.lastChild.firstChild.hidden = dropped.has(e.id) || e.action === "drop" || e.action === "rollback";
    });
  }

  #row(event) {
    const compare = el("button", {
      type: "button", class: "small", text: "Compare", "aria-label": `Compare with checkpoint ${event.id}`,
      on: { click: () => this.#compare(event) },
    });
    return el("tr", {}, el("td", { text: clock(event.time) }), el("td", {}, el("span", { class: "badge", text: event.action })),
      el("td", {}, el("code", { text: event.id })), el("td", { class: "wide", text: oneLine(event.name) }),
      el("td", { class: "n" }, compare));
  }

  async #compare(event) {
    const asked = ++this.#asked;
    let lines;
    let title = `Changes since ${oneLine(event.name) || event.id}`;
    try {
      const found = await difference(this.#session, event.id);
      title += `: ${many(found.total, "change")}`;
      lines = found.changes.flatMap((change) => this.#lines(change));
      if (found.changes.length < found.total) lines.push(["note", `${found.total - found.changes.length} more`]);
    } catch (error) {
      lines = [["note", error.message]];
    }
    if (asked !== this.#asked) return;
    this.title.hidden = this.changes.hidden = false;
    setText(this.title, title);
    this.changes.replaceChildren(...lines.map(([kind, text]) => el("div", { class: kind, text: visible(text) })));
  }

  #lines(change) {
    const [sign, kind] = SIGNS[change.action] ?? ["?", ""];
    const head = [`head ${kind}`, `${sign} ${oneLine(change.path)}  ${bytes(change.size)}`];
    const text = (change.text ?? "").split("\n").slice(2, -1); // without the names of the files
    return [head, ...text.map((line) => [KINDS[line[0]] ?? "", line])];
  }
}
