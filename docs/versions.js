// A switch between the versions of these pages that lie beside each other: `tools/site` lays them out so, and says
// which there are in the last line. Works on files, without a server.
const showVersions = (versions) => {
  if (Object.keys(versions).length < 2) return;
  const root = new URL(document.documentElement.dataset.content_root, location.href);
  const page = location.pathname.slice(root.pathname.length) || "index.html";
  const choice = document.createElement("select");
  choice.setAttribute("aria-label", "Version of this documentation");
  choice.style.margin = "0 1rem 1rem";
  for (const version of Object.keys(versions)) choice.add(new Option(version));
  choice.value = DOCUMENTATION_OPTIONS.VERSION;
  choice.addEventListener("change", () => {
    const there = versions[choice.value].includes(page) ? page : "index.html";
    location.assign(new URL(`../${choice.value}/${there}`, root));
  });
  document.querySelector(".sidebar-brand")?.after(choice);
};
addEventListener("DOMContentLoaded", () => showVersions(VERSIONS));
const VERSIONS = {};
