"use strict";
// Builds the page from the embedded JSON. A live page fetches newer JSON every two seconds and rebuilds itself.

const COLORS = ["var(--run0)", "var(--run1)", "var(--run2)", "var(--run3)", "var(--run4)", "var(--run5)", "var(--run6)", "var(--run7)"];
const AXES = { steps: "step", tokens: "tokens", time: "time of the run", FLOPs: "FLOPs" };
const PARTS = ["start", "compile", "input", "step", "evaluation", "checkpoint", "lost", "down"];
const state = { axis: "steps", range: null, onlyDifferent: true, sample: null, opened: null };
let board = new Board();

function xs(run, table) {
  if (state.axis === "steps") return table.step;
  if (state.axis === "time") return table.seconds;
  return table.tokens.map((t) => (t === null ? null : state.axis === "tokens" ? t : t * run.flopsPerToken));
}

function points(run, table, name) {
  const at = xs(run, table), values = table[name];
  return values ? at.map((x, i) => [x, values[i]]).filter((p) => p[0] !== null) : [];
}

// One line per run, and dots for held-out values if there are any.
function series(data, row, held) {
  const several = data.runs.length > 1, found = [];
  data.runs.forEach((run, i) => {
    const color = several ? COLORS[i % COLORS.length] : "var(--run0)";
    const line = points(run, run.rows, row);
    if (line.length) found.push({ name: several ? run.name : held ? "training" : row, color, points: line, faint: several && Boolean(held) });
    const dots = held ? points(run, run.evals, held) : [];
    if (dots.length) found.push({ name: several ? `${run.name}, held out` : "held out", color: several ? color : "var(--run1)", points: dots, dots: true });
  });
  return found;
}

function card(title, ...children) {
  return make("section", { class: "card" }, make("h2", {}, title), ...children);
}

function figure(parent, title, spec) {
  const node = make("figure", { class: `card${spec.big ? " big" : ""}`, "data-chart": title });
  const caption = make("figcaption", {}, make("span", { class: "title" }, spec.heading || title));
  node.append(caption);
  parent.append(node);
  const chart = new Chart(node, { title, ...spec }, board);
  caption.append(chart.readout);
  return chart;
}

function showCommand(inside, mark) {
  inside.querySelector(".command")?.remove();
  const copy = make("button", { type: "button" }, "copy"), code = make("code", {}, mark.command);
  copy.addEventListener("click", () => navigator.clipboard?.writeText(mark.command).then(() => { copy.textContent = "copied"; }));
  inside.append(make("p", { class: "command" }, `step ${mark.step} (${mark.what}): show its batch: `, code, copy));
}

function marks(data) {
  return data.runs.flatMap((run) => {
    const at = { step: run.rows.step, x: xs(run, run.rows) };
    return run.marks.map((mark) => {
      let x = mark.step;
      if (state.axis !== "steps") { const i = at.step.findIndex((s) => s >= mark.step); x = i < 0 ? null : at.x[i]; }
      const label = `${data.runs.length > 1 ? `${run.name}, ` : ""}step ${mark.step}: ${mark.what}`;
      return { x, label, kind: mark.what.includes("skipped") ? "skipped" : "spike", show: (inside) => { state.opened = mark; showCommand(inside, mark); } };
    }).filter((mark) => mark.x !== null);
  });
}

function summary(data) {
  if (data.runs.length === 1) {
    const tiles = Object.entries(data.runs[0].facts).map(([k, v]) => make("div", {}, make("dt", {}, k), make("dd", {}, v)));
    return [make("p", { class: "words" }, data.runs[0].words), make("dl", {}, ...tiles)];
  }
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.facts)))];
  const head = make("tr", {}, make("th", {}), ...data.runs.map((run, i) => make("th", {}, make("i", { style: `background:${COLORS[i % COLORS.length]}` }), run.name)));
  const rows = names.map((name) => make("tr", {}, make("td", {}, name), ...data.runs.map((run) => make("td", {}, run.facts[name] ?? ""))));
  const words = make("tr", {}, make("td", {}, "summary"), ...data.runs.map((run) => make("td", { class: "words" }, run.words)));
  return [make("div", { class: "card scroll" }, make("table", { class: "facts" }, head, words, ...rows))];
}

