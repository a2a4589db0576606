// The live board in JupyterLab. Data come from kit/board.py, thinned; zoom and hover live here and survive updates.
// Drag to zoom (panels with the same x axis zoom together), double-click to see everything again.
const NS = "http://www.w3.org/2000/svg", W = 470, H = 220, LEFT = 56, RIGHT = 22, BOTTOM = 38, ROW = 15;
const INK = "#0f172a", MUTED = "#64748b", GRID = "#e2e8f0", BAD = "#dc2626";

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

function range(values, low, high, margin) {
  let first = low ?? Infinity, last = high ?? -Infinity;
  for (const v of values) { if (v < first) first = v; if (v > last) last = v; }
  if (!(first <= last)) first = last = 0;
  const room = last > first ? margin * (last - first) : Math.abs(first) * 0.1 || 0.5;
  return [first === low ? first : first - room, last === high ? last : last + room];
}

// Draws one panel and returns what the mouse needs: the scales and the points.
function draw(svg, panel, zoom) {
  svg.replaceChildren();
  add(svg, "text", { y: 13, "font-weight": 600, fill: INK }, panel.title);
  const groups = new Map();
  for (const line of panel.lines) groups.set(line.name, [...(groups.get(line.name) || []), line]);
  let x = 0, y = 13 + ROW;
  for (const [name, lines] of groups) {
    const last = lines.map(l => l.y.at(-1)), mean = last.includes(null) ? "NaN" : number(last.reduce((a, b) => a + b) / last.length);
    const text = `${name} ${mean}` + (last.length > 1 ? ` (mean of ${last.length})` : "");
    if (x && x + 18 + 6.2 * text.length > W) { x = 0; y += ROW; }
    add(svg, "path", { d: `M${x} ${y - 4}h14`, stroke: lines[0].colour, "stroke-width": 2, "stroke-dasharray": lines[0].limit ? "4 3" : "none" });
    add(svg, "text", { x: x + 18, y }, text);
    x += 30 + 6.2 * text.length;
  }
  if (!panel.lines.length) return add(svg, "text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "nothing logged yet"), null;
  const top = y + 10, right = W - RIGHT, bottom = H - BOTTOM;
  const [x0, x1] = zoom || range(panel.lines.flatMap(l => l.x), null, null, 0);
  const seen = panel.lines.flatMap(l => l.y.filter((v, i) => v !== null && l.x[i] >= x0 && l.x[i] <= x1));
  const [y0, y1] = range(seen, panel.low, panel.high, 0.05);
  const px = v => LEFT + (v - x0) / (x1 - x0) * (right - LEFT), py = v => bottom - (v - y0) / (y1 - y0) * (bottom - top);
  const clip = "kit" + Math.random().toString(36).slice(2);
  add(add(svg, "clipPath", { id: clip }), "rect", { x: LEFT - 3, y: 0, width: right - LEFT + 6, height: bottom + 1 });
  for (const v of ticks(y0, y1)) {
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
  for (const line of panel.lines) {
    let path = "", dots = "", crosses = "", pen = "M";
    line.x.forEach((v, i) => {
      if (line.y[i] === null) { crosses += `M${px(v) - 4} ${top}l8 8m0 -8l-8 8`; pen = "M"; return; }
      const point = `${px(v).toFixed(1)} ${py(line.y[i]).toFixed(1)}`;
      path += pen + point; pen = "L";
      if (line.x.length <= 30 && !line.limit) dots += `M${point}h0`;
    });
    const stroke = { d: path, stroke: line.colour, "stroke-dasharray": line.limit ? "4 3" : "none" };
    add(inside, "path", { ...stroke, "stroke-width": crowded ? 1 : 1.5, "stroke-opacity": crowded ? 0.5 : 1 });
    add(inside, "path", { ...stroke, d: dots, "stroke-width": 4.5, "stroke-linecap": "round" });
    add(inside, "path", { d: crosses, stroke: BAD, "stroke-width": 2 });
  }
  return { px, inverse: p => x0 + (p - LEFT) / (right - LEFT) * (x1 - x0), top, bottom };
}

function watchMouse(svg, state) {
  let from = null;
  const at = e => (e.clientX - svg.getBoundingClientRect().left) * W / svg.getBoundingClientRect().width;
  svg.onpointerdown = e => { from = at(e); };
  svg.onpointermove = e => { state.mouse = at(e); state.from = from; state.hover(); };
  svg.onpointerleave = () => { from = state.mouse = null; state.hover(); };
  svg.ondblclick = () => state.zoom(null);
  svg.onpointerup = e => {
    const ends = [from, at(e)].sort((a, b) => a - b);
    if (from !== null && ends[1] - ends[0] > 5 && state.scales) state.zoom(ends.map(state.scales.inverse));
    from = state.from = null;
  };
}

// A crosshair with the nearest point of each line (six at most), or the stretch that is being dragged.
function hover(svg, panel, state) {
  svg.querySelector(".kit-hover")?.remove();
  const { scales, mouse, from } = state;
  if (mouse === null || !scales || mouse < LEFT || mouse > W - RIGHT) return;
  const layer = add(svg, "g", { class: "kit-hover", "pointer-events": "none" }), { top, bottom } = scales;
  if (from !== null) return add(layer, "rect", { x: Math.min(from, mouse), y: top, width: Math.abs(mouse - from), height: bottom - top, fill: "#2563eb22" });
  const v = scales.inverse(mouse), nearest = line => line.x.reduce((b, x, i) => Math.abs(x - v) < Math.abs(line.x[b] - v) ? i : b, 0);
  const texts = panel.lines.filter(l => !l.limit).slice(0, 6).map(l => [l, nearest(l)]).map(([l, i]) => `${l.name} ${l.y[i] === null ? "NaN" : number(l.y[i])} at ${number(l.x[i])}`);
  const wide = 12 + 6.2 * Math.max(...texts.map(t => t.length)), left = mouse + wide + 12 > W ? mouse - wide - 8 : mouse + 8;
  add(layer, "path", { d: `M${mouse} ${top}V${bottom}`, stroke: MUTED, "stroke-dasharray": "3 3" });
  add(layer, "rect", { x: left, y: top, width: wide, height: 8 + 15 * texts.length, rx: 3, fill: "#fff", stroke: MUTED });
  texts.forEach((text, i) => add(layer, "text", { x: left + 6, y: top + 15 + 15 * i, fill: INK }, text));
}

function render({ model, el }) {
  const zooms = {}, panels = {};  // zooms by x axis
  el.innerHTML = `<div class="kit-board" style="width:960px;max-width:100%;background:#fff;color:${INK};font:12px sans-serif">
    <div><span class="dot">&#9679;</span> <b style="font-size:15px"></b></div><div class="status" style="margin:4px 0 6px"></div>
    <div style="background:${GRID};height:4px;margin-bottom:12px"><div class="bar" style="height:4px"></div></div>
    <div class="grid" style="display:grid;grid-template-columns:1fr 1fr;gap:10px 20px"></div></div>`;
  const part = selector => el.querySelector(selector);
  function update() {
    const data = model.get("data");
    part("b").textContent = data.title; part(".status").textContent = data.status;
    part(".dot").style.color = part(".bar").style.background = data.colour; part(".bar").style.width = 100 * data.done + "%";
    data.panels.forEach((panel, i) => {
      const svg = (panels[i] ??= { svg: add(part(".grid"), "svg", { viewBox: `0 0 ${W} ${H}`, width: "100%", "font-size": 11, fill: MUTED, style: "user-select:none" }), mouse: null, from: null }).svg;
      const state = panels[i];
      state.scales = draw(svg, panel, zooms[panel.x_title]);
      state.hover = () => hover(svg, panel, state);
      state.zoom = ends => { zooms[panel.x_title] = ends; update(); };
      if (!svg.onpointerdown) watchMouse(svg, state);
      state.hover();
    });
  }
  // The output just above is the picture of the same board: hidden while this one is live.
  let picture = null;
  const hide = setTimeout(() => {
    picture = el.closest(".jp-OutputArea-child")?.previousElementSibling;
    if (picture) picture.style.display = "none";
  }, 100);
  model.on("change:data", update);
  update();
  return () => { clearTimeout(hide); if (picture) picture.style.display = ""; model.off("change:data", update); };
}

export default { render };
