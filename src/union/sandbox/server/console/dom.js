// Elements and number formats. Text becomes text nodes only: this page never parses markup.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element; `options` has attributes, `class`, `text` and `on` (listeners). */
export function el(tag, options = {}, ...children) {
  const made = tag === "svg" || tag === "path"
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = value;
    else if (name === "on") {
      for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    } else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Set the text if it has changed, so that a selection is preserved. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttr(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Match the children of `parent` to `items`, in order; existing nodes are kept and updated. */
export function patch(parent, items, key, make, update) {
  const before = new Map();
  for (const node of parent.children) before.set(node.dataset.key, node);
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = before.get(name);
    before.delete(name);
    if (!node) {
      node = make(item);
      node.dataset.key = name;
    }
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of before.values()) node.remove();
}

/** Format a duration. */
export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0.0995) return `${Math.round(Math.max(seconds, 0) * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 99.5 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

export function many(count, one, more = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : more}`;
}
