// File systems: what each gives over time, stacked by the jobs behind it.
import { $, ask, behind, clock, count, fill, h, live, percent, rate, table, trouble } from "./core.js";
import { drawn, keys, over } from "./charts.js";

const places = new Map();

function bandsOf(fs) {
  const top = fs.top.map((job, i) => ({ name: `${job.job_id} ${job.name} of ${job.user}`, colour: `b${i}`, values: job.values, job }));
  const rest = Math.max(0, fs.jobs - top.length);
  return rest ? [{ name: `${count(rest)} other jobs`, colour: "rest", values: fs.rest }, ...top] : top;
}

function words(fs) {
  const parts = [];
  if (fs.capacity) parts.push(`${percent(fs.now / fs.capacity)} of its ${rate(fs.capacity, fs.unit)}`);
  const [job] = fs.top;
  if (job) parts.push(`${percent(job.share)} of it is for job ${job.job_id}`);
  return parts.join("; ");
}

function chartOf(fs) {
  const one = { fs };
  const chart = h("div", { class: "chart" }), legend = h("div"), sentence = h("p", { class: "said" }), now = h("strong");
  const figure = h("section", { class: "pressure" }, h("h2", {}, `${fs.name}  `, now), sentence, chart, legend);
  one.box = figure;
  one.show = (system) => {
    one.fs = system;
    now.textContent = rate(system.now, system.unit); sentence.textContent = words(system);
    const bands = bandsOf(system);
    fill(legend, keys(bands.map((b) => ({ ...b, label: b.job ? h("a", { href: `/job?id=${encodeURIComponent(b.job.job_id)}` }, `${b.job.job_id} ${b.job.name}`) : b.name })).map((b) => (b.job ? { ...b, label: h("span", {}, b.label, ` ${b.job.user}, ${percent(b.job.share)}`) } : b))));
    one.draw?.();
    one.table?.remove();
    const open = one.table?.open;
    one.table = behind("As a table", () => table(["Job", ...every(system.times).map((i) => clock(system.times[i]))], bandsOf(system).map((b) => [b.name, ...every(system.times).map((i) => rate(b.values[i] || 0, system.unit))])));
    figure.append(one.table);
    if (open) one.table.open = true;
  };
  one.start = () => {
    one.draw = drawn(chart, (width) => over(width, one.fs.times, bandsOf(one.fs), { stack: true, height: 170, unit: (v) => rate(v, one.fs.unit), name: `${one.fs.name}: ${words(one.fs)}`, line: one.fs.capacity ? { value: one.fs.capacity, text: "what it can give" } : null }));
  };
  return one;
}

const every = (times) => { const step = Math.max(1, Math.floor(times.length / 6)); return times.map((_, i) => i).filter((i) => (times.length - 1 - i) % step === 0); };

function show(systems) {
  for (const fs of systems) {
    let one = places.get(fs.name);
    if (!one) { one = chartOf(fs); places.set(fs.name, one); $("systems").append(one.box); one.start(); }
    one.show(fs);
  }
  for (const [name, one] of places) if (!systems.some((fs) => fs.name === name)) { one.box.remove(); places.delete(name); }
  const [most] = [...systems].sort((a, b) => load(b) - load(a));
  $("answer").textContent = most ? `${most.name} is under most pressure: ${words(most)}.` : "No job is known to read from a file system now.";
  document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
}
const load = (fs) => (fs.capacity ? fs.now / fs.capacity : 0);

let last = 0;
async function look() { try { show((await ask("/api/storage")).file_systems); trouble(""); } catch (e) { trouble(e.message); } }
live(false, { look: (sentence) => { if (sentence.trouble) trouble(sentence.trouble); if (Date.now() - last > 4500) { last = Date.now(); look(); } } });
