// One request's life: where it was, its phases and its tokens over time, as a picture and as tables.
import { $, PHASES, STATES, Table, bytes, clock, duration, el, instanceLink, setText, svg, whole } from './dom.js';

const LEFT = 76;
const RIGHT = 20;
const HEIGHT = 300;
const TOP = { stays: 26, phases: 62, tokens: 112 };
const TICKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600];

export class Life {
  constructor() {
    this.moves = null;
    this.id = '';
    new ResizeObserver(() => this.draw()).observe($('life'));
  }

  // Show another request: its tables and what was seen of it are begun anew.
  begin(id) {
    this.id = id;
    this.life = null;
    this.seen = [];
    this.now = null;
    $('life').replaceChildren();
    $('request-moves').className = $('spans').className = 'table';
    this.moves = new Table($('request-moves'), 'Moves', [
      { head: 'At', text: (m) => clock(m.closed_s || m.opened_s) },
      { head: 'From', text: (m) => m.source_instance_id, href: (m) => instanceLink(m.source_instance_id) },
      { head: 'To', text: (m) => m.target_instance_id, href: (m) => instanceLink(m.target_instance_id) },
      { head: 'State', text: (m) => m.state ?? '-', kind: (m) => (m.state === 'aborted' ? 'bad' : '') },
      { head: 'Way', text: (m) => m.way ?? '-' },
      { head: 'Epoch', text: (m) => String(m.epoch), number: true },
      { head: 'Rounds', text: (m) => String(m.rounds.length), number: true },
      { head: 'KV', text: (m) => bytes(m.bytes), number: true },
      { head: 'Pause ms', text: (m) => m.pause_ms.toFixed(1), number: true },
      { head: 'Why', text: (m) => m.error || m.reason || '-', wrap: true },
    ], (m) => m.migration_id);
    this.spans = new Table($('spans'), 'Trace', [
      { head: 'Span', text: (s) => `${'\u2003'.repeat(s.depth)}${s.name}` },
      { head: 'Where', text: (s) => s.where },
      { head: 'Start s', text: (s) => (s.start - this.from).toFixed(3), number: true },
      { head: 'ms', text: (s) => ((s.end - s.start) * 1000).toFixed(1), number: true },
      { head: 'About', text: (s) => (s.error === null ? '' : `error ${s.error} `) + Object.entries(s.about)
        .filter(([key]) => key !== 'request_id')
        .map(([key, value]) => `${key}=${typeof value === 'number' ? +value.toFixed(3) : value}`).join('  '),
      wrap: true, kind: (s) => (s.error === null ? '' : 'bad') },
    ], (s) => `${s.start} ${s.end} ${s.name} ${s.where}`);
  }

  // Add what a snapshot shows of it.
  sample(now, row) {
    this.now = now.at;
    if (row >= 0) this.seen.push([now.at, now.requests.output[row]]);
    if (this.seen.length > 3600) this.seen.shift();
    this.draw();
  }

  show(life) {
    this.life = life;
    const starts = [...life.spans.map((s) => s.start), ...life.stays.map((s) => s.at)];
    if (life.request && this.now) starts.push(this.now - life.request.age_s);
    this.from = starts.length ? Math.min(...starts) : this.now;
    this.moves.show(life.migrations);
    this.spans.show(life.spans);
    const r = life.request;
    setText($('request-facts'), r
      ? `${r.phase ?? 'no phase'}, ${r.migrating ? 'moving' : r.state} on ${r.instance_id}; prompt ${whole(r.prompt_tokens)}, `
        + `output ${whole(r.output_tokens)} of at most ${whole(r.max_tokens)} tokens; epoch ${r.epoch}; ${duration(r.age_s)} old`
      : life.problem || (life.spans.length ? 'it is over' : 'nothing is known of it'));
    this.draw();
  }

