"use strict";
// Line charts as SVG, and heat maps on canvases. Charts on one Board share the range of x that is shown and the cursor.
// Everything that comes from a run is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function draw(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// 1234567 -> 1.23M; numbers of the size that people write out stay as they are.
function short(value) {
  for (const [size, letter] of [[1e21, "Z"], [1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) return String(Number((value / (letter === "k" ? 1e3 : size)).toPrecision(4))) + letter;
  }
  return String(Number(value.toPrecision(4)));
}

function clock(seconds) {
  const whole = Math.round(seconds), s = whole % 60, m = Math.floor(whole / 60) % 60, h = Math.floor(whole / 3600);
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (whole < 60) return `${whole} s`;
  return h ? `${h} h${m ? ` ${m} min` : ""}` : `${m} min${s ? ` ${s} s` : ""}`;
}

// Round numbers (1, 2 or 5 times a power of ten) within the range, about `count` of them; of time, round times.
function ticks(low, high, count, time) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  let steps = [1, 2, 5, 10].map((f) => f * power);
  if (time && rough > 1) steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];
  const step = steps.reduce((best, s) => (Math.abs(Math.log(s / rough)) < Math.abs(Math.log(best / rough)) ? s : best));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const span = high - low, digits = span > 4 ? [1] : span > 1.2 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9], found = [];
  for (let e = Math.floor(low); e <= Math.ceil(high); e += Math.max(1, Math.ceil(span / 8))) {
    for (const digit of digits) if (Math.log10(digit * 10 ** e) >= low && Math.log10(digit * 10 ** e) <= high) found.push(digit * 10 ** e);
  }
  return found.length ? found : [10 ** ((low + high) / 2)];
}

