// Pictures over time, as wide as their place. Each says in words what it shows; a table stands behind it.
import { clock, h, seconds, svg } from "./core.js";

const LEFT = 66, RIGHT = 10, TOP = 8, AXIS = 20;

function top(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.6, 2, 3, 4, 5, 6, 8, 10].map((s) => s * power).find((s) => s >= value * 0.999);
}

// Draws now and whenever its place gets another width.
export function drawn(place, draw) {
  let width = 0;
  const again = () => { width = place.clientWidth; if (width > 40) place.replaceChildren(draw(width)); };
  new ResizeObserver(() => { if (Math.abs(place.clientWidth - width) > 1) again(); }).observe(place);
  again();
  return again;
}

// bands: {name, colour, values}, one upon the other (stack) or each from 0. line: {value, text} across. marks: {at, text}.
export function over(width, times, bands, { height = 150, unit = String, name = "", stack = false, most = null, line = null, marks = [], end = true } = {}) {
  const w = width - LEFT - RIGHT, base = TOP + height, total = height + TOP + (end ? AXIS : 4);
  const sums = times.map((_, i) => bands.reduce((s, b) => (stack ? s + (b.values[i] || 0) : Math.max(s, b.values[i] || 0)), 0));
  const limit = most ?? top(Math.max(...sums, line ? line.value * 1.02 : 0, 0));
  const first = times[0], last = times[times.length - 1];
  const x = (t) => LEFT + (last > first ? ((t - first) / (last - first)) * w : w / 2), y = (v) => base - (Math.min(v, limit) / limit) * height;
  const parts = [];
  for (const f of [0, 0.5, 1]) {
    parts.push(svg("path", { d: `M${LEFT} ${y(limit * f)}H${width - RIGHT}`, class: "grid" }));
    const t = svg("text", { x: LEFT - 6, y: y(limit * f) + 4, "text-anchor": "end", class: "soft" }); t.textContent = unit(limit * f); parts.push(t);
  }
  const low = new Array(times.length).fill(0);
  bands.forEach((band) => {
    // Where nothing is known there is a gap.
    let run = [];
    const flush = () => {
      if (run.length === 1) {
        const i = run[0];
        parts.push(svg("rect", { x: x(times[i]) - 1.5, y: y(low[i] + band.values[i]), width: 3, height: y(low[i]) - y(low[i] + band.values[i]), class: band.colour }));
      } else if (run.length) {
        const up = run.map((i) => `${x(times[i]).toFixed(1)} ${y(low[i] + band.values[i]).toFixed(1)}`), down = run.map((i) => `${x(times[i]).toFixed(1)} ${y(low[i]).toFixed(1)}`).reverse();
        if (!band.line) parts.push(svg("path", { d: `M${up.join("L")}L${down.join("L")}Z`, class: `${band.colour} ${stack ? "band" : "soften"}` }));
        if (!stack) parts.push(svg("path", { d: `M${up.join("L")}`, class: `edge ${band.colour}` }));
      }
      run = [];
    };
    times.forEach((_, i) => { if (band.values[i] === null || band.values[i] === undefined) flush(); else run.push(i); });
    flush();
    if (stack) times.forEach((_, i) => { low[i] += band.values[i] || 0; });
  });
  if (line) {
    parts.push(svg("path", { d: `M${LEFT} ${y(line.value)}H${width - RIGHT}`, class: "target" }));
    const t = svg("text", { x: width - RIGHT - 2, y: y(line.value) - 5, "text-anchor": "end", class: "value" }); t.textContent = line.text; parts.push(t);
  }
  marks.forEach((m, i) => {
    const at = x(m.at);
    const caption = svg("title"); caption.textContent = m.text;
    parts.push(svg("g", {}, svg("path", { d: `M${at} ${TOP}V${base}`, class: "mark-line" }), ...(m.flag ? [svg("circle", { cx: at, cy: TOP, r: 7.5, class: "flag" }), Object.assign(svg("text", { x: at, y: TOP + 4, "text-anchor": "middle", class: "flag-text" }), { textContent: String(i + 1) })] : []), caption));
  });
  if (end) {
    const steps = last > first ? Math.max(2, Math.floor(w / 110)) : 0;
    for (let i = 0; i <= steps; i++) {
      const at = first + ((last - first) * i) / (steps || 1);
      const t = svg("text", { x: x(at), y: base + 15, "text-anchor": i === 0 ? "start" : i === steps ? "end" : "middle", class: "soft" });
      t.textContent = steps && last - first < 30 ? seconds(at - first) : clock(at, last - first < 600); parts.push(t);
    }
  }
  return svg("svg", { viewBox: `0 0 ${width} ${total}`, width, height: total, role: "img", "aria-label": name }, parts);
}

// A line without axes, beside a figure.
export function spark(values, { width = 160, height = 40, most = null, name = "", colour = "b1" } = {}) {
  const limit = most ?? Math.max(...values, 1e-9) * 1.15, n = Math.max(1, values.length - 1);
  const points = values.map((v, i) => `${((i / n) * width).toFixed(1)} ${(height - 2 - (v / limit) * (height - 6)).toFixed(1)}`);
  const parts = values.length > 1 ? [svg("path", { d: `M${points.join("L")}L${width} ${height}L0 ${height}Z`, class: `${colour} soften` }), svg("path", { d: `M${points.join("L")}`, class: `edge ${colour}` })] : [];
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": name }, parts);
}

export const keys = (bands) => h("ul", { class: "keys" }, bands.map((b) => h("li", {}, h("i", { class: b.colour }), b.label ?? b.name)));
