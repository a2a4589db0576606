// The live board in JupyterLab. kit/watch/live.py sends `complete` once and then deltas. How a person looks at it is kept
// in `view` (kit/watch/view.py), so that it survives updates and a reload of the page, and tells the kernel which part to
// send in more detail. Drag to zoom (panels with the same x axis zoom together), double-click to see everything again,
// click a row of the heat map for its curves. Colours come from variables of the page's theme.
const NS = "http://www.w3.org/2000/svg", H = 220, LEFT = 62, RIGHT = 22, BOTTOM = 38, ROW = 15, LETTER = 6.2;
const BAD = "#d55e00", MINUTES = "minutes since the start";  // of kit/figures/palette.py and kit/watch/view.py
const STEP = "optimizer step", FEWEST = 5;  // of kit/watch/charts.py
const LATE = 8;  // seconds without an update after which the board says so; updates come every half a second
const STYLE = `
  .kit-board { --ink: var(--jp-ui-font-color1, #0f172a); --muted: var(--jp-ui-font-color2, #5b6673);
    --grid: var(--jp-border-color2, #e2e8f0); --paper: var(--jp-layout-color0, #fff);
    --chosen: var(--jp-brand-color1, #0072b2);
    background: var(--paper); color: var(--ink); font: 12px sans-serif; padding: 4px 0; }
  .kit-board svg { display: block; width: 100%; font-size: 11px; fill: var(--muted); user-select: none; }
  .kit-board .ink { fill: var(--ink); } .kit-board .bold { font-weight: 600; } .kit-board .bad { fill: ${BAD}; }
  .kit-board .rule { stroke: var(--grid); } .kit-board .axis { stroke: var(--muted); }
  .kit-board .paper { fill: var(--paper); stroke: var(--muted); } .kit-board .gap { stroke: var(--paper); }
  .kit-board .button { cursor: pointer; } .kit-board .chosen { fill: var(--chosen); font-weight: 600; }
  .kit-board .band { fill: var(--chosen); fill-opacity: 0.15; }
  .kit-board .bar { height: 4px; border-radius: 2px; background: var(--grid); margin-bottom: 8px; }
  .kit-board .bar div { height: 4px; border-radius: 2px; }
  .kit-board .tools { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: center; color: var(--muted); }
  .kit-board select { color: var(--ink); background: var(--paper); border: 1px solid var(--grid); border-radius: 3px; }
  .kit-board .panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr));
    gap: 10px 20px; margin-top: 12px; }
  .kit-board .map { grid-column: 1 / -1; }
  .kit-board .scale { display: inline-block; width: 90px; height: 9px; margin: 0 6px; border: 1px solid var(--grid); }
  /* the output above is the picture of the same board */
  .jp-OutputArea-child:has(+ .jp-OutputArea-child .kit-board) { display: none !important; }
  .kit-board .warnings { color: ${BAD}; } .kit-board .warnings div { margin-top: 4px; }`;

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

// Title and ticks of the x axis; minutes become hours where there are many.
function xTicks(title, low, high) {
  if (title !== MINUTES || high - low < 180) return [title, ticks(low, high).map(v => [v, number(v)])];
  return ["hours since the start", ticks(low / 60, high / 60).map(v => [60 * v, number(v)])];
}

function range(values, low, high, margin) {
  let first = low ?? Infinity, last = high ?? -Infinity;
  for (const v of values) { if (v < first) first = v; if (v > last) last = v; }
  if (!(first <= last)) first = last = 0;
  const room = last > first ? margin * (last - first) : Math.abs(first) * 0.1 || 0.5;
  return [first === low ? first : first - room, last === high ? last : last + room];
}

// The ends of an x axis: of steps at least so many, as there is nothing between two of them.
function xRange(panel) {
  const values = panel.lines.flatMap(l => l.x);
  if (panel.x_title !== STEP) return range(values, null, null, 0);
  const first = values.reduce((a, b) => Math.min(a, b));
  return [first, values.reduce((a, b) => Math.max(a, b), first + FEWEST)];
}

