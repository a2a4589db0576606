// The live board in JupyterLab. kit/watch/live.py sends `complete` once and then deltas. Zoom, smoothing and log scale
// are kept in `view`, so that they survive updates and a reload of the page, and tell the kernel which part to send in
// more detail. Drag to zoom (panels with the same x axis zoom together), double-click to see everything again.
const NS = "http://www.w3.org/2000/svg", W = 470, H = 220, LEFT = 62, RIGHT = 22, BOTTOM = 38, ROW = 15, LETTER = 6.2;
const INK = "#0f172a", MUTED = "#64748b", GRID = "#e2e8f0", BAD = "#dc2626";
const LATE = 8;  // seconds without an update after which the board says so; updates come every half a second

function add(parent, tag, attributes, text) {
  const node = document.createElementNS(NS, tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function number(v) {
  if (!v || (Math.abs(v) >= 1e-3 && Math.abs(v) < 1000)) return String(+v.toPrecision(4));
  if (Math.abs(v) >= 1000 && Math.abs(v) < 1e6) return Math.round(v).toLocaleString("en");
  return v.toExponential(2).split("e").map(Number).join("e");
}

function ticks(low, high) {
  const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough)), out = [];
  const step = [1, 2, 5, 10].map(m => m * unit).find(s => s >= rough * 0.999);
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) out.push(n * step);
  return out;
}

// Values with a number on the y axis; on a logarithmic one powers of ten, or round numbers if these are too few.
function yTicks(low, high, log) {
  if (!log) return ticks(low, high);
  const powers = [];
  for (let n = Math.ceil(low); n <= high; n++) powers.push(10 ** n);
  const few = powers.filter((_, i) => i % (Math.floor(powers.length / 6) + 1) === 0);
  return few.length > 1 ? few : ticks(10 ** low, 10 ** high).filter(v => v > 0);
}

function range(values, low, high, margin) {
  let first = low ?? Infinity, last = high ?? -Infinity;
  for (const v of values) { if (v < first) first = v; if (v > last) last = v; }
  if (!(first <= last)) first = last = 0;
  const room = last > first ? margin * (last - first) : Math.abs(first) * 0.1 || 0.5;
  return [first === low ? first : first - room, last === high ? last : last + room];
}

// The exponential moving average, as in kit/watch/charts.py.
function smoothed(ys, weight) {
  let mean = 0, sum = 0;
  return ys.map(y => y === null ? null : (mean = weight * mean + (1 - weight) * y) / (sum = weight * sum + 1 - weight));
}

function legend(svg, lines) {
  const groups = new Map();
  for (const line of lines) groups.set(line.name, [...(groups.get(line.name) || []), line]);
  let x = 0, y = 13 + ROW;
  for (const [name, group] of groups) {
    const last = group.map(l => l.y.at(-1)), mean = last.includes(null) ? "NaN" : number(last.reduce((a, b) => a + b) / last.length);
    const text = `${name} ${mean}` + (last.length > 1 && groups.size <= 6 ? ` (mean of ${last.length})` : "");
    if (x && x + 18 + LETTER * text.length > W) { x = 0; y += ROW; }
    add(svg, "path", { d: `M${x} ${y - 4}h14`, stroke: group[0].colour, "stroke-width": 2, "stroke-dasharray": group[0].dash });
    add(svg, "text", { x: x + 18, y }, text);
    x += 30 + LETTER * text.length;
  }
  return y + 10;
}

// A path through the points, dots where they are few, and crosses where a value is not finite.
function path(line, ys, px, py, top) {
  let d = "", dots = "", crosses = "", pen = "M";
  line.x.forEach((v, i) => {
    if (ys[i] === null) { crosses += `M${px(v) - 4} ${top}l8 8m0 -8l-8 8`; pen = "M"; return; }
    const point = `${px(v).toFixed(1)} ${py(ys[i]).toFixed(1)}`;
    d += pen + point; pen = "L";
    if (line.x.length <= 24 && !line.limit) dots += `M${point}h0`;
  });
  return { d, dots, crosses };
}

