// The fleet as lanes on a canvas: an instance each, with its KV and a cell for each request. Moves are arrows on a
// second canvas above, the only one that is drawn in each frame, and only while there are any.
import { $, PHASES, STATES, colours, duration, instanceLink, percent, requestLink, whole } from './dom.js';

const NAMES = ['panel', 'lane', 'line', 'text', 'dim', 'accent', 'prefill', 'reasoning', 'answering', 'none', 'good',
  'warn', 'bad', 'kv'];
const ARROWS_MAX = 150;
const GROW_MS = 600;
const STAY_MS = 1800;
const GAP = 4;
const byName = new Intl.Collator('en', { numeric: true }).compare;
const still = matchMedia('(prefers-reduced-motion: reduce)');

// How many instances each model has, by name; those that tell none are not counted.
export function countByModel(instances) {
  const counts = new Map();
  for (const model of [...instances.model].filter(Boolean).sort(byName)) counts.set(model, (counts.get(model) ?? 0) + 1);
  return counts;
}

// The numbers of the instances, those of a model together if there are several models.
export function grouped(instances, compare = (a, b) => a - b) {
  const groups = [...countByModel(instances).keys()];
  const place = (n) => (groups.length > 1 && instances.model[n] ? groups.indexOf(instances.model[n]) : groups.length);
  const places = instances.id.map((_, n) => place(n));
  return instances.id.map((_, n) => n).sort((a, b) => places[a] - places[b] || compare(a, b));
}

// How many rows there are with so many columns: of each column, the last row may stay empty.
const rowsOf = (entries, groups, columns) => Math.max(1, Math.ceil((entries + Math.min(groups, columns)) / columns));

export class Lanes {
  constructor() {
    this.place = $('lanes');
    this.base = $('lanes-base');
    this.over = $('lanes-moves');
    this.tip = $('tip');
    this.slots = new Map(); // request id: [instance id, slot]
    this.taken = new Map(); // instance id: set of slots
    this.arrows = [];
    this.moved = []; // since the last drawing
    this.boxes = new Map(); // instance id: box, also of those that are gone
    this.headings = []; // of the groups, if there are several models
    this.order = 'name';
    this.readColours();
    new ResizeObserver(() => this.draw()).observe(this.place);
    this.place.addEventListener('mousemove', (event) => this.hover(event));
    this.place.addEventListener('mouseleave', () => { this.tip.hidden = true; });
    this.place.addEventListener('click', (event) => {
      const { box, cell } = this.find(event);
      if (box) location.hash = cell >= 0 ? requestLink(this.now.requests.id[cell]) : instanceLink(box.id);
    });
  }

  readColours() {
    this.colours = colours(...NAMES);
    this.byPhase = ['none', 'prefill', 'reasoning', 'answering'].map((name) => this.colours[name]);
  }

  // Forget the fleet: the next snapshot is of another one.
  forget() {
    this.slots.clear();
    this.taken.clear();
    this.boxes.clear();
    this.arrows = [];
    this.moved = [];
    this.now = null;
  }

  // Take a snapshot: who moved becomes arrows, and each request keeps its slot while it stays.
  take(now) {
    const { requests, instances } = now;
    const moved = [];
    const slots = new Map();
    requests.id.forEach((id, row) => {
      const instance = instances.id[requests.instance[row]];
      const before = this.slots.get(id);
      if (before && before[0] !== instance) {
        if (instance !== undefined) moved.push({ from: before, to: instance, id });
        this.taken.get(before[0])?.delete(before[1]);
      } else if (before) slots.set(id, before);
    });
    for (const [id, [instance, slot]] of this.slots) if (!slots.has(id)) this.taken.get(instance)?.delete(slot);
    this.most = 1;
    this.cells = instances.id.map(() => []);
    requests.id.forEach((id, row) => {
      const lane = requests.instance[row];
      if (lane < 0) return;
      let kept = slots.get(id);
      if (!kept) {
        const name = instances.id[lane];
        if (!this.taken.has(name)) this.taken.set(name, new Set());
        const taken = this.taken.get(name);
        let slot = 0;
        while (taken.has(slot)) slot += 1;
        taken.add(slot);
        kept = [name, slot];
        slots.set(id, kept);
      }
      this.cells[lane][kept[1]] = row;
      this.most = Math.max(this.most, kept[1] + 1);
    });
    this.slots = slots;
    this.now = now;
    this.moved = moved;
  }

