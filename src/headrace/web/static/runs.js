// Runs that wrote a trace, each with a link to its report.
import { $, ask, fill, h, trouble } from "./core.js";

try {
  const { runs } = await ask("/api/runs");
  $("answer").textContent = runs.length ? "Runs that wrote a trace." : "No runs are shown: start headrace web with --run DIR, the folder of a run that wrote a trace, or of several. Jobs are on the cluster's page.";
  fill($("runs"), h("ul", {}, runs.map((r) => h("li", {}, h("a", { href: `/run?id=${encodeURIComponent(r.id)}` }, r.id.slice(4)), ` ${r.path}`))));
} catch (e) { trouble(e.message); }
document.body.dataset.looks = "1";
