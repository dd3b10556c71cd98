// What all pages share: elements, figures as people read them, asking the server, and the live stream.

// An element. Text is always text: nothing that comes from the server is read as HTML.
export function h(tag, given = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false).map((c) => (c instanceof Node ? c : String(c))));
  return element;
}

// A sentence whose commands stand between backticks, as text and code.
export const marked = (text) => text.split(/`([^`]+)`/).map((part, i) => (i % 2 ? h("code", {}, part) : part));

const NS = "http://www.w3.org/2000/svg";
export function svg(tag, given = {}, ...children) {
  const element = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(given)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter(Boolean));
  return element;
}

export const $ = (id) => document.getElementById(id);

// Puts something else into a place. Who has the focus there keeps it, if its like is there again.
export function fill(place, ...children) {
  const had = place.contains(document.activeElement) && document.activeElement !== place ? document.activeElement : null;
  const same = (e) => e.tagName === had.tagName && e.getAttribute("href") === had.getAttribute("href") && e.textContent.trim().split(" ")[0] === had.textContent.trim().split(" ")[0];
  place.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  if (had && had !== document.activeElement) [...place.querySelectorAll("a[href], button, summary, [tabindex]")].find(same)?.focus({ preventScroll: true });
}

// -- figures ------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const three = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
export const count = (n) => whole.format(n);
export const percent = (share) => (share === null || share === undefined ? "not known" : `${share > 0 && share < 0.095 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`);
export const number = (n) => (Math.abs(n) >= 1000 ? whole.format(n) : three.format(n));
function scaled(n, units, base = 1000) {
  let at = 0;
  while (Math.abs(n) >= base * 0.9995 && at < units.length - 1) { n /= base; at += 1; }
  return `${three.format(n)} ${units[at]}`;
}
export const bytes = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB", "PB"]);
export const rate = (n, unit = "B/s") => (unit === "B/s" ? `${bytes(n)}/s` : `${number(n)} ${unit}`);
export const hours = (n) => (n >= 100 ? whole.format(n) : n >= 1 ? n.toPrecision(3) : n > 0 && n < 1e-4 ? "under 0.0001" : three.format(n));
export function seconds(s) {
  if (s === 0) return "0 s";
  if (s < 1e-3) return `${three.format(s * 1e6)} \u00b5s`;
  if (s < 1) return `${three.format(s * 1e3)} ms`;
  if (s < 60) return `${three.format(s)} s`;
  const m = Math.round(s / 60);
  return m < 60 ? `${m} min` : `${Math.floor(m / 60)} h${m % 60 ? ` ${String(m % 60).padStart(2, "0")} min` : ""}`;
}
export const clock = (unix, withSeconds = false) => new Date(unix * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}) });

export const day = (unix) => new Date(unix * 1000).toLocaleString("sv-SE"); // 2026-11-22 14:05:00

// -- causes: a word, a colour, and what it means --------------------------------------------------------

export const CAUSES = {}; // put in by the server: headrace.web.app
export const causeName = (cause) => cause.replaceAll("_", " ");
export const causeColour = (cause) => (CAUSES[cause] || CAUSES.other)[0];
export const causeText = (cause) => (CAUSES[cause] || ["", ""])[1];

// -- the address holds the filter, so that a view can be sent to somebody --------------------------------

export function filters(form, changed) {
  const names = [...form.elements].filter((e) => e.name).map((e) => e.name);
  const read = () => Object.fromEntries(names.map((n) => [n, form.elements[n].value.trim()]));
  const asked = new URLSearchParams(location.search);
  const usual = read();
  for (const name of names) {
    const given = asked.get(name);
    if (given === null) continue;
    const field = form.elements[name];
    if (field.tagName === "SELECT" && ![...field.options].some((o) => o.value === given)) field.append(h("option", { value: given }, given));
    field.value = given;
  }
  const keep = () => {
    const now = read(), kept = new URLSearchParams(location.search);
    for (const name of names) if (now[name] && now[name] !== usual[name]) kept.set(name, now[name]); else kept.delete(name);
    const text = kept.toString();
    history.replaceState(null, "", text ? `?${text}` : location.pathname);
    changed(now);
  };
  form.addEventListener("input", keep);
  form.addEventListener("submit", (e) => e.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { for (const n of names) form.elements[n].value = usual[n]; keep(); }));
  return { read, set: (name, value) => { form.elements[name].value = form.elements[name].value === value ? "" : value; keep(); }, keep };
}

export function options(select, values, { all = "all", text = String } = {}) {
  const chosen = select.value, wanted = ["", ...values];
  if (chosen && !wanted.includes(chosen)) wanted.push(chosen);
  if ([...select.options].map((o) => o.value).join("\n") === wanted.join("\n")) return;
  fill(select, wanted.map((v) => h("option", { value: v }, v ? text(v) : all)));
  select.value = chosen;
}

// -- asking ---------------------------------------------------------------------------------------------

export async function ask(path, body) {
  const given = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json", "X-Headrace": "1" }, body: JSON.stringify(body) };
  const answer = await fetch(path, { credentials: "same-origin", ...given });
  if (answer.status === 401 && document.body.dataset.who === "" && body === undefined) location.assign("/signin");
  const reply = await answer.json().catch(() => ({ error: { message: `status ${answer.status}` } }));
  if (!answer.ok) throw Object.assign(new Error(reply.error.message), { status: answer.status, problems: reply.error.problems || [] });
  return reply;
}

export function trouble(text) {
  const place = $("trouble");
  place.hidden = !text;
  if (text && place.textContent !== text) place.textContent = text;
}

// -- live -------------------------------------------------------------------------------------------------

// Calls handlers by event. Comes again by itself; rests while nobody sees the page.
export function live(grid, handlers) {
  const state = $("live");
  let source = null, wait_ms = 1000, rest = 0;
  const say = (kind, text) => { if (state.textContent !== text) { state.textContent = text; state.className = `live ${kind}`; } };
  const open = () => {
    source = new EventSource(grid ? "/api/live?grid=1" : "/api/live");
    source.onopen = () => { wait_ms = 1000; say("on", "live"); };
    source.onerror = () => {
      say("off", "connection lost, trying again");
      if (source.readyState === EventSource.CLOSED) { setTimeout(open, wait_ms); wait_ms = Math.min(30000, wait_ms * 2); }
    };
    for (const [name, handle] of Object.entries(handlers)) source.addEventListener(name, (e) => handle(JSON.parse(e.data)));
  };
  document.addEventListener("visibilitychange", () => {
    clearTimeout(rest);
    if (document.hidden) rest = setTimeout(() => { source.close(); say("off", "resting"); }, 60000);
    else if (source.readyState === EventSource.CLOSED) open();
  });
  addEventListener("pagehide", () => source.close());
  open();
}

export const table = (head, rows, kind = "") => h("table", { class: kind }, h("thead", {}, h("tr", {}, head.map((t) => h("th", { scope: "col" }, t)))),
  h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => (i ? h("td", {}, cell) : h("th", { scope: "row" }, cell)))))));

export const behind = (what, make) => {
  const element = h("details", {}, h("summary", {}, what));
  element.addEventListener("toggle", () => { if (element.open && element.children.length === 1) element.append(h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": what }, make())); });
  return element;
};
