// The output of one run, live. However much is written, the page stays the same size.

import { follow } from "./api.js";
import { bytes, el } from "./dom.js";
import { Sequences, visible } from "./plain.js";

export const MOST_LINES = 2000;
export const MOST_CHARACTERS = 400_000;
export const MOST_IN_LINE = 4000;
const RETRY_MS = 1500;

/** Lines in a box; the oldest go when there are too many. */
export class Screen {
  #lines = []; // the characters in each, in step with the children of the box
  #characters = 0;
  #open = null; // the last line, while it has no end: { stream, node, length, cut }
  #sequences = { stdout: new Sequences(), stderr: new Sequences() };

  constructor(box) {
    this.box = box;
  }

  write(stream, text) {
    const follows = this.#atEnd();
    const parts = visible(this.#sequences[stream].strip(text)).split("\n");
    // Of very much at once, only what would stay is made.
    if (parts.length > MOST_LINES + 1) {
      this.#open = null;
      parts.splice(0, parts.length - MOST_LINES - 1);
    }
    parts.forEach((part, index) => {
      if (index > 0) this.#open = null;
      if (part || (index > 0 && index < parts.length - 1)) this.#put(stream, part);
    });
    this.#trim();
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  /** A line of our own, which the run could not have written: it has another look. */
  note(text) {
    const follows = this.#atEnd();
    this.#open = null;
    this.#add(el("div", { class: "note", text }), text.length);
    this.#trim();
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  #atEnd() {
    return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
  }

  #put(stream, part) {
    if (!this.#open || this.#open.stream !== stream) {
      const node = el("div", { class: stream });
      this.#add(node, 0);
      this.#open = { stream, node, length: 0, cut: 0 };
    }
    const line = this.#open;
    const room = part.slice(0, Math.max(0, MOST_IN_LINE - line.length));
    line.length += room.length;
    line.cut += part.length - room.length;
    line.node.firstChild ? line.node.firstChild.appendData(room) : line.node.append(room);
    if (line.cut) line.node.dataset.cut = ` … ${line.cut.toLocaleString("en")} more characters`;
    this.#lines[this.#lines.length - 1] += room.length;
    this.#characters += room.length;
  }

  #add(node, length) {
    this.box.append(node);
    this.#lines.push(length);
    this.#characters += length;
  }

  #trim() {
    let gone = 0;
    let characters = this.#characters;
    while (this.#lines.length - gone > MOST_LINES || characters > MOST_CHARACTERS) {
      characters -= this.#lines[gone];
      gone += 1;
    }
    if (!gone) return;
    this.#lines.splice(0, gone);
    this.#characters = characters;
    for (let n = 0; n < gone; n += 1) this.box.firstChild.remove();
    if (!this.#lines.length) this.#open = null;
  }
}

function ended(end) {
  if (end?.exited) {
    const { returncode, reason } = end.exited;
    return reason ? `ended: ${reason} (exit code ${returncode})` : `ended with exit code ${returncode}`;
  }
  const why = end?.failed?.reason || end?.refused?.message || "unknown";
  return `no exit: ${visible(why)}`;
}

/** Shows a run in `box` until `signal` ends it. A broken connection is taken up again. */
export async function show(box, name, run, signal) {
  while (!signal.aborted) {
    box.replaceChildren();
    const screen = new Screen(box);
    try {
      for await (const told of follow(name, run, signal)) {
        if (signal.aborted) return;
        if (told.text !== undefined) screen.write(told.stream, told.text);
        else if (told.skipped) screen.note(`… ${bytes(told.skipped)} not shown …`);
        else if ("end" in told) {
          screen.note(ended(told.end));
          return;
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status) {
        screen.note(error.message);
        return;
      }
      screen.note("the connection broke; trying again");
    }
    await new Promise((wake) => { setTimeout(wake, RETRY_MS); });
  }
}