  addArrow([source, slot], target, id) {
    const from = this.boxes.get(source);
    const to = this.boxes.get(target);
    if (!from || !to) return;
    const source_number = this.now.instances.id.indexOf(source);
    const lost = source_number < 0 || this.now.instances.state[source_number] === 'suspect';
    const arrow = { a: this.cellAt(from, slot), b: this.cellAt(to, this.slots.get(id)[1]), lost, began: performance.now() };
    this.arrows.push(arrow);
    if (this.arrows.length > ARROWS_MAX) this.arrows.shift();
    if (this.arrows.length === 1) requestAnimationFrame(() => this.drawArrows());
  }

  // The numbers of the instances in order, below a heading for each model if there are several.
  sorted() {
    const i = this.now.instances;
    const value = {
      name: () => 0,
      group: (n) => `${i.pool[n] ?? ''} ${i.stage[n]}`,
      kv: (n) => -i.kv[n] / Math.max(1, i.kv_total[n]),
      requests: (n) => -(i.running[n] + i.waiting[n]),
    }[this.order];
    const keys = i.id.map((_, n) => value(n));
    const compare = (a, b) => (keys[a] < keys[b] ? -1 : keys[a] > keys[b] ? 1 : byName(i.id[a], i.id[b]));
    const models = countByModel(i);
    const numbers = grouped(i, compare);
    if (models.size < 2) return numbers;
    let before = null;
    return numbers.flatMap((n) => {
      if (i.model[n] === before) return [n];
      before = i.model[n];
      return [{ model: before, count: models.get(before) ?? i.model.filter((model) => !model).length }, n];
    });
  }

  // Choose the number of columns, and from it the boxes of the lanes.
  layOut() {
    const width = this.place.clientWidth;
    const height = this.place.clientHeight;
    const sorted = this.sorted();
    const groups = sorted.length - this.now.instances.id.length;
    let best = { score: -9, columns: 1 };
    for (let columns = 1; columns <= 10; columns += 1) {
      const w = width / columns;
      if (columns > 1 && w < 170) break;
      const h = Math.min(46, height / rowsOf(sorted.length, groups, columns));
      const score = h < 12 ? h / 12 - 2 : Math.min(h / 26, 1) + Math.min(w / 320, 1);
      if (score > best.score) best = { score, columns };
    }
    const rows = rowsOf(sorted.length, groups, best.columns);
    const h = Math.max(12, Math.min(46, Math.floor(height / rows)));
    const w = width / best.columns;
    const label = Math.min(170, w * 0.38);
    const bar = Math.min(64, w * 0.16);
    const left = 14 + label + bar + 8;
    const inner = { w: w - left - 10, h: h - 4 };
    // The largest cell with which the longest lane has room: all lanes have the same, so that loads compare.
    let size = 16;
    while (size > 2 && Math.floor(inner.w / (size + 1)) * Math.max(1, Math.floor(inner.h / (size + 1))) < this.most) size -= 1;
    size = Math.min(size, Math.max(2, inner.h - 1));
    const deep = Math.max(1, Math.floor(inner.h / (size + 1)));
    this.grid = { w, h, label, bar, left, inner, size, deep, top: Math.round((h - deep * (size + 1) + 1) / 2) };
    this.boxes = new Map();
    this.headings = [];
    let place = 0;
    for (const entry of sorted) {
      const heads = typeof entry === 'object';
      // A heading stands above the first lane of its group.
      if (heads && rows > 1 && place % rows === rows - 1) place += 1;
      const at = { x: Math.floor(place / rows) * w, y: (place % rows) * h };
      if (heads) this.headings.push({ ...entry, ...at });
      else this.boxes.set(this.now.instances.id[entry], { id: this.now.instances.id[entry], number: entry, ...at });
      place += 1;
    }
    return { width, height: Math.max(height, rows * h) };
  }

  cellAt(box, slot) {
    const { left, size, deep, inner, top } = this.grid;
    const x = box.x + left + Math.floor(slot / deep) * (size + 1);
    return [Math.min(x, box.x + left + inner.w - size), box.y + top + (slot % deep) * (size + 1)];
  }