function axisChoice(data, rebuild) {
  const possible = Object.keys(AXES).filter((axis) => axis === "steps"
    || data.runs.some((run) => (axis === "time" ? run.rows.seconds : run.rows.tokens).some((v) => v !== null) && (axis !== "FLOPs" || run.flopsPerToken)));
  if (!possible.includes(state.axis)) state.axis = "steps";
  const buttons = possible.map((axis) => {
    const button = make("button", { type: "button", "aria-pressed": String(axis === state.axis) }, axis);
    button.addEventListener("click", () => { state.axis = axis; state.range = null; rebuild(); });
    return button;
  });
  const all = make("button", { type: "button", class: "all" }, "show all");
  all.addEventListener("click", () => board.zoom(null));
  return make("div", { class: "choice" }, make("span", {}, "against"), ...buttons, make("span", { class: "hint" }, "drag over a chart to zoom, double-click to see all"), all);
}

function legend(data) {
  const key = (color, name, dot) => make("span", {}, make("i", { class: dot ? "dotted" : "", style: `background:${color}` }), name);
  if (data.runs.length === 1) return make("p", { class: "key" }, key("var(--run0)", "training"), key("var(--run1)", "held out", true));
  return make("p", { class: "key" }, ...data.runs.map((run, i) => key(COLORS[i % COLORS.length], run.name)), make("span", {}, "thin: training; dots: held out"));
}

function wallClock(data) {
  const bars = data.runs.filter((run) => Object.keys(run.spent).length).map((run) => {
    const whole = Object.values(run.spent).reduce((a, b) => a + b, 0), parts = Object.entries(run.spent);
    parts.sort((a, b) => PARTS.indexOf(a[0]) - PARTS.indexOf(b[0]));
    const part = ([name, s]) => make("i", { class: PARTS.includes(name) ? name : "down", style: `width:${(100 * s) / whole}%`, title: `${name} ${clock(s)}` });
    const key = ([name, s]) => make("span", {}, make("i", { class: PARTS.includes(name) ? name : "down" }), `${name} ${clock(s)}, ${((100 * s) / whole).toFixed(1)}%`);
    return make("div", { class: "time" }, data.runs.length > 1 ? make("h3", {}, `${run.name}: ${clock(whole)}`) : null,
      make("div", { class: "bar" }, ...parts.map(part)), make("p", {}, ...parts.map(key)));
  });
  if (!bars.length) return null;
  const total = data.runs.length > 1 ? "" : `: ${clock(Object.values(data.runs[0].spent).reduce((a, b) => a + b, 0))}`;
  return card(`Where the time went${total}`, ...bars);
}

function mapWithAxes(title, values, low, high, rowName, first, last, describe) {
  const canvas = heatMap(values, low, high, title);
  canvas.describe = describe;
  return make("div", { class: "map" }, make("h3", {}, title), make("div", { class: "mapbody" }, make("span", { class: "rows" }, rowName), canvas),
    make("p", {}, make("span", {}, first), make("span", {}, `${short(low)} \u2192 ${short(high)}`), make("span", {}, last)));
}

const transpose = (table) => table[0].map((_, i) => table.map((row) => row[i]));

// Heat maps over time (columns) and depth (rows).
function insideMaps(run) {
  const { step, values } = run.health, maps = [], first = `step ${step[0]}`, last = `step ${step.at(-1)}`;
  const over = (title, table, low, high) => maps.push(mapWithAxes(title, transpose(table), low, high, "layer", first, last,
    (layer, column, value) => `layer ${layer}, step ${step[column]}: ${value === null ? "none" : short(value)}`));
  if (values.scale_weight) {
    values.scale_weight[0][0].forEach((_, c) => over(`weight of scale ${c}${c ? "" : " (every token)"}`, values.scale_weight.map((row) => row.map((layer) => layer[c])), 0, 1));
  }
  if (values.scale_entropy) over("entropy of the weights (1: all scales alike)", values.scale_entropy, 0, 1);
  if (values.stream_rms) {
    const top = Math.max(...values.stream_rms.at(-1).flat());
    maps.push(mapWithAxes("RMS of each stream, last row", values.stream_rms.at(-1), 0, top, "layer", "stream 0", `stream ${values.stream_rms[0][0].length - 1}`,
      (layer, stream, value) => `layer ${layer}, stream ${stream}: ${short(value)}`));
  }
  return maps;
}