// Draws one panel and returns its scales, which the mouse handlers need, or null for an empty panel.
function draw(svg, panel, view) {
  svg.replaceChildren();
  const zoom = view.zoom?.[panel.x_title], log = (view.log || []).includes(panel.title), smooth = panel.noisy ? view.smooth || 0 : 0;
  add(svg, "text", { y: 13, "font-weight": 600, fill: INK }, panel.title);
  const button = { x: W - RIGHT, y: 13, "text-anchor": "end", class: "kit-log", style: "cursor:pointer" };
  add(svg, "text", { ...button, fill: log ? "#2563eb" : "#94a3b8", "font-weight": log ? 600 : 400 }, "log");
  if (zoom) add(svg, "text", { ...button, x: W - RIGHT - 30, class: "kit-all", fill: "#2563eb" }, "show all");
  if (panel.not_finite) add(svg, "text", { x: W - RIGHT - (zoom ? 90 : 30), y: 13, "text-anchor": "end", "font-weight": 600, fill: BAD }, `NaN or infinite: ${panel.not_finite.toLocaleString("en")}`);
  if (!panel.lines.length) return add(svg, "text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "nothing logged yet"), null;
  const top = legend(svg, panel.lines), right = W - RIGHT, bottom = H - BOTTOM, level = log ? Math.log10 : v => v;
  const [x0, x1] = zoom || range(panel.lines.flatMap(l => l.x), null, null, 0);
  const seen = panel.lines.flatMap(l => l.y.filter((v, i) => v !== null && l.x[i] >= x0 && l.x[i] <= x1 && (!log || v > 0)));
  const [y0, y1] = log ? range(seen.map(level), null, null, 0.05) : range(seen, panel.low, panel.high, 0.05);
  const px = v => LEFT + (v - x0) / (x1 - x0) * (right - LEFT), py = v => bottom - (level(v) - y0) / (y1 - y0) * (bottom - top);
  const clip = "kit" + Math.random().toString(36).slice(2);
  add(add(svg, "clipPath", { id: clip }), "rect", { x: LEFT - 3, y: 0, width: right - LEFT + 6, height: bottom + 1 });
  for (const v of yTicks(y0, y1, log)) {
    add(svg, "path", { d: `M${LEFT} ${py(v)}H${right}`, stroke: GRID });
    add(svg, "text", { x: LEFT - 6, y: py(v) + 4, "text-anchor": "end" }, number(v));
  }
  for (const v of ticks(x0, x1)) {
    add(svg, "path", { d: `M${px(v)} ${bottom}v4`, stroke: MUTED });
    add(svg, "text", { x: px(v), y: bottom + 16, "text-anchor": "middle", class: "kit-x" }, number(v));
  }
  add(svg, "path", { d: `M${LEFT} ${bottom}H${right}`, stroke: MUTED });
  add(svg, "text", { x: (LEFT + right) / 2, y: H - 6, "text-anchor": "middle" }, panel.x_title);
  add(svg, "text", { transform: `translate(10 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, panel.y_title);
  const inside = add(svg, "g", { "clip-path": `url(#${clip})`, fill: "none" }), crowded = panel.lines.length > 6;
  for (const given of panel.lines) {
    const kept = given.y.map((v, i) => !log || v === null || v > 0), line = { ...given, x: given.x.filter((_, i) => kept[i]), y: given.y.filter((_, i) => kept[i]) };
    const pen = { stroke: line.colour, "stroke-dasharray": line.dash, "stroke-linejoin": "round" }, isSmoothed = smooth && !line.limit;
    if (isSmoothed) add(inside, "path", { ...pen, d: path(line, line.y, px, py, top).d, "stroke-width": 1, "stroke-opacity": 0.25 });
    const { d, dots, crosses } = path(line, isSmoothed ? smoothed(line.y, smooth) : line.y, px, py, top);
    add(inside, "path", { ...pen, d, "stroke-width": crowded ? 1 : 1.5, "stroke-opacity": crowded ? 0.5 : 1 });
    if (dots && !crowded) add(inside, "path", { stroke: line.colour, d: dots, "stroke-width": 4.5, "stroke-linecap": "round" });
    if (crosses) add(inside, "path", { d: crosses, stroke: BAD, "stroke-width": 2 });
  }
  return { py, inverse: p => x0 + (p - LEFT) / (right - LEFT) * (x1 - x0), top, bottom, log };
}

function watchMouse(svg, state) {
  let from = null;
  const box = () => svg.getBoundingClientRect(), at = e => (e.clientX - box().left) * W / box().width;
  const move = e => { state.mouse = at(e); state.height = (e.clientY - box().top) * W / box().width; state.from = from; state.hover(); };
  svg.onpointerdown = e => {
    if (e.target.matches(".kit-log")) state.log();
    else if (e.target.matches(".kit-all")) state.zoom(null);
    else from = state.scales && at(e);
  };
  svg.onpointermove = move;
  svg.onpointerleave = () => { from = state.mouse = state.from = null; state.hover(); };
  svg.ondblclick = () => state.zoom(null);
  svg.onpointerup = e => {
    const ends = [from, at(e)].sort((a, b) => a - b);
    if (from !== null && ends[1] - ends[0] > 5) state.zoom(ends.map(state.scales.inverse));
    from = state.from = null;
  };
}

// A crosshair with a point of each line (of the nearest six if there are more), or the range that is being dragged.
function hover(svg, panel, state) {
  svg.querySelector(".kit-hover")?.remove();
  const { scales, mouse, from } = state;
  if (mouse === null || !scales || mouse < LEFT || mouse > W - RIGHT) return;
  const layer = add(svg, "g", { class: "kit-hover", "pointer-events": "none" }), { top, bottom } = scales;
  if (from !== null) return add(layer, "rect", { x: Math.min(from, mouse), y: top, width: Math.abs(mouse - from), height: bottom - top, fill: "#2563eb22" });
  const v = scales.inverse(mouse), nearest = line => line.x.reduce((b, x, i) => Math.abs(x - v) < Math.abs(line.x[b] - v) ? i : b, 0);
  const found = panel.lines.filter(l => !l.limit).map(l => [l, nearest(l)]), far = ([l, i]) => l.y[i] === null ? Infinity : Math.abs(scales.py(l.y[i]) - state.height);
  if (found.length > 6) found.sort((a, b) => far(a) - far(b));
  const texts = found.slice(0, 6).map(([l, i]) => `${l.label} ${l.y[i] === null ? "NaN" : number(l.y[i])} at ${number(l.x[i])}`);
  const wide = 12 + LETTER * Math.max(...texts.map(t => t.length)), left = mouse + wide + 12 > W ? mouse - wide - 8 : mouse + 8;
  add(layer, "path", { d: `M${mouse} ${top}V${bottom}`, stroke: MUTED, "stroke-dasharray": "3 3" });
  add(layer, "rect", { x: left, y: top, width: wide, height: 8 + 15 * texts.length, rx: 3, fill: "#fff", stroke: MUTED });
  texts.forEach((text, i) => add(layer, "text", { x: left + 6, y: top + 15 + 15 * i, fill: INK }, text));
}

// JupyterLab's notification where it lets a page call its commands; elsewhere a box that looks like one.
function toast(text) {
  if (globalThis.jupyterapp) return globalThis.jupyterapp.commands.execute("apputils:notify", { message: text, type: "warning" });
  const box = document.createElement("div");
  box.className = "kit-toast"; box.textContent = text; box.onclick = () => box.remove();
  box.style.cssText = `position:fixed;right:16px;bottom:40px;z-index:10000;max-width:420px;background:#fff;color:${INK};border-left:4px solid ${BAD};padding:10px 14px;border-radius:4px;font:13px sans-serif;box-shadow:0 2px 12px #0005;cursor:pointer`;
  document.body.append(box);
  setTimeout(() => box.remove(), 15000);
}

// Applies each delta to `complete` before any view draws it. New alerts pop up wherever in the notebook the reader is.
function initialize({ model }) {
  model.on("change:delta", () => {
    const complete = model.get("complete"), delta = model.get("delta");
    const panels = delta.panels.map((panel, i) => ({ ...panel, lines: panel.lines.map((line, j) => {
      const old = complete.panels[i]?.lines[j] ?? { x: [], y: [] };
      return { ...line, x: [...old.x.slice(0, line.keep), ...line.x], y: [...old.y.slice(0, line.keep), ...line.y] };
    }) }));
    for (const key in delta.alerts) if (!(key in complete.alerts)) toast(delta.alerts[key]);
    Object.assign(complete, delta, { panels, at: Date.now() });
  });
}

const HEAD = `<label style="float:right;color:${MUTED}">smoothing <input class="smooth" type="range" min="0" max="0.99" step="0.01" style="width:90px;vertical-align:middle"></label><div class="heads"></div>
  <div class="warnings" style="color:${BAD}"></div><div class="grid" style="display:grid;grid-template-columns:1fr 1fr;gap:10px 20px;margin-top:12px"></div>`;

function head(run, late) {
  const box = document.createElement("div");
  box.innerHTML = `<div><span class="dot">&#9679;</span> <b style="font-size:15px"></b></div><div class="status" style="margin:4px 0 6px"></div>
    <div style="background:${GRID};height:4px;border-radius:2px;margin-bottom:8px"><div class="bar" style="height:4px;border-radius:2px"></div></div>`;
  const part = selector => box.querySelector(selector), colour = late ? MUTED : run.colour;
  part("b").textContent = run.title; part(".status").textContent = late ? `not updated for ${late} s: the kernel is busy or has ended. Last status: ${run.status}` : run.status;
  part(".dot").style.color = part(".bar").style.background = colour; part(".bar").style.width = 100 * run.done + "%";
  return box;
}

function render({ model, el }) {
  const panels = [];
  el.innerHTML = `<div class="kit-board" style="width:960px;max-width:100%;background:#fff;color:${INK};font:12px sans-serif;padding:4px 0">${HEAD}</div>`;
  const part = selector => el.querySelector(selector), slider = part(".smooth");
  const change = what => { model.set("view", { ...model.get("view"), ...what }); model.save_changes(); };
  function update() {
    const data = model.get("complete"), view = model.get("view"), late = Math.round((Date.now() - (data.at ??= Date.now())) / 1000);
    part(".heads").replaceChildren(...data.runs.map(run => head(run, late > LATE && late)));
    part(".warnings").replaceChildren(...data.warnings.map(text => Object.assign(document.createElement("div"), { textContent: "\u25B2 " + text, style: "margin-top:4px" })));
    slider.value = view.smooth || 0;
    while (panels.length > data.panels.length) panels.pop().svg.remove();
    data.panels.forEach((panel, i) => {
      const state = panels[i] ??= { svg: add(part(".grid"), "svg", { viewBox: `0 0 ${W} ${H}`, width: "100%", role: "img", "font-size": 11, fill: MUTED, style: "user-select:none" }), mouse: null, from: null };
      state.svg.setAttribute("aria-label", panel.title);
      state.scales = draw(state.svg, panel, view);
      state.hover = () => hover(state.svg, panel, state);
      state.zoom = ends => { const { [panel.x_title]: _, ...others } = view.zoom || {}; change({ zoom: ends ? { ...others, [panel.x_title]: ends } : others }); };
      state.log = () => { const logs = view.log || []; change({ log: logs.includes(panel.title) ? logs.filter(t => t !== panel.title) : [...logs, panel.title] }); };
      if (!state.svg.onpointerdown) watchMouse(state.svg, state);
      state.hover();
    });
  }
  slider.oninput = () => change({ smooth: +slider.value });
  // The output above is the picture of the same board, which is hidden while this one is live.
  let picture = null;
  const hide = setTimeout(() => {
    picture = el.closest(".jp-OutputArea-child")?.previousElementSibling;
    if (picture) picture.style.display = "none";
  }, 100);
  const watchdog = setInterval(() => { if (Date.now() - model.get("complete").at > LATE * 1000) update(); }, 2000);
  model.on("change:delta", update);
  model.on("change:view", update);
  update();
  return () => { clearTimeout(hide); clearInterval(watchdog); if (picture) picture.style.display = ""; model.off("change:delta", update); model.off("change:view", update); };
}

export default { initialize, render };
