// Output of sandboxed code is hostile. Here it becomes plain text: terminal sequences have no
// effect, invisible characters are shown, and the text direction cannot be changed.

const MAX_SEQUENCE = 4096; // A longer sequence would hide the text that follows.
const ESC = 0x1b;
const UNSEEN = /[\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb]|[\u{e0000}-\u{e0fff}]/gu;

/** Replace invisible characters by visible ones, except for line ends and tabs. */
export function visible(text) {
  return text
    .replace(/\r\n?|[\u2028\u2029\u0085]/g, "\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/\u007f/g, "\u2421")
    .replace(/[\u0080-\u009f]/g, "\ufffd")
    .replace(UNSEEN, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** Like visible(), on one line. */
export function oneLine(text) {
  return visible(text).replace(/\s*\n\s*/g, " ⏎ ").replace(/\t/g, " ").trim();
}

/** Removes terminal sequences from text that arrives in pieces; keeps only its state. */
export class Sequences {
  #state = "text";
  #length = 0;

  strip(text) {
    let out = "";
    let from = 0;
    for (let at = 0; at < text.length; at += 1) {
      const code = text.charCodeAt(at);
      if (this.#state === "text") {
        if (code === ESC || code === 0x9b || code === 0x9d || code === 0x90) {
          out += text.slice(from, at);
          this.#begin(code);
        }
        continue;
      }
      if (!this.#continues(code)) {
        // A line end is never part of a sequence, so it is always shown.
        from = code === 0x0a ? at : at + 1;
        this.#state = "text";
      }
    }
    return this.#state === "text" ? out + text.slice(from) : out;
  }

  #begin(code) {
    this.#length = 0;
    this.#state = { 0x9b: "csi", 0x9d: "string", 0x90: "string" }[code] ?? "escape";
  }

  #continues(code) {
    this.#length += 1;
    if (code === 0x0a || this.#length > MAX_SEQUENCE) return false;
    if (this.#state === "csi") return code < 0x40 || code > 0x7e;
    if (this.#state === "string") {
      if (code === ESC) this.#state = "string-end";
      return code !== 0x07 && code !== 0x9c;
    }
    if (this.#state === "string-end") {
      this.#state = "string";
      return code !== 0x5c;
    }
    // After an escape.
    if (code === 0x5b) this.#state = "csi";
    else if ([0x5d, 0x50, 0x58, 0x5e, 0x5f].includes(code)) this.#state = "string";
    else return code >= 0x20 && code <= 0x2f;
    return true;
  }
}