// The exponential moving average, as in kit/watch/charts.py.
function smoothed(ys, weight) {
  let mean = 0, sum = 0;
  return ys.map(y => y === null ? null : (mean = weight * mean + (1 - weight) * y) / (sum = weight * sum + 1 - weight));
}

function legend(svg, lines, wide) {
  const groups = new Map();
  for (const line of lines) groups.set(line.name, [...(groups.get(line.name) || []), line]);
  let x = 0, y = 13 + ROW;
  for (const [name, group] of groups) {
    const last = group.map(l => l.y.at(-1)), mean = last.includes(null) ? "NaN" : number(last.reduce((a, b) => a + b) / last.length);
    const text = `${name} ${mean}` + (last.length > 1 && groups.size <= 6 ? ` (mean of ${last.length})` : "");
    if (x && x + 18 + LETTER * text.length > wide) { x = 0; y += ROW; }
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

function drawXAxis(svg, title, { x0, x1, px, left, right, bottom }) {
  const [name, marks] = xTicks(title, x0, x1);
  for (const [v, text] of marks) {
    add(svg, "path", { d: `M${px(v)} ${bottom}v4`, class: "axis" });
    add(svg, "text", { x: px(v), y: bottom + 16, "text-anchor": "middle", class: "kit-x" }, text);
  }
  add(svg, "path", { d: `M${left} ${bottom}H${right}`, class: "axis" });
  add(svg, "text", { x: (left + right) / 2, y: bottom + 32, "text-anchor": "middle" }, name);
}

function clipped(svg, left, top, width, height) {
  const id = "kit" + Math.random().toString(36).slice(2);
  add(add(svg, "clipPath", { id }), "rect", { x: left, y: top, width, height });
  return add(svg, "g", { "clip-path": `url(#${id})`, fill: "none" });
}

// Draws one panel and returns its scales, which the mouse handlers need, or null for an empty panel.
function draw(svg, panel, view, wide) {
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${wide} ${H}`);
  const zoom = view.zoom?.[panel.x_title], log = (view.log || []).includes(panel.title), smooth = panel.noisy ? view.smooth || 0 : 0;
  add(svg, "text", { y: 13, class: "ink bold" }, panel.title);
  const button = { x: wide - RIGHT, y: 13, "text-anchor": "end" };
  add(svg, "text", { ...button, class: "kit-log button" + (log ? " chosen" : ""), "font-weight": log ? 600 : 400 }, "log");
  if (zoom) add(svg, "text", { ...button, x: wide - RIGHT - 30, class: "kit-all button chosen" }, "show all");
  if (panel.not_finite) add(svg, "text", { ...button, x: wide - RIGHT - (zoom ? 95 : 30), class: "bad bold" }, `NaN or infinite: ${panel.not_finite.toLocaleString("en")}`);
  if (!panel.lines.length) return add(svg, "text", { x: wide / 2, y: H / 2, "text-anchor": "middle" }, "nothing logged yet"), null;
  const top = legend(svg, panel.lines, wide), left = LEFT, right = wide - RIGHT, bottom = H - BOTTOM, level = log ? Math.log10 : v => v;
  const [x0, x1] = zoom || xRange(panel);
  const seen = panel.lines.flatMap(l => l.y.filter((v, i) => v !== null && (l.limit || (l.x[i] >= x0 && l.x[i] <= x1)) && (!log || v > 0)));
  const [y0, y1] = log ? range(seen.map(level), null, null, 0.05) : range(seen, panel.low, panel.high, 0.05);
  const px = v => left + (v - x0) / (x1 - x0) * (right - left), py = v => bottom - (level(v) - y0) / (y1 - y0) * (bottom - top);
  for (const v of yTicks(y0, y1, log)) {
    add(svg, "path", { d: `M${left} ${py(v)}H${right}`, class: "rule" });
    add(svg, "text", { x: left - 6, y: py(v) + 4, "text-anchor": "end" }, number(v));
  }
  const scales = { x0, x1, px, py, left, right, top, bottom, inverse: p => x0 + (p - left) / (right - left) * (x1 - x0) };
  drawXAxis(svg, panel.x_title, scales);
  add(svg, "text", { transform: `translate(10 ${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, panel.y_title);
  const inside = clipped(svg, left - 3, top - 4, right - left + 6, bottom - top + 5), crowded = panel.lines.length > 6;
  for (const given of panel.lines) {
    const kept = given.y.map((v, i) => !log || v === null || v > 0), line = { ...given, x: given.x.filter((_, i) => kept[i]), y: given.y.filter((_, i) => kept[i]) };
    const pen = { stroke: line.colour, "stroke-dasharray": line.dash, "stroke-linejoin": "round" }, isSmoothed = smooth && !line.limit;
    if (isSmoothed) add(inside, "path", { ...pen, d: path(line, line.y, px, py, top).d, "stroke-width": 1, "stroke-opacity": 0.25 });
    const { d, dots, crosses } = path(line, isSmoothed ? smoothed(line.y, smooth) : line.y, px, py, top);
    add(inside, "path", { ...pen, d, "stroke-width": crowded ? 1 : 1.5, "stroke-opacity": crowded ? 0.5 : 1 });
    if (dots && !crowded) add(inside, "path", { stroke: line.colour, d: dots, "stroke-width": 4.5, "stroke-linecap": "round" });
    if (crosses) add(inside, "path", { d: crosses, stroke: BAD, "stroke-width": 2 });
  }
  return scales;
}

// The cells of a heat map as a picture of one pixel each: the colour is clearer the higher the value.
function cells(map, order, columns) {
  const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: order.length });
  const context = canvas.getContext("2d"), image = context.createImageData(columns, order.length);
  const [red, green, blue] = [1, 3, 5].map(at => parseInt(map.colour.slice(at, at + 2), 16)), rows = order.length;
  order.forEach((row, y) => {
    for (let x = 0; x < columns; x++) {
      const level = map.levels[x * rows + row];
      image.data.set([red, green, blue, level && 16 + Math.round((level - 1) / 254 * 239)], 4 * (y * columns + x));
    }
  });
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

// The rows that get a label: those that are marked, those that begin a node, then all others that have room.
function labelled(map, order, high) {
  const node = row => map.labels[row].replace(/ GPU \S+$/, ""), placed = [];
  const first = order.filter((row, i) => i === 0 || node(row) !== node(order[i - 1]));
  for (const row of [...order.filter(row => map.marked.includes(row)), ...first, ...order]) {
    const at = order.indexOf(row);
    if (placed.every(other => Math.abs(other - at) * high >= 12)) placed.push(at);
  }
  return placed;
}

// Draws a heat map: a row for each device, time to the right.
function drawMap(svg, map, view, wide, colours) {
  const rows = map.labels.length, high = rows <= 20 ? 16 : rows <= 40 ? 12 : 8, columns = map.levels.length / rows, top = 6;
  const height = top + rows * high + BOTTOM, longest = Math.max(...map.labels.map(l => l.length));
  svg.setAttribute("viewBox", `0 0 ${wide} ${height}`);
  svg.replaceChildren();
  const order = view.slowest_first ? map.slowest_first : map.labels.map((_, i) => i);
  const left = Math.min(0.3 * wide, Math.max(LEFT, 16 + LETTER * longest)), right = wide - RIGHT, bottom = top + rows * high;
  const [x0, x1] = view.zoom?.[MINUTES] || [map.start, map.start + map.width * columns];
  const px = v => left + (v - x0) / (x1 - x0) * (right - left), end = px(map.start + map.width * columns);
  const inside = clipped(svg, left, top, right - left, rows * high);
  add(inside, "image", { x: px(map.start), y: top, width: end - px(map.start), height: rows * high, preserveAspectRatio: "none", style: "image-rendering:pixelated", href: cells(map, order, columns) });
  if (high > 10) add(inside, "path", { d: order.map((_, i) => `M${left} ${top + i * high}H${right}`).join(""), class: "gap", "stroke-width": 1 });
  for (const i of labelled(map, order, high)) {
    const label = map.labels[order[i]], fits = Math.floor((left - 10) / LETTER), chosen = (view.selected || []).includes(label);
    const text = label.length > fits ? "\u2026" + label.slice(1 - fits) : label, slow = map.marked.includes(order[i]);
    add(svg, "text", { x: left - 6, y: top + (i + 0.5) * high + 4, "text-anchor": "end", class: `kit-row${slow ? " bad bold" : chosen ? " ink bold" : ""}` }, text);
  }
  order.forEach((row, i) => {
    const colour = colours[map.labels[row]];
    if ((view.selected || []).includes(map.labels[row]) && colour) add(svg, "rect", { x: right + 4, y: top + i * high + 1, width: 10, height: high - 2, fill: colour });
  });
  const scales = { x0, x1, px, left, right, top, bottom, inverse: p => x0 + (p - left) / (right - left) * (x1 - x0) };
  drawXAxis(svg, MINUTES, scales);
  return { ...scales, row: y => order[Math.floor((y - top) / high)] };
}

function watchMouse(svg, state) {
  let from = null;
  const box = () => svg.getBoundingClientRect(), at = e => e.clientX - box().left;
  const tell = e => { state.mouse = at(e); state.height = e.clientY - box().top; state.from = from; state.hover(); };
  svg.onpointerdown = e => {
    if (e.target.matches(".kit-log")) state.log();
    else if (e.target.matches(".kit-all")) state.zoom(null);
    else from = state.scales && at(e);
  };
  svg.onpointermove = tell;
  svg.onpointerleave = () => { from = state.mouse = state.from = null; state.hover(); };
  svg.ondblclick = () => state.zoom(null);
  svg.onpointerup = e => {
    const ends = [from, at(e)].sort((a, b) => a - b);
    if (from !== null && ends[1] - ends[0] > 5) state.zoom(ends.map(state.scales.inverse));
    else if (from !== null) state.click?.(e.clientY - box().top);
    from = state.from = null;
  };
}

// Name, value and place of the nearest points of a panel's lines (of the nearest six if there are more).
function pointTexts(panel, { py }, v, height) {
  const nearest = line => line.x.reduce((b, x, i) => Math.abs(x - v) < Math.abs(line.x[b] - v) ? i : b, 0);
  const found = panel.lines.filter(l => !l.limit).map(l => [l, nearest(l)]), far = ([l, i]) => l.y[i] === null ? Infinity : Math.abs(py(l.y[i]) - height);
  if (found.length > 6) found.sort((a, b) => far(a) - far(b));
  const unit = panel.y_title.length < 9 ? " " + panel.y_title : "";
  return found.slice(0, 6).map(([l, i]) => `${l.label} ${l.y[i] === null ? "NaN" : number(l.y[i])}${unit} at ${number(l.x[i])}`);
}

function cellTexts(map, scales, v, height) {
  const row = scales.row(height), column = Math.floor((v - map.start) / map.width), level = map.levels[column * map.labels.length + row];
  if (row === undefined) return [];
  const value = level ? `${number(+(map.low + (level - 1) / 254 * (map.high - map.low)).toPrecision(3))} ${map.unit}` : "no sample";
  return [map.labels[row], `${value} at ${number(+v.toPrecision(4))} min`, ...(map.marked.includes(row) ? ["far from the median of all"] : [])];
}

// A crosshair with the values there, or the range that is being dragged. Other panels of the same axis get the line.
function hover(svg, state, texts) {
  svg.querySelector(".kit-hover")?.remove();
  const { scales, mouse, from } = state;
  if (mouse === null || !scales || mouse < scales.left || mouse > scales.right) return;
  const layer = add(svg, "g", { class: "kit-hover", "pointer-events": "none" }), { top, bottom, right } = scales;
  if (from !== null) return add(layer, "rect", { x: Math.min(from, mouse), y: top, width: Math.abs(mouse - from), height: bottom - top, class: "band" });
  add(layer, "path", { d: `M${mouse} ${top}V${bottom}`, class: "axis", "stroke-dasharray": "3 3" });
  if (!texts.length) return;
  const wide = 12 + LETTER * Math.max(...texts.map(t => t.length)), left = mouse + wide + 8 > right + RIGHT ? mouse - wide - 8 : mouse + 8;
  const y = Math.min(Math.max(top, (state.height ?? top) - 20), Math.max(top, bottom - 8 - 15 * texts.length));
  add(layer, "rect", { x: left, y, width: wide, height: 8 + 15 * texts.length, rx: 3, class: "paper" });
  texts.forEach((text, i) => add(layer, "text", { x: left + 6, y: y + 15 + 15 * i, class: "ink" }, text));
}

// JupyterLab's notification where it lets a page call its commands; elsewhere a box that looks like one.
function toast(text) {
  if (globalThis.jupyterapp) return globalThis.jupyterapp.commands.execute("apputils:notify", { message: text, type: "warning" });
  const box = document.createElement("div");
  box.className = "kit-toast"; box.textContent = text; box.onclick = () => box.remove();
  box.style.cssText = `position:fixed;right:16px;bottom:40px;z-index:10000;max-width:420px;background:var(--jp-layout-color1, #fff);color:var(--jp-ui-font-color1, #000);border-left:4px solid ${BAD};padding:10px 14px;border-radius:4px;font:13px sans-serif;box-shadow:0 2px 12px #0005;cursor:pointer`;
  document.body.append(box);
  setTimeout(() => box.remove(), 15000);
}

// What is known after a delta: it keeps the first points of lines, and the first columns of maps.
function applied(before, delta) {
  const panels = delta.panels.map((panel, i) => {
    let x = [];
    return { ...panel, lines: panel.lines.map((line, j) => {
      const old = before.panels?.[i]?.lines[j] ?? { x: [], y: [] };
      x = line.x === null ? x : [...old.x.slice(0, line.keep), ...line.x];
      return { dash: "", label: line.name, ...line, x, y: [...old.y.slice(0, line.keep), ...line.y] };
    }) };
  });
  const maps = delta.maps.map((map, i) => {
    const rows = map.labels.length, kept = map.keep * rows, added = Uint8Array.from(atob(map.levels), c => c.charCodeAt(0));
    const levels = new Uint8Array(kept + added.length);
    if (kept) levels.set(before.maps[i].levels.subarray(0, kept));
    levels.set(added, kept);
    return { ...map, levels };
  });
  return { ...delta, panels, maps, at: Date.now() };
}

// What the kernel has sent, by `complete`: `model` itself is another object in each function.
const known = new WeakMap();

function now(model) {
  const complete = model.get("complete");
  if (!known.has(complete)) known.set(complete, applied({}, complete));
  return known.get(complete);
}

// Applies each delta before any view draws it. New alerts pop up wherever in the notebook the reader is.
function initialize({ model }) {
  model.on("change:delta", () => {
    const before = now(model), delta = model.get("delta");
    for (const key in delta.alerts) if (!(key in before.alerts)) toast(delta.alerts[key]);
    known.set(model.get("complete"), applied(before, delta));
  });
}

const HTML = `<style>${STYLE}</style><div class="tools" style="float:right">
  <label>x axis <select class="x-axis"></select></label>
  <label>smoothing <input class="smooth" type="range" min="0" max="0.99" step="0.01" style="width:90px;vertical-align:middle"></label></div>
  <div class="heads"></div><div class="warnings"></div><div class="panels"></div>`;
const MAP = `<div class="tools"><b style="color:var(--ink)"></b><span><span class="low"></span><span class="scale"></span><span class="high"></span></span>
  <select class="reading"></select><label><input class="slowest" type="checkbox" style="vertical-align:middle"> most different first</label>
  <span class="hint"></span></div>`;

function options(select, names, chosen) {
  if (select.dataset.names !== JSON.stringify(names)) {
    select.dataset.names = JSON.stringify(names);
    select.replaceChildren(...Object.entries(names).map(([value, textContent]) => Object.assign(document.createElement("option"), { value, textContent })));
  }
  select.value = chosen;
}

function head(run, late) {
  const box = document.createElement("div");
  box.innerHTML = `<div><span class="dot">&#9679;</span> <b style="font-size:15px"></b></div><div class="status" style="margin:4px 0 6px"></div><div class="verdict bold" style="margin:4px 0 6px"></div><div class="bar"><div></div></div>`;
  const part = selector => box.querySelector(selector), colour = late ? "var(--muted)" : run.colour;
  part(".verdict").textContent = late ? "" : run.verdict;
  part("b").textContent = run.title; part(".status").textContent = late ? `not updated for ${late} s: the kernel is busy or has ended. Last status: ${run.status}` : run.status;
  part(".dot").style.color = part(".bar div").style.background = colour; part(".bar div").style.width = 100 * run.done + "%";
  return box;
}

function render({ model, el }) {
  const panels = [], maps = [];
  el.innerHTML = `<div class="kit-board">${HTML}</div>`;
  const part = selector => el.querySelector(selector), slider = part(".smooth");
  const change = what => { model.set("view", { ...model.get("view"), ...what }); model.save_changes(); };
  const svgOf = (parent, label) => add(parent, "svg", { role: "img", "aria-label": label });
  const zoomTo = (title, ends) => { const { [title]: _, ...others } = model.get("view").zoom || {}; change({ zoom: ends ? { ...others, [title]: ends } : others }); };
  // Shows the values under the mouse in one panel, and the line in the others that have the same x axis.
  function follow(state, texts) {
    const v = state.mouse === null || !state.scales ? null : state.scales.inverse(state.mouse);
    hover(state.svg, state, v === null ? [] : texts(v, state.height));
    for (const other of [...panels, ...maps]) {
      if (other === state || other.x_title !== state.x_title || !other.scales) continue;
      other.mouse = v === null || state.from !== null ? null : other.scales.px(v);
      hover(other.svg, other, []);
      other.mouse = null;
    }
  }
  function updatePanel(panel, i, view) {
    const state = panels[i] ??= measured({ svg: svgOf(part(".panels"), panel.title), mouse: null, from: null });
    state.svg.setAttribute("aria-label", panel.title);
    state.svg.style.order = panel.hardware ? 2 : 0;
    state.x_title = panel.x_title;
    state.scales = draw(state.svg, panel, view, state.wide || 470);
    state.hover = () => follow(state, (v, height) => pointTexts(panel, state.scales, v, height));
    state.zoom = ends => zoomTo(panel.x_title, ends);
    state.log = () => { const logs = view.log || []; change({ log: logs.includes(panel.title) ? logs.filter(t => t !== panel.title) : [...logs, panel.title] }); };
    if (!state.svg.onpointerdown) watchMouse(state.svg, state);
    if (state.mouse !== null) state.hover();
  }
  function newMap() {
    const box = Object.assign(document.createElement("div"), { className: "map", innerHTML: MAP });
    box.style.order = 1;
    part(".panels").append(box);
    box.querySelector(".reading").onchange = e => change({ map: e.target.value });
    box.querySelector(".slowest").onchange = e => change({ slowest_first: e.target.checked });
    return measured({ box, svg: svgOf(box, "heat map"), mouse: null, from: null, x_title: MINUTES });
  }
  function updateMap(map, i, view, data) {
    const state = maps[i] ??= newMap(), of = selector => state.box.querySelector(selector), selected = view.selected || [];
    of("b").textContent = (data.runs.length > 1 ? map.run + ": " : "") + map.title;
    of(".low").textContent = number(map.low); of(".high").textContent = `${number(map.high)} ${map.unit}`;
    of(".scale").style.background = `linear-gradient(to right, ${map.colour}10, ${map.colour})`;
    of(".hint").textContent = selected.length ? `curves of ${selected.length}: double-click to show all` : "click a row for its curves, drag to zoom";
    options(of(".reading"), data.readings, map.name);
    of(".slowest").checked = !!view.slowest_first;
    const colours = Object.fromEntries(data.panels.filter(p => p.hardware).flatMap(p => p.lines.map(l => [l.label, l.colour])));
    state.scales = drawMap(state.svg, map, view, state.wide || 960, colours);
    state.hover = () => follow(state, (v, height) => cellTexts(map, state.scales, v, height));
    state.zoom = ends => ends === null && selected.length && !view.zoom?.[MINUTES] ? change({ selected: [] }) : zoomTo(MINUTES, ends);
    state.click = height => {
      const label = map.labels[state.scales.row(height)];
      if (label) change({ selected: selected.includes(label) ? selected.filter(l => l !== label) : [...selected, label] });
    };
    if (!state.svg.onpointerdown) watchMouse(state.svg, state);
    if (state.mouse !== null) state.hover();
  }
  // Panels and maps are drawn one at a time, those that wait longest first, so that the page answers in between. Widths
  // are read before anything changes: each reading after a change would lay out the page again.
  const measured = state => Object.assign(state, { wide: state.svg.clientWidth });
  const waiting = new Set();
  let drawing = false;
  function drawNext() {
    const [first] = waiting, data = now(model), view = model.get("view");
    drawing = first !== undefined;
    if (!drawing) return;
    waiting.delete(first);
    const [kind, i] = first.split(" ");
    if (kind === "panel" && data.panels[i]) updatePanel(data.panels[i], i, view);
    if (kind === "map" && data.maps[i]) updateMap(data.maps[i], i, view, data);
    setTimeout(drawNext);
  }
  function update() {
    panels.forEach(measured);
    maps.forEach(measured);
    const data = now(model), view = model.get("view"), late = Math.round((Date.now() - data.at) / 1000);
    part(".heads").replaceChildren(...data.runs.map(run => head(run, late > LATE && late)));
    part(".warnings").replaceChildren(...data.warnings.map(text => Object.assign(document.createElement("div"), { textContent: "\u25B2 " + text })));
    slider.value = view.smooth || 0;
    options(part(".x-axis"), Object.fromEntries(data.axes.map(axis => [axis, axis])), data.axes.includes(view.axis) ? view.axis : data.axes[0]);
    while (panels.length > data.panels.length) panels.pop().svg.remove();
    while (maps.length > data.maps.length) maps.pop().box.remove();
    const add = wanted => data.panels.forEach((panel, i) => { if (panel.hardware === wanted) waiting.add(`panel ${i}`); });
    add(false);
    data.maps.forEach((_, i) => waiting.add(`map ${i}`));
    add(true);
    if (!drawing) drawNext();
  }
  slider.oninput = () => change({ smooth: +slider.value });
  part(".x-axis").onchange = e => change({ axis: e.target.value });
  const watchdog = setInterval(() => { if (Date.now() - now(model).at > LATE * 1000) update(); }, 2000);
  let width = el.clientWidth;
  const resized = new ResizeObserver(() => { if (el.clientWidth !== width) { width = el.clientWidth; update(); } });
  resized.observe(el);
  model.on("change:delta", update);
  model.on("change:view", update);
  update();
  return () => { clearInterval(watchdog); resized.disconnect(); model.off("change:delta", update); model.off("change:view", update); };
}

export default { initialize, render };
