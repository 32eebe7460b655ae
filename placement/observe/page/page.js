// Draws /workers once a second. Text only ever goes in by textContent: names come from users.
"use strict";

const STATES = { CPU_OFFLOADED: ["off the GPU", "--off"], GPU_RESIDENT: ["on the GPU", "--gpu"], SYNCING: ["publishing weights", "--sync"], TRAINING: ["training", "--train"] };
const EVERY_MILLISECONDS = 1000, ROW = 20, LEFT = 150;
const SVG = "http://www.w3.org/2000/svg";
let lastAnswer = null;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}

function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    // One by one: a page that forbids inline styles still lets a script set them.
    if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (value !== null) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count, unit = 0;
  while (Math.abs(value) >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return unit === 0 ? `${count} B` : `${value.toPrecision(value >= 1000 ? 4 : 3)} ${units[unit]}`;
}

function ago(seconds) {
  if (seconds < 1) return "now";
  if (seconds < 120) return `${Math.floor(seconds)} s ago`;
  return seconds < 7200 ? `${Math.floor(seconds / 60)} min ago` : `${Math.floor(seconds / 3600)} h ago`;
}

function duration(seconds) {
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  return seconds < 1 ? `${(seconds * 1e3).toPrecision(3)} ms` : `${seconds.toPrecision(3)} s`;
}