// More points than pixels: the lowest and the highest of each stretch stay, so that a spike never disappears.
function thin(points, most) {
  if (points.length <= 2 * most) return points;
  const size = Math.ceil(points.length / most), kept = [];
  for (let at = 0; at < points.length; at += size) {
    const known = points.slice(at, at + size).filter((p) => p[1] !== null);
    if (!known.length) { kept.push([points[at][0], null]); continue; }
    const low = known.reduce((a, b) => (b[1] < a[1] ? b : a)), high = known.reduce((a, b) => (b[1] > a[1] ? b : a));
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

class Board {
  constructor() { this.charts = []; this.range = null; this.format = short; this.time = false; }
  zoom(range) { this.range = range; for (const chart of this.charts) chart.render(); }
  point(x) { for (const chart of this.charts) chart.cursor(x); }
}

// spec: {title, series: [{name, color, points: [[x, y or null], ...], dots, faint}], level: {y, name}, marks, log, big, xName}
class Chart {
  constructor(figure, spec, board) {
    Object.assign(this, { figure, spec, board });
    this.readout = make("output", {}, "");
    this.body = make("div", { class: "plot" });
    figure.append(this.body);
    board.charts.push(this);
    new ResizeObserver(() => { if (this.body.clientWidth !== this.width) this.render(); }).observe(this.body);
    this.render();
  }

  visible() {
    const [low, high] = this.board.range || [-Infinity, Infinity];
    return this.spec.series.map((s) => {
      // With the neighbours on both sides, so that a line goes on to the edge.
      const first = s.points.findIndex((p) => p[0] >= low), last = s.points.findLastIndex((p) => p[0] <= high);
      return { ...s, points: first < 0 || last < 0 ? [] : s.points.slice(Math.max(first - 1, 0), last + 2) };
    });
  }

  render() {
    this.width = this.body.clientWidth || 320;
    const { spec, width: W } = this, H = spec.big ? Math.max(240, Math.min(380, W * 0.45)) : 180;
    const left = 52, right = 12, top = 10, bottom = spec.big ? 40 : 24;
    const series = this.visible(), inside = (x) => !this.board.range || (x >= this.board.range[0] && x <= this.board.range[1]);
    const known = series.flatMap((s) => s.points.filter((p) => p[1] !== null && inside(p[0])));
    this.known = known.length > 0;
    if (!this.known) { this.body.replaceChildren(make("p", { class: "none" }, this.board.range ? "no values in this range" : "no values yet")); return; }
    const ys = known.map((p) => p[1]), level = spec.level && !this.board.range ? [spec.level.y] : [];
    let low = Math.min(...ys, ...level), high = Math.max(...ys, ...level);
    const log = this.log = Boolean(spec.log) && low > 0 && high > 3 * low, scale = log ? Math.log10 : (y) => y;
    if (!spec.big && !this.board.range && low > 0 && !spec.log) low = 0;
    let y0 = scale(low), y1 = scale(high);
    if (!(y1 > y0)) { const room = Math.abs(y0) || 1; y0 -= room / 2; y1 += room / 2; }
    const pad = 0.06 * (y1 - y0);
    y0 = low === 0 ? 0 : y0 - pad; y1 += pad;
    const xs = known.map((p) => p[0]);
    let [x0, x1] = this.board.range || [Math.min(...xs) <= 0.1 * Math.max(...xs) ? 0 : Math.min(...xs), Math.max(...xs)];
    if (!(x1 > x0)) x1 = x0 + 1;
    const px = (x) => left + ((x - x0) / (x1 - x0)) * (W - left - right);
    const py = (y) => top + ((y1 - scale(y)) / (y1 - y0)) * (H - top - bottom);
    Object.assign(this, { x0, x1, px, left, right, top, bottom, H });
    const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, width: W, height: H, role: "img", "aria-label": spec.title });
    let above = Infinity;
    for (const y of log ? logTicks(y0, y1) : ticks(y0, y1, spec.big ? 6 : 4)) {
      if (above - py(y) < 13) continue;  // no room for its number
      above = py(y);
      svg.append(draw("path", { class: "grid", d: `M${left},${py(y).toFixed(1)}H${W - right}` }));
      svg.append(draw("text", { x: left - 6, y: py(y) + 4, class: "y" }, short(y)));
    }
    for (const x of ticks(x0, x1, Math.max(2, Math.min(8, Math.floor(W / 85))), this.board.time)) {
      if (this.board.whole && x !== Math.round(x)) continue;
      const atEdge = px(x) > W - right - 14;  // there a number in the middle would be cut off
      svg.append(draw("text", { x: atEdge ? W - 2 : px(x), y: H - bottom + 16, class: atEdge ? "y" : "x" }, this.board.format(x)));
    }
    if (spec.big) svg.append(draw("text", { x: (left + W - right) / 2, y: H - 6, class: "x" }, `${this.board.name}${log ? " (loss on a log scale)" : ""}`));
    if (level.length) {
      svg.append(draw("path", { class: "floor", d: `M${left},${py(level[0]).toFixed(1)}H${W - right}` }));
      svg.append(draw("text", { x: W - right, y: py(level[0]) - 5, class: "y" }, `${spec.level.name} ${short(level[0])}`));
    }
    const clip = `clip${Math.random().toString(36).slice(2)}`, area = draw("clipPath", { id: clip });
    area.append(draw("rect", { x: left, y: top - 4, width: W - left - right, height: H - top - bottom + 8 }));
    const lines = draw("g", { "clip-path": `url(#${clip})` });
    for (const s of series) lines.append(...this.line(s, px, py, W));
    this.pointer = draw("path", { class: "pointer", d: "" });
    this.selected = draw("rect", { class: "selected", y: top, height: H - top - bottom, width: 0, x: left });
    svg.append(area, lines, this.pointer, this.selected);
    for (const mark of (spec.marks || []).filter((m) => inside(m.x))) svg.append(this.mark(mark, px(mark.x), H - bottom));
    this.listen(svg);
    this.body.replaceChildren(svg);
  }

  line(s, px, py, W) {
    const moves = [], drawn = thin(s.points, W);
    let pen = "M";
    for (const [x, y] of drawn) {
      // From a value that stands alone between gaps, h0 and the round cap make a dot.
      if (y !== null) moves.push(`${pen}${px(x).toFixed(1)},${py(y).toFixed(1)}${pen === "M" ? "h0" : ""}`);
      pen = y === null ? "M" : "L";
    }
    const nodes = [draw("path", { class: `line${s.faint ? " faint" : ""}`, d: moves.join(" "), style: `stroke:${s.color}` })];
    if (s.dots && drawn.length < W / 6) {
      for (const [x, y] of drawn) if (y !== null) nodes.push(draw("circle", { cx: px(x).toFixed(1), cy: py(y).toFixed(1), r: 3.5, class: "dot", style: `fill:${s.color}` }));
    }
    return nodes;
  }

  mark(mark, x, y) {
    const node = draw("path", { class: `mark ${mark.kind}`, d: `M${x.toFixed(1)},${y - 1}l-5,9h10z`, tabindex: 0, role: "button", "aria-label": mark.label });
    node.append(draw("title", {}, mark.label));
    const show = (event) => { event.stopPropagation(); mark.show(this.figure); };
    node.addEventListener("pointerdown", (event) => event.stopPropagation());
    node.addEventListener("click", show);
    node.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") show(event); });
    return node;
  }

  listen(svg) {
    const at = (event) => {
      const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * (this.width / box.width);
      return this.x0 + ((Math.min(Math.max(x, this.left), this.width - this.right) - this.left) / (this.width - this.left - this.right)) * (this.x1 - this.x0);
    };
    let from = null;
    svg.addEventListener("pointerdown", (event) => { if (event.button === 0) { from = at(event); svg.setPointerCapture(event.pointerId); } });
    svg.addEventListener("pointermove", (event) => {
      const x = at(event);
      this.board.point(x);
      if (from === null) return;
      const [a, b] = [this.px(Math.min(from, x)), this.px(Math.max(from, x))];
      this.selected.setAttribute("x", a); this.selected.setAttribute("width", b - a);
    });
    svg.addEventListener("pointerup", (event) => {
      const to = at(event), [a, b] = [Math.min(from, to), Math.max(from, to)], wide = from !== null && this.px(b) - this.px(a) > 6;
      from = null; this.selected.setAttribute("width", 0);
      if (wide) this.board.zoom([a, b]);
    });
    svg.addEventListener("pointerleave", () => { if (from === null) this.board.point(null); });
    svg.addEventListener("dblclick", () => this.board.zoom(null));
  }

  cursor(x) {
    if (!this.known) return;
    if (x === null || x < this.x0 || x > this.x1) { this.pointer.setAttribute("d", ""); this.readout.textContent = ""; return; }
    this.pointer.setAttribute("d", `M${this.px(x).toFixed(1)},${this.top}V${this.H - this.bottom}`);
    const told = [];
    for (const s of this.spec.series) {
      const near = s.points.filter((p) => p[1] !== null).reduce((a, b) => (a === null || Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a), null);
      if (near !== null) told.push(`${s.name} ${short(near[1])}`);
    }
    this.readout.textContent = `${this.board.format(x)}: ${told.join(", ")}`;
  }
}

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function rgb(color) {
  const canvas = make("canvas", { width: 1, height: 1 }), pen = canvas.getContext("2d");
  pen.fillStyle = color; pen.fillRect(0, 0, 1, 1);
  return pen.getImageData(0, 0, 1, 1).data;
}

// A map of values[row][column]: from the page's colour of nothing (low) to its colour of much (high).
function heatMap(values, low, high, title) {
  const canvas = make("canvas", { width: values[0].length, height: values.length, role: "img", "aria-label": title, class: "heat" });
  const paint = () => {
    const pen = canvas.getContext("2d"), image = pen.createImageData(canvas.width, canvas.height), cold = rgb(style("--cold")), hot = rgb(style("--hot"));
    values.flat().forEach((value, i) => {
      const share = value === null ? 0 : Math.min(Math.max((value - low) / (high - low || 1), 0), 1);
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = cold[c] + share * (hot[c] - cold[c]);
      image.data[4 * i + 3] = value === null ? 0 : 255;
    });
    pen.putImageData(image, 0, 0);
  };
  paint();
  canvas.repaint = paint;
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.min(values[0].length - 1, Math.floor(((event.clientX - box.left) / box.width) * values[0].length));
    const row = Math.min(values.length - 1, Math.floor(((event.clientY - box.top) / box.height) * values.length));
    const value = (values[row] || [])[column];
    canvas.title = canvas.describe ? canvas.describe(row, column, value) : String(value);
  });
  return canvas;
}
