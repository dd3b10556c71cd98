// The grid of GPUs: one canvas for all cells, and one element that is the cursor. A thousand nodes are one
// drawing of a few milliseconds; what is read aloud is the cursor's label.
import { h } from "./core.js";

const SIZES = [22, 18, 15, 13, 11, 10, 9, 8, 7, 6, 5];
const IDLE = -1, UNKNOWN = 255, LEVELS = 200;

function mixed(stops) {
  const rgb = stops.map((s) => { const n = parseInt(s.trim().slice(1), 16); return [n >> 16, (n >> 8) & 255, n & 255]; });
  return Array.from({ length: LEVELS + 1 }, (_, i) => {
    // Small stalls are to be seen, too: the first tenth takes a fifth of the ramp.
    const share = (i / LEVELS) ** 0.72 * (rgb.length - 1), at = Math.min(rgb.length - 2, Math.floor(share)), f = share - at;
    return `rgb(${rgb[at].map((c, k) => Math.round(c + (rgb[at + 1][k] - c) * f)).join(",")})`;
  });
}

export class Grid {
  // pointed(gpu) is called with the GPU under pointer or cursor, or -1; opened(gpu) when one is chosen; label(gpu) says it in words.
  constructor(box, { pointed, opened, label, colourOf, matches }) {
    Object.assign(this, { box, pointed, opened, label, colourOf, matches });
    this.canvas = box.querySelector("canvas");
    this.cursor = box.querySelector(".cursor");
    this.row = box.querySelector("[role=row]");
    this.at = -1; this.pinned = false; this.nodes = null; this.cells = []; this.heads = [];
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.readColours(); this.draw(); });
    new ResizeObserver(() => { if (this.nodes && Math.abs(box.clientWidth - this.width) > 1) { this.place(); this.draw(); } }).observe(box);
    this.canvas.addEventListener("pointermove", (e) => { if (e.pointerType !== "touch") this.point(this.find(e), false); });
    this.canvas.addEventListener("pointerleave", (e) => { if (e.pointerType !== "touch" && !this.pinned) this.point(-1, false); });
    this.canvas.addEventListener("click", (e) => { const gpu = this.find(e); if (gpu >= 0) { this.point(gpu, true); if (e.detail > 1) this.opened(gpu); } });
    box.addEventListener("keydown", (e) => this.key(e));
    box.addEventListener("focus", () => { if (this.at < 0 && this.order) this.point(this.order[0] ?? -1, true); });
  }

  readColours() {
    const style = getComputedStyle(document.documentElement), get = (n) => style.getPropertyValue(n).trim();
    this.ramp = mixed(["--s0", "--s1", "--s2", "--s3", "--s4"].map(get));
    this.colours = Object.fromEntries(["b0", "b1", "b2", "b3", "b4", "b5", "b6", "rest", "s0", "idle", "idle-edge", "unknown", "ink", "paper"].map((n) => [n, get(`--${n}`)]));
  }

  // nodes: names, partitions, partition, gpus, away. shown(node) says whether a node is.
  set(nodes, shown) {
    this.nodes = nodes; this.shown = shown;
    let first = 0;
    this.first = nodes.gpus.map((n) => { const at = first; first += n; return at; });
    this.gpus = first;
    this.nodeOf = new Int32Array(first);
    nodes.gpus.forEach((n, i) => this.nodeOf.fill(i, this.first[i], this.first[i] + n));
    this.box.setAttribute("aria-rowcount", nodes.names.length);
    this.box.setAttribute("aria-colcount", Math.max(0, ...nodes.gpus));
    this.place();
  }

  place() {
    const width = (this.width = this.box.clientWidth), { nodes } = this, groups = nodes.partitions.map((name) => ({ name, nodes: [] }));
    nodes.names.forEach((_, i) => { if (this.shown(i)) groups[nodes.partition[i]].nodes.push(i); });
    const used = groups.filter((g) => g.nodes.length), room = Math.max(420, innerHeight * 0.72);
    let plan = null;
    for (const size of SIZES) {
      plan = this.planned(used, width, size);
      if (plan.height <= room || (width < 620 && size <= 8)) break;
    }
    Object.assign(this, plan);
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio); this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${width}px`; this.canvas.style.height = `${this.height}px`;
    this.box.style.height = `${this.height}px`;
    for (const head of this.heads) head.remove();
    this.heads = this.titles.map((t) => { const heading = h("h3", {}, `${t.name} `, h("small", {}, `${t.count} node${t.count === 1 ? "" : "s"}`)); heading.style.left = `${t.x}px`; heading.style.top = `${t.y}px`; this.box.append(heading); return heading; });
    this.move();
  }

  planned(groups, width, size) {
    const gap = size > 9 ? 2 : 1, across = size > 9 ? 14 : size > 6 ? 9 : 6, down = size > 9 ? 5 : size > 6 ? 3 : 2;
    const most = Math.max(1, ...this.nodes.gpus), names = size >= 13 ? 8 + 7.2 * Math.max(...this.nodes.names.map((n) => Math.min(16, n.length))) : 0;
    const wide = names + most * (size + gap) - gap, columns = Math.max(1, Math.floor((width + across) / (wide + across)));
    const x = new Float32Array(this.gpus).fill(-1), y = new Float32Array(this.gpus), order = [], titles = [], labels = [], lines = [];
    let line = 2;
    for (const group of groups) {
      titles.push({ name: group.name || "no partition", count: group.nodes.length, x: 0, y: line });
      line += 24;
      group.nodes.forEach((node, k) => {
        const left = (k % columns) * (wide + across), at = line + Math.floor(k / columns) * (size + down);
        if (k % columns === 0) lines.push([]);
        lines[lines.length - 1].push(node);
        if (names) labels.push([this.nodes.names[node], left + names - 8, at + size / 2]);
        for (let g = 0; g < this.nodes.gpus[node]; g++) { const i = this.first[node] + g; x[i] = left + names + g * (size + gap); y[i] = at; order.push(i); }
      });
      line += Math.ceil(group.nodes.length / columns) * (size + down) + 12;
    }
    return { size, gap, x, y, order, titles, labels, lines, height: Math.max(60, line) };
  }

  data(holders, stall, busy) { Object.assign(this, { holders, stall, busy }); }

  draw() {
    if (!this.nodes || !this.holders) return;
    const c = this.canvas.getContext("2d"), ratio = devicePixelRatio || 1, { size, x, y, colours } = this;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.height);
    const same = this.at >= 0 && this.holders[this.at] !== IDLE ? this.holders[this.at] : -2;
    let alpha = 1;
    for (const i of this.order) {
      const job = this.holders[i], wanted = this.matches(i, job) ? 1 : 0.13;
      if (wanted !== alpha) c.globalAlpha = alpha = wanted;
      if (job === IDLE) {
        const away = this.nodes.away[this.nodeOf[i]] !== undefined;
        c.fillStyle = colours["idle-edge"]; c.fillRect(x[i], y[i], size, size);
        c.fillStyle = colours.idle; c.fillRect(x[i] + 1, y[i] + 1, size - 2, size - 2);
        if (away) { c.strokeStyle = colours["idle-edge"]; c.lineWidth = 1; c.beginPath(); c.moveTo(x[i], y[i] + size); c.lineTo(x[i] + size, y[i]); c.stroke(); }
        continue;
      }
      c.fillStyle = this.colourOf(i, job, this);
      c.fillRect(x[i], y[i], size, size);
    }
    c.globalAlpha = 1;
    if (same >= 0) { c.strokeStyle = colours.ink; c.lineWidth = 1.5; for (const i of this.order) if (this.holders[i] === same) c.strokeRect(x[i] - 0.5, y[i] - 0.5, size + 1, size + 1); }
    if (this.labels.length) {
      c.fillStyle = colours.ink; c.font = "12px ui-monospace, monospace"; c.textAlign = "right"; c.textBaseline = "middle";
      for (const [text, lx, ly] of this.labels) c.fillText(text.length > 16 ? `${text.slice(0, 15)}\u2026` : text, lx, ly);
    }
  }

  shade(level) { return level === UNKNOWN ? this.colours.unknown : this.ramp[level]; }

  find(e) {
    const box = this.canvas.getBoundingClientRect(), px = e.clientX - box.left, py = e.clientY - box.top, { x, y, size } = this, reach = size + 6;
    let best = -1, near = reach * reach;
    for (const i of this.order) {
      const dx = x[i] + size / 2 - px, dy = y[i] + size / 2 - py, d = dx * dx + dy * dy;
      if (d < near) { near = d; best = i; }
    }
    return best;
  }

  point(gpu, pinned) {
    this.pinned = pinned && gpu >= 0;
    if (gpu === this.at) return;
    this.at = gpu;
    this.box.classList.toggle("pointed", gpu >= 0);
    this.move(); this.draw(); this.pointed(gpu);
  }

  // Put the cursor where its GPU is, and say what that is.
  move() {
    const gpu = this.at;
    if (gpu >= 0 && this.x[gpu] < 0) { this.at = -1; this.box.classList.remove("pointed"); return; }
    if (gpu < 0) return;
    const s = this.cursor.style, node = this.nodeOf[gpu];
    s.left = `${this.x[gpu] - 4}px`; s.top = `${this.y[gpu] - 4}px`; s.width = `${this.size + 8}px`; s.height = `${this.size + 8}px`;
    this.row.setAttribute("aria-rowindex", node + 1);
    this.cursor.setAttribute("aria-colindex", gpu - this.first[node] + 1);
    this.say();
  }

  say() { if (this.at >= 0) { const text = this.label(this.at); if (this.cursor.getAttribute("aria-label") !== text) this.cursor.setAttribute("aria-label", text); } }

  key(e) {
    if (e.altKey || e.metaKey || !this.order || !this.order.length) return;
    const gpu = this.at >= 0 ? this.at : this.order[0], node = this.nodeOf[gpu], g = gpu - this.first[node];
    const line = this.lines.findIndex((l) => l.includes(node)), column = this.lines[line].indexOf(node);
    const go = (l, c, k) => { const to = this.lines[l][Math.min(c, this.lines[l].length - 1)]; return this.first[to] + Math.min(k, this.nodes.gpus[to] - 1); };
    let to = gpu;
    if (e.key === "ArrowRight") to = g + 1 < this.nodes.gpus[node] ? gpu + 1 : column + 1 < this.lines[line].length ? go(line, column + 1, 0) : line + 1 < this.lines.length ? go(line + 1, 0, 0) : gpu;
    else if (e.key === "ArrowLeft") to = g > 0 ? gpu - 1 : column > 0 ? go(line, column - 1, 1e9) : line > 0 ? go(line - 1, 1e9, 1e9) : gpu;
    else if (e.key === "ArrowDown") to = line + 1 < this.lines.length ? go(line + 1, column, g) : gpu;
    else if (e.key === "ArrowUp") to = line > 0 ? go(line - 1, column, g) : gpu;
    else if (e.key === "Home") to = e.ctrlKey ? this.order[0] : this.first[node];
    else if (e.key === "End") to = e.ctrlKey ? this.order[this.order.length - 1] : this.first[node] + this.nodes.gpus[node] - 1;
    else if (e.key === "PageDown" || e.key === "PageUp") {
      const step = e.key === "PageDown" ? 1 : -1, here = this.nodes.partition[node];
      const starts = this.lines.map((l) => l[0]).filter((n, i, all) => !i || this.nodes.partition[n] !== this.nodes.partition[all[i - 1]]);
      const next = starts[starts.findIndex((n) => this.nodes.partition[n] === here) + step];
      if (next !== undefined) to = this.first[next];
    } else if (e.key === "Enter" || e.key === " ") { e.preventDefault(); this.opened(gpu); return; }
    else if (e.key === "Escape") { this.point(-1, false); this.box.blur(); return; }
    else return;
    e.preventDefault();
    this.point(to, true);
    this.cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}