function table(label, columns, rows) {
  const head = make("tr", {}, ...columns.map(([name, kind]) => make("th", { scope: "col", class: kind }, name)));
  const lines = rows.map((row) => make("tr", {}, ...row.map((cell, i) =>
    make(i === 0 ? "th" : "td", { class: columns[i][1], scope: i === 0 ? "row" : null }, cell))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, make("table", {},
    make("caption", { class: "hidden" }, label), make("thead", {}, head), make("tbody", {}, ...lines)));
}

function state(name) {
  const swatch = make("span", { class: "swatch", style: { background: `var(${STATES[name][1]})` } });
  return make("span", {}, swatch, STATES[name][0]);
}

// What is on the device, to scale: each handle, what else is in use, what is free; a dashed line for the budget.
function bar(snapshot) {
  const total = Math.max(snapshot.device_total_bytes, 1);
  const held = snapshot.handles.filter((handle) => handle.resident_bytes > 0);
  const sum = held.reduce((all, handle) => all + handle.resident_bytes, 0);
  const others = Math.max(snapshot.device_used_bytes - sum, 0);
  const part = (name, count, colour, test) => make("span", {
    "data-part": test, title: `${name}: ${bytes(count)}`, style: { width: `${100 * count / total}%`, background: `var(${colour})` } }, name);
  const parts = held.map((handle) => part(handle.name, handle.resident_bytes, STATES[handle.state][1], handle.name));
  if (others > 0) parts.push(part("others", others, "--other", "others"));
  const words = [...held.map((handle) => `${handle.name} ${bytes(handle.resident_bytes)}`), `others ${bytes(others)}`,
    `of ${bytes(total)} in all`, `budget ${bytes(snapshot.budget_bytes)}`];
  const mark = snapshot.budget_bytes < total ? [make("i", { style: { left: `${100 * snapshot.budget_bytes / total}%` }, title: "budget" })] : [];
  return make("div", { class: "bar", role: "img", "aria-label": `device memory: ${words.join(", ")}` }, ...parts, ...mark);
}

// The last minutes: a row for the phases and one for each handle.
function timeline(worker) {
  const wide = Math.max(document.getElementById("worker").clientWidth - 76, 360); // one unit is one pixel: text keeps its size
  const shown = Number(document.getElementById("span").value);
  const now = worker.snapshot.taken_timestamp_seconds, start = now - shown;
  const x = (time) => LEFT + (wide - LEFT) * Math.min(Math.max((time - start) / shown, 0), 1);
  const rows = [["phases", worker.phases, null], ...Object.entries(worker.timeline).map(([name, spans]) => [name, spans, STATES])];
  const svg = draw("svg", { viewBox: `0 0 ${wide} ${rows.length * ROW + 18}`, role: "img",
    "aria-label": `states of the last ${shown} seconds; the table of handles says what they are now` });
  rows.forEach(([name, spans, states], row) => {
    const label = draw("text", { x: 0, y: row * ROW + 14 });
    label.textContent = name.length > 20 ? `${name.slice(0, 19)}…` : name;
    svg.append(label);
    for (const [what, begin, end] of spans) {
      if ((!states && what === "idle") || end < start) continue;
      const left = x(begin), width = Math.max(x(end) - left, 0.6);
      const rect = draw("rect", { x: left, y: row * ROW + 3, width, height: ROW - 6, "data-handle": states ? name : null,
        style: { fill: states ? `var(${STATES[what][1]})` : "var(--line)" } });
      const title = draw("title");
      title.textContent = `${states ? STATES[what][0] : what}, ${duration(end - begin)}`;
      rect.append(title);
      svg.append(rect);
      if (!states && width > what.length * 7.5) {
        const text = draw("text", { x: left + 4, y: row * ROW + 14, style: { fill: "var(--ink)" } });
        text.textContent = what;
        svg.append(text);
      }
    }
  });
  for (let tick = 0; tick < 5; tick += wide - LEFT < 300 ? 2 : 1) { // on a phone every second one has room
    const text = draw("text", { x: x(now - tick * shown / 5), y: rows.length * ROW + 14, "text-anchor": tick ? "middle" : "end" });
    const seconds = tick * shown / 5;
    text.textContent = tick ? `−${seconds < 60 ? `${seconds} s` : `${seconds / 60} min`}` : "now";
    svg.append(text);
  }
  return svg;
}

function handles(worker) {
  const now = worker.snapshot.taken_timestamp_seconds;
  const columns = [["handle", ""], ["state", ""], ["since", ""], ["on device", "number"], ["needs", "number"], ["host copy", "number"], ["loaded", "number"], ["offloaded", "number"], ["skipped", "number"], ["remarks", ""]];
  return table("handles", columns, worker.snapshot.handles.map((handle) => [
    handle.name, state(handle.state), ago(now - handle.last_transition_timestamp_seconds), bytes(handle.resident_bytes), bytes(handle.num_bytes),
    bytes(handle.host_bytes), bytes(handle.loaded_bytes), bytes(handle.offloaded_bytes), bytes(handle.skipped_bytes), remarks(handle)]));
}

function remarks(handle) {
  const found = [];
  if (handle.broken) found.push(`broken: ${handle.broken}`);
  if (handle.drift_bytes) found.push(`${bytes(handle.drift_bytes)} drifted`);
  if (handle.stray_references) found.push(`${handle.stray_references} stray references`);
  const plain = [handle.readonly && "readonly", handle.external && "external", handle.kept && "kept", !handle.built && "not built"].filter(Boolean);
  return make("span", {}, make("span", { class: "bad" }, found.join(", ")), found.length && plain.length ? ", " : "", plain.join(", "));
}

function troubles(snapshot) {
  const found = [];
  if (snapshot.unpaired_bytes) found.push(`${bytes(snapshot.unpaired_bytes)} left on the device`);
  if (snapshot.wrong_writes) found.push(`${snapshot.wrong_writes} wrong writes`);
  if (snapshot.pairing_violations) found.push(`${snapshot.pairing_violations} pairing violations`);
  const broken = snapshot.handles.filter((handle) => handle.broken).length;
  if (broken) found.push(`${broken} broken`);
  return found.join(", ");
}

function events(worker) {
  const now = worker.snapshot.taken_timestamp_seconds;
  const moves = worker.transitions.slice(0, 12).map((one) => [ago(now - one.timestamp_seconds), one.handle, one.trigger, one.phase,
    one.bytes ? bytes(one.bytes) : "", one.bytes && one.seconds ? `${(one.bytes / one.seconds / 1e9).toPrecision(3)} GB/s` : "", duration(one.seconds)]);
  const failures = worker.failures.slice(0, 12).map((one) => [ago(now - one.timestamp_seconds), one.handle, one.trigger, one.reason]);
  return make("div", { class: "two" },
    make("section", {}, make("h3", {}, "last transitions"), table("last transitions",
      [["when", ""], ["handle", ""], ["trigger", ""], ["phase", ""], ["bytes", "number"], ["rate", "number"], ["took", "number"]], moves)),
    make("section", {}, make("h3", {}, "last failures"), failures.length
      ? table("last failures", [["when", ""], ["handle", ""], ["trigger", ""], ["reason", ""]], failures) : make("p", { class: "facts" }, "none")));
}

function card(worker) {
  const { snapshot } = worker;
  const seconds = Object.values(snapshot.phase_seconds).reduce((all, one) => all + one, 0);
  const stalled = Object.values(snapshot.phase_stall_seconds).reduce((all, one) => all + one, 0);
  const facts = `phase ${snapshot.phases.join(" › ") || (snapshot.suspended ? "suspended" : "idle")} · ${snapshot.device} · policy ${snapshot.policy} · ${(100 * stalled / Math.max(seconds, 1e-9)).toFixed(1)} % of its time waiting for moves`;
  const head = make("div", { class: "head" }, make("h2", {}, worker.name), make("span", { class: "facts" }, facts), make("span", { class: "bad" }, troubles(snapshot)));
  return make("article", {}, head, bar(snapshot), make("h3", {}, "handles"), handles(worker), make("h3", {}, "states over time"), timeline(worker), events(worker));
}

function show(worker) {
  const main = document.getElementById("worker"), regions = () => [...main.querySelectorAll(".scroll")];
  const focused = regions().indexOf(document.activeElement), scrolled = regions().map((node) => node.scrollLeft);
  main.replaceChildren(card(worker));
  regions().forEach((node, i) => { node.scrollLeft = scrolled[i] || 0; });
  if (focused >= 0 && regions()[focused]) regions()[focused].focus({ preventScroll: true }); // a reader by keyboard stays where it was
}

function say(text, lost) {
  const status = document.getElementById("status");
  status.classList.toggle("lost", lost);
  if (status.textContent !== text) status.textContent = text; // a screen reader speaks at each change
}

async function refresh() {
  try {
    const answer = await fetch("workers", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const [worker] = await answer.json();
    lastAnswer = Date.now();
    show(worker);
    say("live", false);
  } catch (error) {
    say(lastAnswer ? `no answer since ${new Date(lastAnswer).toLocaleTimeString()}; asking on` : "no answer; asking on", true);
  }
}

async function follow() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MILLISECONDS));
  }
}

document.getElementById("legend").append(...Object.keys(STATES).map(state));
document.getElementById("span").addEventListener("change", refresh);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
follow();