  draw() {
    if (!this.now || !this.place.clientWidth) return;
    const gone = this.boxes;
    const { width, height } = this.layOut();
    for (const [id, box] of gone) if (!this.boxes.has(id) && this.boxes.size + 50 > gone.size) this.boxes.set(id, { ...box, number: -1 });
    const ratio = devicePixelRatio;
    for (const canvas of [this.base, this.over]) {
      if (canvas.width === Math.round(width * ratio) && canvas.height === Math.round(height * ratio)) continue;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const c = this.base.getContext('2d');
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, width, height);
    for (const heading of this.headings) this.drawHeading(c, heading);
    for (const box of this.boxes.values()) if (box.number >= 0) this.drawLane(c, box);
    this.drawCells(c);
    for (const { from, to, id } of this.moved.splice(0, ARROWS_MAX)) this.addArrow(from, to, id);
    this.moved = [];
  }

  drawHeading(c, { model, count, x, y }) {
    const { w, h } = this.grid;
    c.font = `600 ${Math.min(12, h - 3)}px system-ui, "Liberation Sans", sans-serif`;
    c.textBaseline = 'middle';
    c.fillStyle = this.colours.text;
    const used = this.text(c, model || 'no model', x + 6, y + h / 2, w - 120);
    c.fillStyle = this.colours.dim;
    c.fillText(whole(count), x + 14 + used, y + h / 2);
    c.fillStyle = this.colours.line;
    c.fillRect(x + GAP / 2, y + h - 2, w - GAP, 1);
  }

  drawLane(c, box) {
    const { w, h, label, bar } = this.grid;
    const k = this.colours;
    const i = this.now.instances;
    const n = box.number;
    const middle = box.y + h / 2;
    c.fillStyle = k.lane;
    c.fillRect(box.x + GAP / 2, box.y + 1, w - GAP, h - 2);
    const state = i.state[n];
    const mark = Math.min(7, h - 5);
    c.fillStyle = c.strokeStyle = state === 'active' ? k.good : state === 'suspect' ? k.bad : k.warn;
    c.lineWidth = 1.6;
    c.beginPath();
    const x = box.x + 6;
    if (state === 'suspect') {
      c.moveTo(x, middle - mark / 2); c.lineTo(x + mark, middle + mark / 2);
      c.moveTo(x + mark, middle - mark / 2); c.lineTo(x, middle + mark / 2);
      c.stroke();
    } else {
      c.arc(x + mark / 2, middle, mark / 2, 0, 7);
      if (state === 'active') c.fill(); else c.stroke();
    }
    const group = [i.pool[n]?.replaceAll('_', ' '), i.stage[n] >= 0 ? `stage ${i.stage[n]}` : ''].filter(Boolean).join(', ');
    c.font = `${Math.min(12, h - 3)}px system-ui, "Liberation Sans", sans-serif`;
    c.textBaseline = 'middle';
    c.fillStyle = k.text;
    const used = this.text(c, box.id, box.x + 17, middle, label - 6);
    c.fillStyle = k.dim;
    if (group && c.measureText(group).width < label - 14 - used) c.fillText(group, box.x + 25 + used, middle);
    const share = i.kv_total[n] ? i.kv[n] / i.kv_total[n] : 0;
    const thick = Math.max(4, Math.min(12, h * 0.4));
    c.fillStyle = k.panel;
    c.fillRect(box.x + 14 + label, middle - thick / 2, bar, thick);
    c.fillStyle = share > 0.95 ? k.bad : share > 0.8 ? k.warn : k.kv;
    c.fillRect(box.x + 14 + label, middle - thick / 2, bar * Math.min(1, share), thick);
  }

  text(c, text, x, y, room) {
    let shown = text;
    if (c.measureText(text).width > room) {
      // The end of a name tells instances apart.
      while (shown.length > 3 && c.measureText(`…${shown}`).width > room) shown = shown.slice(1);
      shown = `…${shown}`;
    }
    c.fillText(shown, x, y);
    return c.measureText(shown).width;
  }

  drawCells(c) {
    const { phase, state, moving } = this.now.requests;
    const { size } = this.grid;
    const outlined = [];
    for (const box of this.boxes.values()) {
      if (box.number < 0) continue;
      this.cells[box.number].forEach((row, slot) => {
        const [x, y] = this.cellAt(box, slot);
        if (state[row] === 1 || state[row] === 4) outlined.push([x, y, phase[row]]);
        else {
          c.fillStyle = this.byPhase[phase[row]] ?? this.byPhase[0];
          c.fillRect(x, y, size, size);
          if (moving[row]) outlined.push([x, y, -1]);
        }
      });
    }
    const line = size > 4 ? 1.5 : 1;
    c.lineWidth = line;
    for (const [x, y, kind] of outlined) {
      c.strokeStyle = kind < 0 ? this.colours.text : this.byPhase[kind] ?? this.byPhase[0];
      c.strokeRect(x + line / 2, y + line / 2, size - line, size - line);
    }
  }

