// The cluster's page: figures, causes, the grid, and the GPU that is looked at.
import { $, causeColour, causeName, causeText, count, fill, filters, h, live, options, percent, seconds, table, trouble } from "./core.js";
import { spark } from "./charts.js";
import { Grid } from "./grid.js";

const ID = 0, NAME = 1, USER = 2, ACCOUNT = 3, PARTITION = 4, GPUS = 5, NODES = 6, CAUSE = 7, SYSTEM = 8, MEASURED = 9, STARTED = 10;
const LEVELS = 200, UNKNOWN = 255, LITTLE = 0.05, KEPT = 90;
const JOB_COLOURS = ["b0", "b1", "b2", "b3", "b4", "b5", "b6"];
const jobs = new Map(), past = new Map(), lostPast = [];
let nodes = null, totals = null, holders = [], stall = [], busy = [], taken_s = 0, wanted = {}, stalls = new Map();

const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const slots = (text) => new Int32Array(bytesOf(text).buffer);

const form = $("tools");
const held = filters(form, (now) => { wanted = now; lay(); paint(); });
wanted = held.read();

const grid = new Grid($("grid"), {
  pointed: () => aside(),
  opened: (gpu) => { const job = jobs.get(holders[gpu]); if (job) location.assign(`/job?id=${encodeURIComponent(job[ID])}`); },
  label: (gpu) => words(gpu),
  matches: (gpu, slot) => fits(slot),
  colourOf(gpu, slot, g) {
    const job = jobs.get(slot), level = stall[gpu];
    if (wanted.by === "use") return busy[gpu] === UNKNOWN ? g.colours.unknown : g.ramp[LEVELS - busy[gpu]];
    if (wanted.by === "job") return g.colours[JOB_COLOURS[hash(job ? job[ID] : "") % JOB_COLOURS.length]];
    if (wanted.by === "cause") return level === UNKNOWN ? g.colours.unknown : level < LITTLE * LEVELS || !job ? g.colours.s0 : g.colours[causeColour(job[CAUSE]).split(" ")[0]];
    return g.shade(level);
  },
});

function hash(text) { let n = 7; for (let i = 0; i < text.length; i++) n = (n * 31 + text.charCodeAt(i)) >>> 0; return n ^ (n >>> 9); }

// Whether a job is what the filter asks for; nothing asked for, everything fits.
function fits(slot) {
  if (!(wanted.user || wanted.job || wanted.cause)) return true;
  const job = jobs.get(slot);
  if (!job) return false;
  const text = wanted.job.toLowerCase();
  return (!wanted.user || job[USER] === wanted.user) && (!wanted.cause || job[CAUSE] === wanted.cause) && (!text || job[ID].toLowerCase().includes(text) || job[NAME].toLowerCase().includes(text));
}

// What a cell stands for: a GPU or, where no job has one, a job's place on a node.
const cell = (n = 1) => `${totals?.has_gpus === false ? "place" : "GPU"}${n === 1 ? "" : "s"}`;
const busyCells = (n) => (totals.has_gpus ? `busy ${cell(n)}` : `${cell(n)} of jobs on nodes`);
const at = (gpu) => `${nodes.names[grid.nodeOf[gpu]]}${totals?.has_gpus === false ? "" : `, GPU ${gpu - grid.first[grid.nodeOf[gpu]]}`}`;
const share = (level) => (level === UNKNOWN ? null : level / LEVELS);

function words(gpu) {
  const node = grid.nodeOf[gpu], place = at(gpu), job = jobs.get(holders[gpu]);
  if (!job) return `${place}: ${nodes.away[node] ? `away, ${nodes.away[node]}` : "idle"}`;
  const s = share(stall[gpu]);
  return `${place}: job ${job[ID]} ${job[NAME]} of ${job[USER]}, waits ${percent(s)}${job[CAUSE] && s >= LITTLE ? `, ${causeName(job[CAUSE])}` : ""}`;
}

// Mean stall of each running job, and how it went since the page was opened.
function remember() {
  const sum = new Map(), n = new Map();
  for (let i = 0; i < holders.length; i++) if (holders[i] >= 0 && stall[i] !== UNKNOWN) { sum.set(holders[i], (sum.get(holders[i]) || 0) + stall[i]); n.set(holders[i], (n.get(holders[i]) || 0) + 1); }
  stalls = new Map([...sum].map(([slot, total]) => [slot, total / n.get(slot) / LEVELS]));
  for (const [slot, value] of stalls) { const line = past.get(slot) || []; line.push(value); if (line.length > KEPT) line.shift(); past.set(slot, line); }
  for (const slot of past.keys()) if (!jobs.has(slot)) past.delete(slot);
  lostPast.push(totals.lost); if (lostPast.length > KEPT) lostPast.shift();
}

