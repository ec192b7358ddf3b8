// Builds the page. What the cluster says becomes text nodes and attributes, never markup.

const SVG = 'http://www.w3.org/2000/svg';

export const $ = (id) => document.getElementById(id);

// Make an element. Properties that are functions listen to the event of their name.
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === 'function') node.addEventListener(name, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A table that keeps its rows by key, so that a refresh takes away neither the focus nor a selection.
// Columns: head, text(row), and optionally number, wrap, href(row), kind(row).
export class Table {
  constructor(place, caption, columns, key) {
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.body = el('tbody');
    const heads = columns.map((c) => el('th', { scope: 'col', class: c.number ? 'number' : null }, c.head));
    place.replaceChildren(
      el('table', {}, el('caption', {}, caption), el('thead', {}, el('tr', {}, ...heads)), this.body));
  }

  show(items) {
    const seen = new Set();
    let at = this.body.firstChild;
    for (const item of items) {
      const key = this.key(item);
      if (seen.has(key)) continue;
      seen.add(key);
      const row = this.rows.get(key) ?? this.add(key);
      this.columns.forEach((column, number) => {
        const cell = row.cells[number];
        const inner = column.href ? cell.firstChild : cell;
        setText(inner, column.text(item));
        if (column.href && inner.getAttribute('href') !== column.href(item)) inner.setAttribute('href', column.href(item));
        if (column.kind) cell.classList.toggle('bad', column.kind(item) === 'bad');
      });
      if (row === at) at = at.nextSibling;
      else this.body.insertBefore(row, at);
    }
    for (const [key, row] of this.rows) if (!seen.has(key)) { row.remove(); this.rows.delete(key); }
  }

  add(key) {
    const cells = this.columns.map((column) => el(
      'td', { class: column.number ? 'number' : column.wrap ? 'wrap' : null }, column.href ? el('a') : null));
    const row = el('tr', {}, ...cells);
    this.rows.set(key, row);
    return row;
  }
}

const thousands = new Intl.NumberFormat('en');
export const whole = (value) => thousands.format(Math.round(value));
export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)}%`;
export function bytes(count) {
  for (const unit of ['B', 'KiB', 'MiB', 'GiB']) {
    if (count < 1024 || unit === 'GiB') return `${count.toFixed(unit === 'B' ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
}
export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return seconds < 3600 ? `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`
    : `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
}
export const clock = (seconds) => (seconds ? new Date(seconds * 1000).toLocaleTimeString('en-GB') : '-');
export const PHASES = ['', 'prefill', 'reasoning', 'answering'];
export const STATES = ['', 'waiting', 'running', 'paused', 'preempted'];

// Addresses of views: VIEW/WHAT, in another cluster than the console's own in/CLUSTER/VIEW/WHAT.
let cluster = '';
export const setCluster = (name) => { cluster = name; };
export const linkIn = (name, ...parts) => `#/${[...(name ? ['in', name] : []), ...parts].map(encodeURIComponent).join('/')}`;
export const link = (...parts) => linkIn(cluster, ...parts);
export const requestLink = (id) => link('request', id);
export const instanceLink = (id) => link('fleet', id);

// The colours of the theme as canvases take them.
export function colours(...names) {
  const probe = el('i', { hidden: true });
  document.body.append(probe);
  const found = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}
