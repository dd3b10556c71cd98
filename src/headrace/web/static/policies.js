// Policies: what holds, what an edit would change, and applying it.
import { $, ask, fill, h, trouble } from "./core.js";

const text = $("text"), check = $("check"), apply = $("apply");
const operator = document.body.dataset.who === "operator";
let held = null, checked = null;

function ready() { apply.disabled = !(operator && checked !== null && checked === text.value); }

const list = (reply) => h("ul", { class: "diff" }, reply.changes.map((c) => c.before === null ? h("li", { class: "plus" }, `+ ${c.at}: ${c.after}`) : c.after === null ? h("li", { class: "minus" }, `- ${c.at}: ${c.before}`) : h("li", { class: "change" }, `~ ${c.at}: ${c.before} \u2192 ${c.after}`)));
const unknown = (reply) => reply.unknown.length && [h("p", {}, "Not known now, and may still come:"), h("ul", {}, reply.unknown.map((u) => h("li", {}, u)))];

async function put(path, done) {
  const sent = text.value;
  check.disabled = apply.disabled = true;
  fill($("said"), h("p", { class: "busy" }, "Asking ..."));
  try {
    const reply = await ask(path, { text: sent });
    trouble("");
    done(reply, sent);
  } catch (e) {
    checked = null;
    fill($("said"), h("div", { class: "problem", role: "alert" }, e.message, e.problems.length ? h("ul", {}, e.problems.map((p) => h("li", {}, p))) : ""));
  }
  check.disabled = false;
  ready();
}

check.addEventListener("click", () => put("/api/policy/check", (reply, sent) => {
  checked = reply.changes.length ? sent : null;
  fill($("said"), reply.changes.length ? [h("p", {}, `${reply.changes.length} value${reply.changes.length === 1 ? "" : "s"} would change; nothing has changed yet. Version ${reply.version} holds.`), list(reply), unknown(reply),
    !operator && h("p", { class: "soft" }, document.body.dataset.who ? "Applying it takes an operator's token." : ["To apply it, ", h("a", { href: "/signin" }, "sign in"), " with an operator's token."])].filter(Boolean).flat() : h("p", {}, `Nothing would change: version ${reply.version} says the same.`));
}));

apply.addEventListener("click", () => put("/api/policy/apply", (reply) => {
  checked = null; held = text.value;
  fill($("said"), h("div", { class: "good", role: "status" }, reply.applied ? `Applied: version ${reply.version} holds.` : `Nothing changed: version ${reply.version} holds.`), list(reply));
  version(reply.version);
}));

$("revert").addEventListener("click", () => { text.value = held; checked = null; ready(); fill($("said"), h("p", { class: "empty" }, "Edit the policy and check it.")); });
text.addEventListener("input", ready);

let where = "";
function version(number) { fill($("answer"), "Version ", h("strong", {}, String(number)), ` holds ${where}.`, operator ? "" : " You may check an edit; applying it takes an operator's token."); }

try {
  const reply = await ask("/api/policy");
  if (reply.version === null) $("answer").textContent = "No controller is known here: start headrace web with --controller.";
  else { where = reply.where; text.value = held = reply.text; $("desk").hidden = false; version(reply.version); ready(); }
} catch (e) { trouble(e.message); $("answer").textContent = "The controller does not say what holds."; }
document.body.dataset.looks = "1";