function depthChart(parent, run) {
  const { values } = run.health, own = new Board();
  Object.assign(own, { name: "layer", whole: true, format: (x) => `layer ${Math.round(x)}` });
  const lines = [["gain_forward", "forward", "var(--run0)"], ["gain_backward", "backward", "var(--run1)"]].filter(([name]) => values[name]);
  if (!lines.length) return;
  const node = make("figure", { class: "card", "data-chart": `gain over depth, ${run.name}` });
  const caption = make("figcaption", {}, make("span", { class: "title" }, "gain of all H_res up to a layer, last row"));
  node.append(caption); parent.append(node);
  const chart = new Chart(node, { title: "gain over depth", log: true, series: lines.map(([name, shown, color]) => ({ name: shown, color, points: values[name].at(-1).map((y, layer) => [layer, y]), dots: true })) }, own);
  caption.append(chart.readout);
}

function mixing(run) {
  if (!run.mixing) return null;
  const once = run.mixing[0].length === 1, of = (layer, part) => `layer ${layer}${once ? "" : part ? ", FFN" : ", attention"}`;
  const grids = run.mixing.map((parts, layer) => make("div", { class: "grid4" }, ...parts.map((matrix, part) => {
    const canvas = heatMap(matrix, 0, 1, `H_res of ${of(layer, part)}`);
    canvas.describe = (to, from, value) => `${of(layer, part)}: stream ${from} into stream ${to}: ${short(value)}`;
    return canvas;
  }), make("span", {}, `${layer}`)));
  return make("div", { class: "map" }, make("h3", {}, `H_res by layer${once ? "" : ", attention above, FFN below"} (row: into, column: from; mean over tokens)`), make("div", { class: "grids" }, ...grids));
}

function inside(run, several) {
  const parts = run.health.values ? insideMaps(run) : [], mixed = mixing(run);
  if (!parts.length && !mixed) return null;
  const node = card(`Inside${several ? `: ${run.name}` : ""}`, make("div", { class: "maps" }, ...parts), mixed);
  if (run.health.values) depthChart(node, run);
  return node;
}

function samples(run, several) {
  if (!run.samples.length) return null;
  const last = run.samples.length - 1, chosen = state.sample === null ? last : Math.min(state.sample, last);
  const text = make("blockquote", {}, run.samples[chosen].text || "(nothing)"), label = make("span", {}, `step ${run.samples[chosen].step}`);
  const range = make("input", { type: "range", min: 0, max: last, value: chosen, "aria-label": "which sample" });
  range.addEventListener("input", () => {
    state.sample = Number(range.value) === last ? null : Number(range.value);
    text.textContent = run.samples[range.value].text || "(nothing)"; label.textContent = `step ${run.samples[range.value].step}`;
  });
  return card(`Samples${several ? `: ${run.name}` : ""}`, make("p", { class: "slider" }, range, label), text);
}

function tableOf(data, name, rebuild) {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run[name])))], several = data.runs.length > 1;
  const differs = (key) => new Set(data.runs.map((run) => run[name][key])).size > 1;
  const shown = several && name === "config" && state.onlyDifferent ? keys.filter(differs) : keys;
  const rows = shown.map((key) => make("tr", { class: several && differs(key) ? "differs" : "" }, make("td", {}, key), ...data.runs.map((run) => make("td", {}, run[name][key] ?? ""))));
  const head = several ? make("tr", {}, make("th", {}), ...data.runs.map((run) => make("th", {}, run.name))) : null;
  const only = make("button", { type: "button" }, state.onlyDifferent ? "show every key" : "show only differences");
  only.addEventListener("click", () => { state.onlyDifferent = !state.onlyDifferent; rebuild(); });
  const none = several && !rows.length ? make("p", { class: "none" }, "no differences") : null;
  return [several && name === "config" ? make("p", {}, only) : null, make("div", { class: "scroll" }, make("table", {}, head, ...rows)), none];
}

function details(title, opened, ...children) {
  const node = make("details", { class: "card" }, make("summary", {}, title), ...children);
  node.open = opened;
  return node;
}