  drawArrows() {
    const c = this.over.getContext('2d');
    const ratio = devicePixelRatio;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, this.over.width / ratio, this.over.height / ratio);
    const now = performance.now();
    this.arrows = this.arrows.filter((arrow) => now - arrow.began < STAY_MS);
    const half = this.grid.size / 2;
    for (const { a, b, lost, began } of this.arrows) {
      const age = now - began;
      const grown = still.matches ? 1 : Math.min(1, age / GROW_MS);
      const [ax, ay, bx, by] = [a[0] + half, a[1] + half, b[0] + half, b[1] + half];
      const bend = Math.min(60, Math.hypot(bx - ax, by - ay) / 4 + 10);
      const mx = (ax + bx) / 2 + bend;
      const my = (ay + by) / 2 - bend;
      c.globalAlpha = Math.min(1, (STAY_MS - age) / (STAY_MS - GROW_MS));
      c.strokeStyle = c.fillStyle = lost ? this.colours.bad : this.colours.accent;
      c.lineWidth = 1.6;
      c.setLineDash(lost ? [4, 3] : []);
      // The first part of the curve, by de Casteljau.
      const ex = (1 - grown) ** 2 * ax + 2 * grown * (1 - grown) * mx + grown ** 2 * bx;
      const ey = (1 - grown) ** 2 * ay + 2 * grown * (1 - grown) * my + grown ** 2 * by;
      const qx = ax + (mx - ax) * grown;
      const qy = ay + (my - ay) * grown;
      c.beginPath();
      c.moveTo(ax, ay);
      c.quadraticCurveTo(qx, qy, ex, ey);
      c.stroke();
      const angle = Math.atan2(ey - qy, ex - qx);
      c.beginPath();
      c.moveTo(ex + 3 * Math.cos(angle), ey + 3 * Math.sin(angle));
      c.lineTo(ex + 7 * Math.cos(angle + 2.6), ey + 7 * Math.sin(angle + 2.6));
      c.lineTo(ex + 7 * Math.cos(angle - 2.6), ey + 7 * Math.sin(angle - 2.6));
      c.fill();
    }
    c.globalAlpha = 1;
    if (this.arrows.length) requestAnimationFrame(() => this.drawArrows());
  }

  find(event) {
    if (!this.now || !this.grid) return {};
    const at = this.place.getBoundingClientRect();
    const x = event.clientX - at.left;
    const y = event.clientY - at.top + this.place.scrollTop;
    const { w, h, left, size, deep, top } = this.grid;
    for (const box of this.boxes.values()) {
      if (box.number < 0 || x < box.x || x >= box.x + w || y < box.y || y >= box.y + h) continue;
      const column = Math.floor((x - box.x - left) / (size + 1));
      const line = Math.floor((y - box.y - top) / (size + 1));
      const slot = column >= 0 && line >= 0 && line < deep ? column * deep + line : -1;
      return { box, cell: this.cells[box.number][slot] ?? -1, x, y };
    }
    return {};
  }

  hover(event) {
    const { box, cell, x, y } = this.find(event);
    this.tip.hidden = !box;
    this.place.style.cursor = box ? 'pointer' : '';
    if (!box) return;
    const { instances: i, requests: r } = this.now;
    const n = box.number;
    this.tip.textContent = cell >= 0
      ? `${r.id[cell]}\n${PHASES[r.phase[cell]] || 'no phase'}, ${r.moving[cell] ? 'moving' : STATES[r.state[cell]]}`
        + `\n${whole(r.output[cell])} tokens, ${duration(r.age[cell])}, epoch ${r.epoch[cell]}`
      : `${box.id} (${i.state[n]})\n${i.running[n]} running, ${i.waiting[n]} waiting\n`
        + `KV ${percent(i.kv[n] / Math.max(1, i.kv_total[n]))}, ${whole(i.tokens_per_s[n])} tokens/s`;
    this.tip.style.left = `${Math.min(x + 14, this.place.clientWidth - this.tip.offsetWidth - 6)}px`;
    this.tip.style.top = `${Math.min(y + 14, this.place.scrollTop + this.place.clientHeight - this.tip.offsetHeight - 6)}px`;
  }
}