function aside() {
  const place = $("aside"), gpu = grid.at;
  if (gpu < 0) { if (!place.classList.contains("empty-aside")) { place.classList.add("empty-aside"); fill(place, first.map((n) => n.cloneNode(true))); } return; }
  place.classList.remove("empty-aside");
  const node = grid.nodeOf[gpu], slot = holders[gpu], job = jobs.get(slot), s = share(stall[gpu]);
  const where = h("h2", {}, at(gpu));
  if (!job) { fill(place, where, h("p", {}, nodes.away[node] ? `Away: ${nodes.away[node]}.` : "Idle: no job holds it.")); return; }
  const line = past.get(slot) || [];
  fill(place, where,
    h("p", {}, h("span", { class: "num" }, percent(s)), s === null ? "" : ` of its time this ${cell()} waits for data${job[MEASURED] ? "" : ", probably"}.`),
    line.length > 1 && spark(line, { most: Math.max(0.2, ...line) * 1.1, height: 36, width: 260, name: `The job's waiting since this page was opened: now ${percent(line[line.length - 1])}` }),
    facts("", [["Job", h("a", { href: `/job?id=${encodeURIComponent(job[ID])}` }, `${job[ID]} ${job[NAME]}`)],
      ["User", h("button", { class: "quiet", type: "button", title: "Only this user's jobs", onclick: () => held.set("user", job[USER]) }, job[USER])],
      ["Has", `${totals.has_gpus ? `${count(job[GPUS])} ${cell(job[GPUS])} on ` : ""}${count(job[NODES])} node${job[NODES] === 1 ? "" : "s"}`],
      ["Waits for", job[CAUSE] ? [h("i", { class: `swatch ${causeColour(job[CAUSE])}` }), ` ${causeName(job[CAUSE])}`, causeText(job[CAUSE]) && `: ${causeText(job[CAUSE])}`] : "hardly anything"], ["On", job[SYSTEM]]]),
    facts("facts-more", [["Account", job[ACCOUNT]], ["Runs for", job[STARTED] ? seconds(taken_s - job[STARTED]) : "not known"], ["GPU use", totals.has_gpus ? percent(share(busy[gpu])) : ""], ["Known by", job[MEASURED] ? "measuring" : "inferring: it does not read through headrace"]]));
}
const facts = (kind, rows) => h("dl", { class: kind }, rows.filter((r) => r[1]).map(([t, d]) => [h("dt", {}, t), h("dd", {}, d)]));
const first = [...$("aside").children].map((n) => n.cloneNode(true));

function lay() {
  if (!nodes) return;
  const asked = wanted.partition;
  grid.set(nodes, (i) => !asked || nodes.partitions[nodes.partition[i]] === asked);
}

function paint() {
  if (!nodes) return;
  grid.data(holders, stall, busy);
  grid.draw(); grid.say();
  legend();
  const filtered = wanted.user || wanted.job || wanted.cause || wanted.partition;
  let n = 0, lost = 0; const seen = new Set();
  if (filtered) for (const i of grid.order) if (holders[i] >= 0 && fits(holders[i])) { n += 1; seen.add(holders[i]); if (stall[i] !== UNKNOWN) lost += stall[i] / LEVELS; }
  $("matched").textContent = filtered ? `${count(n)} ${cell(n)} of ${count(seen.size)} jobs; ${count(lost)} ${cell(2)}' worth waits` : "";
  for (const key of document.querySelectorAll("#figures button[data-cause]")) key.setAttribute("aria-pressed", key.dataset.cause === wanted.cause);
}

let legendOf = "";
function legend() {
  const places = totals.has_gpus ? [] : ["a place is one job on one node"], kept = `${wanted.by} ${places}`;
  if (legendOf === kept) return;
  legendOf = kept;
  const key = (kind, text) => h("span", {}, h("i", { class: `swatch ${kind}` }), ` ${text}`);  // one does not stand without the other
  const idle = [key("", "idle"), key("away", "away"), key("unknown", "not known")];
  const parts = { stall: ["waits 0 %", h("span", { class: "ramp" }), "100 % of its time"], use: ["GPU works 100 %", h("span", { class: "ramp" }), "0 % of its time"],
    cause: [`a ${cell()} that waits more than 5 % has its cause's colour (above)`, key("calm", "waits less")], job: ["each job has a colour; point at one to see all its places"] }[wanted.by] || [];
  fill($("legend"), [...places, ...parts, ...idle].map((p) => (p instanceof Node ? p : h("span", {}, p))));
}