function build(data) {
  const rebuild = () => build(data), open = [...document.querySelectorAll("details")].map((d) => d.open), several = data.runs.length > 1, at = window.scrollY;
  const range = state.range;
  board = new Board();
  const axis = axisChoice(data, rebuild);  // may reset an axis that these runs do not have
  Object.assign(board, { name: AXES[state.axis], format: state.axis === "time" ? clock : short, time: state.axis === "time", range });
  const zoom = board.zoom.bind(board);
  board.zoom = (to) => { state.range = to; document.body.toggleAttribute("data-zoomed", to !== null); zoom(to); };
  document.body.toggleAttribute("data-zoomed", range !== null);
  const main = make("main", {});
  document.querySelector("main")?.remove();
  document.body.append(main);
  const title = several ? `${data.runs.length} runs` : `Run ${data.runs[0].name}`;
  const rows = (run) => `${run.folder} \u00b7 ${run.count[0]} row${run.count[0] === 1 ? "" : "s"} of metrics, ${run.count[1]} evaluation${run.count[1] === 1 ? "" : "s"}`;
  main.append(make("h1", {}, title), ...data.runs.map((run) => make("p", { class: "sub" }, rows(run))));
  if (!several) main.append(...summary(data));
  main.append(axis, legend(data));
  const floors = new Set(data.runs.map((run) => run.floor)), floor = [...floors][0];
  const level = floors.size === 1 && floor !== null ? { y: floor, name: "floor" } : null;
  figure(main, "loss", { heading: "Loss (cross-entropy), nats/token", series: series(data, "loss", "eval/loss"), level, log: true, big: true });
  if (several) main.append(...summary(data));
  const wall = wallClock(data);
  if (wall) main.append(wall);
  const small = make("div", { class: "small" });
  main.append(small);
  const noted = marks(data);
  figure(small, "gradient norm", { heading: noted.length ? "gradient norm (\u25b2 spikes and skipped steps: click)" : "gradient norm", series: series(data, "grad_norm"), marks: noted, log: true });
  for (const [title, name, log] of data.runs[0].charts) {
    const lines = series(data, name, `eval/${name}`);
    if (lines.length) figure(small, title, { series: lines, log });
  }
  figure(small, "token accuracy", { series: series(data, "accuracy", "eval/accuracy") });
  figure(small, "learning rate", { series: series(data, "lr") });
  figure(small, "tokens/s", { series: series(data, "tokens_per_s") });
  figure(small, "ms/step", { series: series(data, "step_ms") });
  figure(small, "ms/step waiting for data", { series: series(data, "data_wait_ms") });
  for (const [name, key] of [["MFU (share of peak FLOP/s)", "mfu"], ["goodput", "goodput"], ["memory per device, GiB", "memory_gib"]]) {
    const lines = series(data, key);
    if (lines.length) figure(small, name, { series: lines });
  }
  const sources = [...new Set(data.runs.flatMap((run) => Object.keys(run.rows).filter((key) => key.startsWith("epochs/"))))];
  if (sources.length) {
    const lines = sources.flatMap((key, i) => series(data, key).map((line, j) => ({ ...line, name: `${several ? `${line.name}, ` : ""}${key.slice(7)}`, color: COLORS[(several ? j : i) % COLORS.length] })));
    figure(small, "passes over the data", { series: lines });
  }
  for (const run of data.runs) main.append(...[inside(run, several), samples(run, several)].filter((part) => part !== null));
  main.append(details("Configuration", open[0] ?? several, ...tableOf(data, "config", rebuild)), details("Environment", open[1] ?? false, ...tableOf(data, "environment", rebuild)));
  if (state.opened) { const at = main.querySelector('[data-chart="gradient norm"]'); showCommand(at, state.opened); }
  window.scrollTo(0, at);
}

const shown = document.getElementById("data");
build(JSON.parse(shown.textContent));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const map of document.querySelectorAll("canvas.heat")) map.repaint(); });

if (document.body.hasAttribute("data-live")) {
  const status = make("p", { class: "live", role: "status" }, "live");
  document.body.prepend(status);
  let last = shown.textContent;
  const ask = async () => {
    try {
      const answer = await fetch("/data.json", { cache: "no-store" }), text = await answer.text();
      if (!answer.ok) throw new Error(text.trim());
      if (text !== last) { last = text; build(JSON.parse(text)); }
      status.textContent = "live"; status.classList.remove("gone");
    } catch (error) {
      status.textContent = `not live: ${error.message}`; status.classList.add("gone");
    }
    setTimeout(ask, 2000);
  };
  setTimeout(ask, 2000);
}
