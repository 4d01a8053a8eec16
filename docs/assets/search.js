// Search of the documentation, from a file as well as over HTTP: the index is a script, because a page
// that was opened as a file may load scripts, but neither fetch data nor start workers.
"use strict";

/** Weight of a page by its place: answers first, records of the past last. */
const WEIGHTS = [
  [/^guides\/troubleshooting/, 0.7],
  [/^(index|tutorial)|^guides\/|^cookbook\/|^adapters\//, 1.3],
  [/^decisions\/|^project\/CHANGELOG|^examples\//, 0.4],
  [/^SPEC|^reference\/(promises|threats|portability|fuzzing|soak)/, 0.5],
];

function words(text) {
  return text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
}

/** Points of one section for all words in a query; 0 unless it contains all of them. */
function score(section, wanted) {
  const title = words(section.title), path = words(section.path), text = section.text.toLowerCase();
  let points = 0;
  for (const word of wanted) {
    const inTitle = title.some((one) => one.startsWith(word));
    const inPath = path.some((one) => one.startsWith(word));
    const inText = text.includes(word);
    if (!inTitle && !inPath && !inText) return 0;
    points += (inTitle ? 10 : 0) + (inPath ? 4 : 0) + (inText ? 2 : 0);
  }
  const phrase = wanted.join(" ");
  // `network_mode` is the phrase "network mode", too.
  const repeated = text.replaceAll("_", " ").split(phrase).length - 1;
  if (wanted.length > 1 && repeated) points += 8 + 2 * Math.min(repeated, 4);
  if (title.join(" ").startsWith(phrase)) points += 12;
  const found = WEIGHTS.find(([pattern]) => pattern.test(section.location));
  return points * (found ? found[1] : 1);
}

/** The best sections for a query, best first. */
function search(index, query, most = 12) {
  const wanted = words(query);
  if (!wanted.length) return [];
  return index
    .map((section, place) => ({ section, place, points: score(section, wanted) }))
    .filter((one) => one.points > 0)
    .sort((a, b) => b.points - a.points || a.place - b.place)
    .slice(0, most)
    .map((one) => one.section);
}

/** The part of a text around the first word that was searched for. */
function excerpt(text, query) {
  const first = words(query).map((word) => text.toLowerCase().indexOf(word)).filter((at) => at >= 0);
  const start = Math.max(0, Math.min(...first, text.length) - 50);
  // Whole words only.
  const cut = text.slice(start, start + 160).trim().replace(start ? /^\S*\s+/ : /^/, "");
  const part = start + 160 < text.length ? cut.replace(/\s+\S*$/, "") : cut;
  return (start ? "… " : "") + part + (start + 160 < text.length ? " …" : "");
}

function begin() {
  const base = document.currentScript.src.replace(/assets\/search\.js.*$/, "");
  const dialog = document.createElement("dialog");
  dialog.className = "site-search";
  dialog.setAttribute("aria-label", "Search");
  const input = document.createElement("input");
  Object.assign(input, { type: "search", placeholder: "Search", autocomplete: "off" });
  input.setAttribute("aria-label", "Search the documentation");
  const list = document.createElement("ol");
  const note = document.createElement("p");
  dialog.append(input, note, list);

  function draw() {
    const found = search(window.SEARCH_INDEX || [], input.value);
    note.textContent = input.value.trim() ? (found.length ? "" : "No page has all of these words.") : "";
    list.replaceChildren(
      ...found.map((section) => {
        const item = document.createElement("li"), link = document.createElement("a");
        const title = document.createElement("strong"), path = document.createElement("small");
        const text = document.createElement("span");
        link.href = base + section.location;
        title.textContent = section.title;
        path.textContent = section.path;
        text.textContent = excerpt(section.text, input.value);
        link.append(title, path, text);
        link.addEventListener("click", () => dialog.close());
        item.append(link);
        return item;
      }),
    );
  }

  function open() {
    if (!window.SEARCH_INDEX && !document.getElementById("search-index")) {
      const script = document.createElement("script");
      Object.assign(script, { id: "search-index", src: base + "assets/search-index.js" });
      script.addEventListener("load", draw);
      document.head.append(script);
    }
    if (!dialog.open) dialog.showModal();
    input.select();
  }

  function step(by) {
    const links = [...list.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement) + by;
    (at < 0 ? input : links[Math.min(at, links.length - 1)] || input).focus();
  }

  input.addEventListener("input", draw);
  dialog.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      step(event.key === "ArrowDown" ? 1 : -1);
    } else if (event.key === "Enter" && document.activeElement === input) {
      list.querySelector("a")?.click();
    }
    event.stopPropagation();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, [contenteditable]");
    if ((event.key === "/" && !typing) || (event.key === "k" && (event.ctrlKey || event.metaKey))) {
      event.preventDefault();
      open();
    }
  });
  document.addEventListener("DOMContentLoaded", () => {
    document.body.append(dialog);
    for (const button of document.querySelectorAll(".site-search-button")) {
      button.addEventListener("click", open);
    }
  });
}

if (typeof document === "undefined") module.exports = { search, excerpt };
else begin();
