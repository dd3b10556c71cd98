// The leaderboard: jobs by GPU-hours lost.
import { $, ask, causeColour, causeName, count, fill, filters, h, hours, live, marked, options, percent, seconds, table, trouble } from "./core.js";

const COLUMNS = [["job", "Job", "words"], ["user", "User", "words wide-only"], ["lost", "Lost GPU-h"], ["hours", "GPU-h", "wider-only"], ["stall", "Waits"], ["cause", "Cause", "words"], ["on", "On", "words wider-only"], [null, "What helps", "words wide-only"]];
const WITHOUT_GPUS = [["job", "Job", "words"], ["user", "User", "words wide-only"], ["waited", "Waited"], ...COLUMNS.slice(4)];
let columns = COLUMNS;
const FALLING = new Set(["lost", "hours", "stall", "waited"]);
const form = $("tools");
const asked = new URLSearchParams(location.search);
let sort = asked.get("sort") || "lost", reverse = asked.get("reverse") === "1", turn = 0, limit = 25;

const held = filters(form, () => { clearTimeout(turn); turn = setTimeout(look, 150); });

function order(by) {
  reverse = by === sort ? !reverse : false; sort = by;
  const kept = new URLSearchParams(location.search);
  if (sort !== "lost") kept.set("sort", sort); else kept.delete("sort");
  if (reverse) kept.set("reverse", "1"); else kept.delete("reverse");
  history.replaceState(null, "", `?${kept}`);
  look();
}

let latest = 0;
async function look() {
  const mine = ++latest, wanted = held.read(), query = new URLSearchParams({ sort, limit: String(limit) });
  if (reverse) query.set("reverse", "1");
  for (const [name, value] of Object.entries(wanted)) if (value) query.set(name, value);
  try {
    const reply = await ask(`/api/starving?${query}`);
    if (mine === latest) { show(reply); trouble(""); }
  } catch (e) { trouble(e.message); if (!document.body.dataset.looks) $("answer").textContent = "Nothing can be shown."; }
}

function head([key, name, kind]) {
  if (!key) return h("th", { scope: "col", class: kind }, name);
  const falling = FALLING.has(key) !== reverse;
  return h("th", { scope: "col", class: kind || "", "aria-sort": key === sort ? (falling ? "descending" : "ascending") : "none" }, h("button", { type: "button", "data-sort": key, onclick: () => order(key) }, name));
}

function meter(share) { const i = h("i"); i.style.width = `${100 * share}%`; return h("span", { class: "meter", "aria-hidden": "true" }, i); }

function row(job) {
  return h("tr", {}, h("th", { scope: "row" }, h("a", { href: `/job?id=${encodeURIComponent(job.job_id)}` }, `${job.job_id} ${job.name}`)), h("td", { class: "words wide-only" }, job.user),
    columns === COLUMNS ? [h("td", {}, h("strong", {}, hours(job.lost))), h("td", { class: "wider-only" }, hours(job.gpu_hours))] : h("td", {}, h("strong", {}, seconds(job.waited_s))), h("td", {}, meter(job.stall), h("span", { class: "share" }, `${job.measured ? "" : "~"}${percent(job.stall)}`)),
    h("td", { class: "words fixed" }, job.cause && [h("i", { class: `swatch ${causeColour(job.cause)}` }), ` ${causeName(job.cause)}`]), h("td", { class: "words wider-only" }, job.on), h("td", { class: "words wide-only advice" }, marked(job.hint)));
}

function groups(place, title, list, choose) {
  fill(place, table([title, "Jobs", columns === COLUMNS ? "Lost GPU-h" : "Waited"], list.map((g) => [choose ? h("button", { class: "quiet", type: "button", onclick: () => held.set(choose, g.name) }, choose === "cause" ? causeName(g.name) : g.name || "none") : g.name, count(g.jobs), columns === COLUMNS ? hours(g.lost) : seconds(g.waited_s)]), "rank"));
}

function show(reply) {
  columns = reply.gpu_hours > 0 ? COLUMNS : WITHOUT_GPUS;
  fill($("answer"), marked(reply.answer[0].toUpperCase() + reply.answer.slice(1)), `, in the last ${seconds(reply.until_s - reply.since_s)}.`);
  const focused = document.activeElement?.dataset?.sort;
  fill($("jobs"), reply.jobs.length ? h("table", { class: "rank" }, h("caption", { class: "hidden" }, "Jobs that waited for data"), h("thead", {}, h("tr", {}, columns.map(head))), h("tbody", {}, reply.jobs.map(row))) : h("p", { class: "empty" }, "No job is as asked for."), reply.of > reply.jobs.length && limit < 200 && h("p", {}, h("button", { type: "button", onclick: () => { limit = limit < 100 ? 100 : 200; look(); } }, `Show more of ${count(reply.of)}`)));
  if (focused) $("jobs").querySelector(`[data-sort=${focused}]`)?.focus();
  const inferred = reply.jobs.some((j) => !j.measured);
  $("matched").textContent = `${count(reply.jobs.length)} of ${count(reply.of)} jobs${reply.of < reply.all ? ` (${count(reply.all)} starved)` : ""}${reply.gpu_hours > 0 ? `; they lost ${hours(reply.lost_shown)} GPU-hours` : ""}${inferred ? "; ~ is inferred" : ""}`;
  options(form.elements.cause, reply.causes.map((g) => g.name).filter(Boolean), { text: causeName });
  options(form.elements.on, reply.file_systems.map((g) => g.name).filter(Boolean));
  if ($("users").children.length !== reply.every_user.length) fill($("users"), reply.every_user.map((u) => h("option", { value: u })));
  groups($("causes"), "Cause", reply.causes, "cause"); groups($("systems"), "File system", reply.file_systems, "on"); groups($("byuser"), "User", reply.users, "user");
  document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
}

let last = 0;
live(false, { look: (message) => { if (message.trouble) trouble(message.trouble); if (Date.now() - last > 9000) { last = Date.now(); look(); } } });
