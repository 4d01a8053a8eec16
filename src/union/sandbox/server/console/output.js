// The live output of one run. The size of the page is bounded, however much is written.

import { follow } from "./api.js";
import { bytes, el } from "./dom.js";
import { Sequences, visible } from "./plain.js";

export const MAX_LINES = 2000;
export const MAX_CHARACTERS = 400_000;
export const MAX_LINE_CHARACTERS = 4000;
const PICTURE_CHARACTERS = 4000; // What a picture counts as, of MAX_CHARACTERS.
const RETRY_MS = 1500;

/** Lines in a box; the oldest are removed when there are too many. */
export class Screen {
  #lines = []; // Number of characters of each line, in the order of the children of the box.
  #characters = 0;
  #open = null; // The last line, while it is incomplete: { stream, node, length, cut }.
  #sequences = { stdout: new Sequences(), stderr: new Sequences() };

  constructor(box) {
    this.box = box;
  }

  write(stream, text) {
    const follows = this.#atEnd();
    const parts = visible(this.#sequences[stream].strip(text)).split("\n");
    // Of a large piece, only the lines that would be kept are created.
    if (parts.length > MAX_LINES + 1) {
      this.#open = null;
      parts.splice(0, parts.length - MAX_LINES - 1);
    }
    parts.forEach((part, index) => {
      if (index > 0) this.#open = null;
      if (part || (index > 0 && index < parts.length - 1)) this.#put(stream, part);
    });
    this.#trim();
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Add a note of the console, styled so that a run cannot imitate it. */
  note(text) {
    const follows = this.#atEnd();
    this.#open = null;
    this.#add(el("div", { class: "note", text }), text.length);
    this.#trim();
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Add the source, a result or an error of a cell; all of it is text. */
  block(kind, text) {
    const follows = this.#atEnd();
    this.#open = null;
    const plain = visible(new Sequences().strip(text));
    this.#add(el("div", { class: kind, text: plain }), plain.length);
    this.#trim();
    if (follows) this.box.scrollTop = this.box.scrollHeight;
  }

  /** Draw a PNG file of a cell. A canvas needs no address that the page would have to allow. */
  async picture({ data, width, height }) {
    const follows = this.#atEnd();
    this.#open = null;
    const canvas = el("canvas", { width, height, role: "img", "aria-label": `Picture, ${width} by ${height}` });
    this.#add(el("div", { class: "picture" }, canvas), PICTURE_CHARACTERS);
    this.#trim();
    try {
      const raw = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
      const bitmap = await createImageBitmap(new Blob([raw], { type: "image/png" }));
      canvas.getContext("2d").drawImage(bitmap, 0, 0);
      canvas.dataset.drawn = "yes";
    } catch {
      canvas.replaceWith("(a picture that cannot be drawn)");
    }
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
    const room = part.slice(0, Math.max(0, MAX_LINE_CHARACTERS - line.length));
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
    while (this.#lines.length - gone > MAX_LINES || characters > MAX_CHARACTERS) {
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
  return `no exit code: ${visible(why)}`;
}

/** Show a run in `box` until `signal` is aborted; reconnect if the connection breaks. */
export async function show(box, name, run, signal) {
  while (!signal.aborted) {
    box.replaceChildren();
    const screen = new Screen(box);
    try {
      for await (const line of follow(name, run, signal)) {
        if (signal.aborted) return;
        if (line.stream) screen.write(line.stream, line.text);
        else if (line.code !== undefined) screen.block("code", line.code);
        else if (line.display === "picture") await screen.picture(line);
        else if (line.display === "note") screen.note(visible(line.text));
        else if (line.display) screen.block(line.display === "error" ? "error" : "result", line.text);
        else if (line.skipped) screen.note(`… ${bytes(line.skipped)} not shown …`);
        else if ("end" in line) {
          screen.note(ended(line.end));
          return;
        }
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status) {
        screen.note(error.message);
        return;
      }
      screen.note("connection lost; retrying");
    }
    await new Promise((wake) => { setTimeout(wake, RETRY_MS); });
  }
}