  draw() {
    const life = this.life;
    const width = $('life').clientWidth;
    if (!life || !width || this.from == null) return;
    const last = life.ended ?? Math.max(this.now ?? 0, ...life.spans.map((s) => s.end), ...life.stays.map((s) => s.at));
    const span = Math.max(0.05, last - this.from);
    const x = (at) => LEFT + (Math.min(Math.max(at - this.from, 0), span) / span) * (width - LEFT - RIGHT);
    const parts = [
      svg('text', { x: 12, y: TOP.stays + 17, class: 'dim' }, 'Instance'),
      svg('text', { x: 12, y: TOP.phases + 16, class: 'dim' }, 'Phase'),
      svg('text', { x: 12, y: TOP.tokens - 6, class: 'dim' }, 'Tokens'),
    ];
    const base = HEIGHT - 26;
    const step = TICKS.find((tick) => span / tick <= 10) ?? span / 8;
    for (let at = 0; at <= span; at += step) {
      const tx = x(this.from + at);
      parts.push(svg('line', { x1: tx, x2: tx, y1: TOP.tokens, y2: base, class: 'grid' }),
        svg('text', { x: tx, y: HEIGHT - 8, 'text-anchor': 'middle', class: 'dim' }, `${+at.toFixed(1)} s`));
    }
    this.drawPhases(parts, x, last);
    this.drawTokens(parts, x, base, width);
    this.drawStays(parts, x, last, base);
    const label = `Life of request ${this.id}: ${life.stays.map((s) => `${s.how} ${s.instance}`).join(', ')}`;
    $('life').replaceChildren(svg('svg', { height: HEIGHT, role: 'img', 'aria-label': label }, ...parts));
  }

  drawStays(parts, x, last, base) {
    let stays = this.life.stays;
    const r = this.life.request;
    if (!stays.length && r) stays = [{ at: this.from, instance: r.instance_id, how: 'placed' }];
    let moves = 0;
    stays.forEach((stay, number) => {
      const [from, to] = [x(stay.at), x(stays[number + 1]?.at ?? last)];
      const gone = stay.how === 'lost';
      parts.push(svg('rect', { x: from, y: TOP.stays, width: Math.max(1, to - from), height: 26, class: gone ? 'gone' : 'stay' },
        svg('title', {}, gone ? 'on no instance' : `${stay.how} ${stay.instance}`)));
      if (to - from > 7 * stay.instance.length + 12) {
        parts.push(svg('text', { x: from + 8, y: TOP.stays + 17 }, stay.instance));
      }
      if (stay.how === 'placed') return;
      moves += gone ? 0 : 1;
      parts.push(svg('line', { x1: from, x2: from, y1: 20, y2: base, class: stay.how }),
        svg('text', { x: from, y: 15, 'text-anchor': 'middle', class: gone ? 'bad' : null }, gone ? '✕ instance lost' : `▸ move ${moves}`));
    });
  }

  drawPhases(parts, x, last) {
    const { phases, request } = this.life;
    const shown = phases.map((p) => [p.phase, p.start, p.end]);
    if (request?.phase) shown.push([request.phase, phases.at(-1)?.end ?? this.from, last]);
    for (const [phase, start, end] of shown) {
      const [from, to] = [x(start), x(end)];
      parts.push(svg('rect', { x: from, y: TOP.phases, width: Math.max(1, to - from), height: 24, class: phase },
        svg('title', {}, `${phase}: ${(end - start).toFixed(3)} s`)));
      if (to - from > 80) parts.push(svg('text', { x: from + 8, y: TOP.phases + 16, class: 'on' }, phase));
    }
  }

  drawTokens(parts, x, base, width) {
    const points = [...this.life.tokens, ...this.seen].sort((a, b) => a[0] - b[0]);
    const most = Math.max(1, ...points.map((point) => point[1]));
    const y = (tokens) => base - (tokens / most) * (base - TOP.tokens - 6);
    parts.push(svg('line', { x1: LEFT, x2: width - RIGHT, y1: base, y2: base, class: 'grid' }),
      svg('text', { x: LEFT - 8, y: y(most) + 4, 'text-anchor': 'end' }, whole(most)));
    if (points.length < 2) return;
    const line = points.map(([at, tokens]) => `${x(at).toFixed(1)},${y(tokens).toFixed(1)}`);
    const [first, end] = [x(points[0][0]), x(points.at(-1)[0])];
    parts.push(svg('polygon', { points: `${first},${base} ${line.join(' ')} ${end},${base}`, class: 'area' }),
      svg('polyline', { points: line.join(' '), class: 'tokens' }));
  }
}