function figures() {
  const t = totals, lost = t.known ? t.lost / t.known : null, [most] = t.causes;
  const worth = t.lost < 10 ? String(+t.lost.toFixed(1)) : count(t.lost);
  fill($("answer"), t.known ? [h("strong", {}, `${worth} of ${count(t.known)} ${busyCells(t.known)}`), ` (${percent(lost)}) are lost to waiting for data now`, most ? [", most to ", h("strong", {}, causeName(most[0])), causeText(most[0]) && ` (${causeText(most[0])})`] : "", "."]
    : [t.gpus ? `${count(t.gpus)} ${cell(t.gpus)}, ${count(t.held)} of them in use; nothing is known yet of how long they wait.` : `No job runs that an agent saw${t.has_gpus ? ", and no GPU is known" : ""}.`]);
  fill($("worth"), h("b", {}, worth), h("span", {}, `${cell(2)}' worth of waiting`));
  fill($("worthspark"), spark(lostPast, { name: `${cell(2)}' worth of waiting since this page was opened, now ${count(t.lost)}`, width: 240, height: 44, most: Math.max(...lostPast) * 1.3 || 1 }));
  for (const box of [...$("figures").querySelectorAll("li.one")].slice(0, 4)) box.hidden = !t.has_gpus;
  form.querySelector("[name=by] [value=use]").hidden = !t.has_gpus;
  document.querySelector("h1").textContent = `Which ${t.has_gpus ? "GPUs" : "jobs"} wait for data`;
  for (const h2 of [first.find((n) => n.tagName === "H2"), document.querySelector(".empty-aside h2")]) if (h2) h2.textContent = `A ${cell()}`;
  const rest = [percent(t.busy), "GPU use", count(t.held), `of ${count(t.gpus)} GPUs in use`, count(t.idle), "GPUs idle", count(t.away), "GPUs away", count(t.running), `jobs run, ${count(t.waiting)} wait`];
  [...$("figures").querySelectorAll("li.one > *")].forEach((e, i) => { if (e.textContent !== rest[i]) e.textContent = rest[i]; });
  causes(t);
  trouble(t.notes.join(" "));
}

// The bar, and a key for each cause that filters; keys stay where they are as long as causes do.
const causeKeys = new Map();
function causes(t) {
  const total = t.causes.reduce((s, c) => s + c[1], 0);
  $("causebox").hidden = !total;
  if (!total) return;
  $("causes").setAttribute("aria-label", `Waiting by cause: ${t.causes.map((c) => `${causeName(c[0])} ${percent(c[1] / total)}`).join(", ")}`);
  fill($("causes"), t.causes.map(([cause, n]) => { const bar = h("i", { class: causeColour(cause), title: `${causeName(cause)} ${percent(n / total)}` }); bar.style.flexGrow = String(n); return bar; }));
  const shown = t.causes.slice(0, 12);
  for (const [cause, key] of causeKeys) if (!shown.some((c) => c[0] === cause)) { key.li.remove(); causeKeys.delete(cause); }
  for (const [cause, n] of shown) {
    let key = causeKeys.get(cause);
    if (!key) {
      const words = h("span");
      const button = h("button", { type: "button", "data-cause": cause, "aria-pressed": String(wanted.cause === cause), title: causeText(cause), onclick: () => held.set("cause", cause) }, h("i", { class: causeColour(cause) }), words);
      key = { li: h("li", {}, button), words };
      causeKeys.set(cause, key); $("causekeys").append(key.li);
    }
    key.words.textContent = `${causeName(cause)} ${percent(n / total)}`;
  }
}

function lists() {
  options(form.elements.partition, nodes.partitions);
  const rows = [...jobs.values()];
  options(form.elements.cause, [...new Set(rows.map((r) => r[CAUSE]).filter(Boolean))].sort(), { text: causeName });
  const users = [...new Set(rows.map((r) => r[USER]))].sort();
  if ($("users").children.length !== users.length) fill($("users"), users.map((u) => h("option", { value: u })));
}

function behindIt() {
  if (!$("behind").open) return;
  const rows = nodes.names.map((name, i) => {
    let known = 0, total = 0; const here = new Set();
    for (let k = grid.first[i]; k < grid.first[i] + nodes.gpus[i]; k++) { if (holders[k] >= 0) { here.add(holders[k]); if (stall[k] !== UNKNOWN) { known += 1; total += stall[k] / LEVELS; } } }
    return [name, nodes.partitions[nodes.partition[i]], known ? total / known : null, total, [...here].map((s) => jobs.get(s)?.[ID]).join(", "), nodes.away[i] || ""];
  }).sort((a, b) => b[3] - a[3]).slice(0, 100);
  fill($("nodes"), table(["Node", "Partition", "Waits", `${cell(2)} lost`, "Jobs", "Away"], rows.map((r) => [r[0], r[1], r[2] === null ? "" : percent(r[2]), r[3].toFixed(2), r[4], r[5]])));
}
$("behind").addEventListener("toggle", behindIt);

function take(message, whole) {
  trouble("");
  if (whole) { jobs.clear(); past.clear(); }
  for (const slot of message.gone || []) { jobs.delete(slot); past.delete(slot); }
  for (const [slot, row] of Object.entries(message.jobs)) jobs.set(Number(slot), row);
  if (message.holders) holders = slots(message.holders);
  stall = bytesOf(message.stall); busy = bytesOf(message.busy);
  totals = message.totals; taken_s = message.taken_s;
  if (message.nodes) { nodes = message.nodes; lay(); }
  remember(); paint(); figures(); lists(); behindIt();
  if (grid.at >= 0) aside();
  document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
  if (whole && !performance.getEntriesByName("painted").length) requestAnimationFrame(() => setTimeout(() => performance.mark("painted")));
}

live(true, { full: (message) => take(message, true), tick: (message) => { if (nodes) take(message, false); }, trouble: (message) => { trouble(message.text); if (!nodes) $("answer").textContent = "Nothing can be shown."; } });
