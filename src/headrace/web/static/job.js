// A job over time: GPU use over waiting over bytes by tier, and its ranks.
import { $, ask, behind, bytes, causeColour, causeName, causeText, clock, count, day, fill, h, hours, live, marked, percent, rate, seconds, svg, table, trouble } from "./core.js";
import { drawn, keys, over } from "./charts.js";

const id = new URLSearchParams(location.search).get("id");
const TIERS = { ram: ["b2", "memory"], page_cache: ["b3", "the page cache"], disk: ["b0", "local disk"], peer: ["b5", "other nodes"], source: ["b1", "storage"] };
let page = null, parts = null;

const lastOf = (values) => values.filter((v) => v !== null).slice(-1)[0] ?? null;
const tiers = () => Object.entries(page.tiers).map(([name, values]) => ({ name, label: (TIERS[name] || [])[1] || name, colour: (TIERS[name] || ["rest"])[0], values }));

function build() {
  const use = h("div", { class: "chart" }), stall = h("div", { class: "chart" }), flow = h("div", { class: "chart" });
  parts = { figures: h("ul", { class: "figures" }), facts: h("dl", { class: "facts" }), ranks: h("div"), tables: h("div"), shown: h("p", { class: "soft" }), causes: h("div"), legend: h("div") };
  const none = (what) => h("p", { class: "empty" }, what);
  fill($("job"), parts.figures, parts.shown,
    page.facts.gpu_hours > 0 && h("figure", {}, h("figcaption", {}, "GPU use"), use), h("figure", {}, h("figcaption", {}, "Waiting for data, share of the steps' time"), stall),
    h("figure", {}, h("figcaption", {}, "Bytes a second, by where they came from"), flow, parts.legend, parts.tables),
    h("div", { class: "columns" }, h("section", {}, h("h2", {}, "Ranks"), parts.ranks), h("section", {}, h("h2", {}, "What it waited for"), parts.causes, h("h2", {}, "Facts"), parts.facts)));
  const known = (values) => values.some((v) => v !== null);
  parts.draw = [
    drawn(use, (w) => (known(page.use) ? over(w, page.times, [{ name: "use", colour: "b2", values: page.use }], { height: 84, most: 1, unit: percent, name: `GPU use, now ${percent(lastOf(page.use))}`, end: false }) : none("Nobody looked at its GPUs."))),
    drawn(stall, (w) => (known(page.stall) ? over(w, page.times, [{ name: "stall", colour: "b1", values: page.stall }], { height: 110, marks: page.went_on, unit: percent, name: `Share of time that steps waited, now ${percent(lastOf(page.stall))}`, end: !Object.keys(page.tiers).length }) : none("Nothing is known of its steps."))),
    drawn(flow, (w) => (Object.keys(page.tiers).length ? over(w, page.times, tiers(), { height: 130, marks: page.went_on, stack: true, unit: (v) => rate(v), name: `Bytes a second by tier: ${tiers().map((t) => `${t.label} ${rate(lastOf(t.values) || 0)}`).join(", ")}` }) : none("It does not read through headrace: where its bytes come from is not known."))),
  ];
}

