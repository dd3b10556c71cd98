// Stores: find a sample, see its picture and where it lies.
import { $, ask, bytes, count, fill, filters, h, percent, trouble } from "./core.js";

const form = $("tools");
let stores = [], next = "", held = null;

const chosen = () => Number(form.elements.store.value);

async function find(after = "") {
  const query = new URLSearchParams(), wanted = held.read();
  if (wanted.prefix) query.set("prefix", wanted.prefix); else if (wanted.index) query.set("index", wanted.index);
  if (after) query.set("after", after);
  try {
    const reply = await ask(`/api/stores/${chosen()}/samples?${query}`);
    trouble("");
    const rows = reply.samples.map((s) => h("li", {}, h("button", { type: "button", "data-index": s.index, onclick: () => open(s.index) }, h("small", {}, count(s.index)), h("span", {}, s.name), h("small", {}, [s.class, bytes(s.bytes)].filter(Boolean).join(", ")))));
    if (after) $("samples").append(...rows); else fill($("samples"), rows);
    next = reply.next; $("more").hidden = !next;
    const shown = $("samples").children.length;
    $("count").textContent = shown ? `${count(shown)} shown of ${count(reply.of)} in the store` : `No name begins so; the store has ${count(reply.of)} samples.`;
    if (!after && rows.length) open(reply.samples[0].index, false);
    if (!rows.length && !after) fill($("sample"), h("p", { class: "empty" }, "Choose a sample."));
  } catch (e) { trouble(e.message); }
}

let latest = 0;
async function open(index) {
  const mine = ++latest;
  for (const b of $("samples").querySelectorAll("button")) b.setAttribute("aria-current", String(Number(b.dataset.index) === index));
  try {
    const s = await ask(`/api/stores/${chosen()}/sample?index=${index}`);
    if (mine === latest) { show(s); trouble(""); }
  } catch (e) { if (mine === latest) fill($("sample"), h("p", { class: "problem", role: "alert" }, e.message)); }
}

function show(s) {
  $("samplename").textContent = s.name;
  const parts = s.parts.map((p) => h("section", {}, p.part && h("h3", {}, p.part), p.trouble && h("p", { class: "problem" }, p.trouble),
    p.image && h("img", { class: "picture", alt: `${s.name}${p.part ? `, ${p.part}` : ""}`, src: `/api/stores/${chosen()}/image?index=${s.index}&part=${encodeURIComponent(p.part)}` }),
    !p.image && p.hex && [h("p", { class: "soft" }, "It is no picture that is shown here; its first bytes:"), h("pre", {}, p.text), h("pre", {}, p.hex)],
    h("dl", { class: "facts" }, [["Volume", p.volume], ["Kind", p.kind], ["Offset", `${count(p.offset)} (${bytes(p.offset)})`], ["Length", `${count(p.length)} bytes`], ["crc32c", p.crc32c ?? "none is kept"], ["In memory", p.resident === null ? "not known" : p.length ? `${percent(p.resident / p.length)} of it lies in the page cache` : "it is empty"]].map(([t, d]) => [h("dt", {}, t), h("dd", {}, d)]))));
  fill($("sample"), parts, h("dl", { class: "facts" }, [["Index", count(s.index)], ["Class", s.label === null ? "" : `${s.class || s.label}`], ...Object.entries(s.columns)].filter((r) => r[1] !== "").map(([t, d]) => [h("dt", {}, t), h("dd", {}, d)])));
  document.body.dataset.looks = String(Number(document.body.dataset.looks || 0) + 1);
}

try {
  ({ stores } = await ask("/api/stores"));
  if (!stores.length) $("answer").textContent = "No store is shown here: name some when you start it, headrace web --store DIR.";
  else {
    fill(form.elements.store, stores.map((s) => h("option", { value: s.number }, s.path)));
    held = filters(form, () => {});
    const say = () => { const s = stores[chosen()]; $("answer").textContent = `${s.path}: ${count(s.samples)} samples, ${bytes(s.bytes)}${s.classes ? `, ${s.classes} classes` : ""}.`; };
    form.addEventListener("submit", () => find());
    form.elements.store.addEventListener("change", () => { say(); find(); });
    form.elements.prefix.addEventListener("input", () => { form.elements.index.value = ""; });
    form.elements.index.addEventListener("input", () => { form.elements.prefix.value = ""; });
    $("more").addEventListener("click", () => find(next));
    $("browser").hidden = false; say(); find();
  }
} catch (e) { trouble(e.message); $("answer").textContent = "The stores cannot be shown."; }
document.body.dataset.looks = document.body.dataset.looks || "1";