function show() {
  const f = page.facts;
  $("title").textContent = `Job ${f.job_id} ${f.name}`;
  document.title = `Job ${f.job_id} - headrace`;
  fill($("answer"), page.running ? "It runs. " : "It is over. ", f.hint ? marked(`${f.hint[0].toUpperCase()}${f.hint.slice(1)}.`) : "");
  if (!parts) build(); else parts.draw.forEach((again) => again());
  const lost = f.gpu_hours_lost, gpus = f.gpu_hours > 0, nodes = `${count(f.node_count)} node${f.node_count === 1 ? "" : "s"}`;
  fill(parts.figures, [[percent(page.running ? page.now ?? f.stall : f.stall), page.running ? "waits for data now" : "waited for data"], ...(gpus ? [[hours(lost), `of ${hours(f.gpu_hours)} GPU-hours lost`], [percent(f.gpu_use), "GPU use"], [count(f.gpus), `GPUs on ${nodes}`]] : [[hours(f.cpu_hours), `CPU-hours on ${nodes}`]]), [seconds(f.seconds), page.running ? "so far" : "in all"]].map(([b, s]) => h("li", {}, h("b", {}, b), h("span", {}, s))));
  const from_s = page.times[0], to_s = page.times[page.times.length - 1];
  parts.shown.textContent = from_s - f.first_s > 60 ? `Pictures show its last ${seconds(to_s - from_s)}.` : "";
  fill(parts.legend, tiers().length ? keys(tiers()) : []);
  const open = parts.tables.firstChild?.open;
  const step = Math.max(1, Math.floor(page.times.length / 20)), at = page.times.map((_, i) => i).filter((i) => (page.times.length - 1 - i) % step === 0);
  fill(parts.tables, behind("As a table", () => table(["Time", ...(gpus ? ["GPU use"] : []), "Waits", ...tiers().map((t) => t.label)], at.map((i) => [clock(page.times[i], true), ...(gpus ? [percent(page.use[i])] : []), percent(page.stall[i]), ...tiers().map((t) => rate(t.values[i]))]))));
  if (open) parts.tables.firstChild.open = true;
  ranks();
  const total = Object.values(f.stall_s).reduce((a, b) => a + b, 0);
  fill(parts.causes, total && !page.named ? h("p", { class: "empty" }, `No stall worth naming: ${seconds(total)} of all its steps together.`) : total ? h("ul", { class: "keys" }, Object.entries(f.stall_s).filter(([, s]) => s >= 0.0005 * total).sort((a, b) => b[1] - a[1]).map(([cause, s]) => h("li", {}, h("i", { class: causeColour(cause) }), `${causeName(cause)} ${percent(s / total)}`, causeText(cause) && `: ${causeText(cause)}`))) : h("p", { class: "empty" }, "Nothing, as far as is known."));
  fill(parts.facts, [["User", f.user], ["Account", f.account], ["Partition", f.partition], ["Began", day(f.first_s)], ["Restarts", f.restarts ? count(f.restarts) : ""], ["Went on after", page.went_on.map((e) => `${clock(e.at, true)}: ${e.text}`).join(" ")], ["Nodes", f.nodes.slice(0, 12).join(", ") + (f.node_count > 12 ? ` and ${f.node_count - 12} more` : "")], ["Lost on", Object.entries(f.gpu_hours_lost_by_file_system).filter(([n, v]) => n && v > 0).map(([n, v]) => `${n} ${hours(v)} GPU-h`).join(", ")], ["Read", f.read_bytes ? bytes(f.read_bytes) : ""], ["Known by", f.quality === "measured" ? "measuring" : "inferring: it does not read through headrace"]].filter((r) => r[1]).map(([t, d]) => [h("dt", {}, t), h("dd", {}, d)]));
  document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
}

// The colour of a share of waiting, as on the cluster's page.
function shade(cell, share) {
  if (share === null) { cell.style.fill = "var(--unknown)"; return; }
  const at = Math.min(3.999, share ** 0.72 * 4), low = Math.floor(at);
  cell.style.fill = `color-mix(in srgb, var(--s${low + 1}) ${Math.round(100 * (at - low))}%, var(--s${low}))`;
}

function ranks() {
  const list = page.ranks;
  if (!list.length) { fill(parts.ranks, h("p", { class: "empty" }, "Its ranks are not known one by one.")); return; }
  const width = 320, size = Math.max(7, Math.min(26, Math.floor(width / Math.min(32, Math.ceil(Math.sqrt(list.length) * 1.6))))), across = Math.floor(width / size);
  const cells = list.map(([rank, place, s], i) => { const caption = svg("title"); caption.textContent = `rank ${rank}, ${place}: waits ${percent(s)}`; const cell = svg("rect", { x: (i % across) * size, y: Math.floor(i / across) * size, width: size - 1.5, height: size - 1.5, rx: 2 }, caption); shade(cell, s); return cell; });
  const known = list.filter((r) => r[2] !== null).sort((a, b) => a[2] - b[2]);
  const low = known[0], high = known[known.length - 1];
  const open = parts.ranks.querySelector("details")?.open;
  fill(parts.ranks, high ? h("p", { class: "soft" }, list.length > 1 ? `Rank ${high[0]} (${high[1]}) waits most, ${percent(high[2])}; rank ${low[0]} (${low[1]}) least, ${percent(low[2])}${list.length > 2 && high[2] > 0.1 && low[2] < high[2] / 3 ? ": the others wait for it" : ""}.` : `Its one rank is ${high[1]}.`) : "",
    svg("svg", { viewBox: `0 0 ${width} ${Math.ceil(list.length / across) * size}`, role: "img", "aria-label": `Waiting of ${list.length} ranks` }, cells), behind("As a table", () => table(["Rank", "Node", "Waits"], list.slice(0, 512).map(([r, p, s]) => [String(r), p, percent(s)]))));
  if (open) parts.ranks.querySelector("details").open = true;
}

async function look() {
  try { page = await ask(`/api/job?id=${encodeURIComponent(id)}`); trouble(""); show(); } catch (e) { trouble(e.message); if (!page) $("answer").textContent = "Nothing can be shown."; }
}
// A job that is over for a moment may be started again, under its number.
const mayRun = () => !page || page.running || Date.now() / 1000 - page.facts.last_s < 600;
let last = 0;
live(false, { look: () => { if (Date.now() - last > 1800 && mayRun()) { last = Date.now(); look(); } } });
