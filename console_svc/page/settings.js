// Forms for what an operator sets. Their fields have the names by which the admin API calls them in its errors.
import { $, el } from './dom.js';

const SLOS = [
  ['ttft', 'ttft_s', 'Time to the first answering token'],
  ['tpot', 'tpot_s', 'Time between answering tokens'],
  ['qoe', 'qoe', 'Least QoE of an answer, 0 to 1'],
  ['pace', 'pace_s', 'Time a token at which users read'],
  ['admit', 'admit', 'Refuse beyond this multiple of ttft'],
];
const NAMES_SHOWN = 8;

export const POOLS = ['none', 'prefill', 'decode', 'prefill_to_decode', 'decode_to_prefill'];

// A duration as people write it.
export const seconds = (value) => (value >= 1 ? `${+value.toPrecision(6)}s` : `${+(value * 1000).toPrecision(6)}ms`);
const sloText = (field, value) => (!value ? '' : field.endsWith('_s') ? seconds(value) : String(+value.toPrecision(6)));

// Say why an action was refused, at the field that the message names first.
export function showError(form, message) {
  const place = form.querySelector('.error');
  place.textContent = message;
  let found = null;
  for (const field of form.querySelectorAll('[name]')) {
    field.removeAttribute('aria-invalid');
    field.removeAttribute('aria-describedby');
    const escaped = field.name.replace(/[^\w]/g, '\\$&');
    const at = message.search(new RegExp(`(?<![\\w.])${escaped}(?!\\w)`));
    if (at >= 0 && (!found || at < found.at)) found = { field, at };
  }
  if (!found) return;
  found.field.setAttribute('aria-invalid', 'true');
  found.field.setAttribute('aria-describedby', place.id);
  found.field.focus();
}

// A form that shows what holds until it is edited, and again once that was set or undone.
class Edited {
  constructor(form, fill) {
    this.form = form;
    this.fill = fill;
    this.edited = false;
    form.addEventListener('input', () => { this.edited = true; });
    form.addEventListener('reset', (event) => { event.preventDefault(); this.undo(); });
  }

  show(now) {
    this.now = now;
    for (const button of this.form.querySelectorAll('button[type="submit"]')) button.disabled = !now.session.may_act;
    if (!this.edited) this.fill(now);
  }

  undo() {
    this.edited = false;
    showError(this.form, '');
    if (this.now) this.fill(this.now);
  }
}

export class SloForm extends Edited {
  // perform(question, verb, name, body, more): asks, acts, and returns whether it was done.
  constructor(perform, say) {
    const form = $('slo');
    const inputs = new Map(SLOS.map(([name, , about]) => [name, el('input', {
      type: 'text', name, placeholder: 'not asked for', autocomplete: 'off', 'aria-label': `${name}: ${about}` })]));
    form.querySelector('.fields').replaceChildren(
      ...SLOS.map(([name, , about]) => el('label', {}, el('span', {}, el('b', {}, name), ` ${about}`), inputs.get(name))));
    super(form, (now) => {
      for (const [name, field] of SLOS) {
        const text = sloText(field, now.slo[field]);
        const input = inputs.get(name);
        if (input.value !== text) input.value = text;
      }
    });
    form.addEventListener('submit', async (event) => {
      event.preventDefault();
      const objectives = {};
      const changes = [];
      for (const [name, field] of SLOS) {
        const [before, after] = [sloText(field, this.now.slo[field]), inputs.get(name).value.trim()];
        if (before === after) continue;
        objectives[name] = after || '0';
        changes.push(`${name}: ${before || 'none'} → ${after || 'none'}`);
      }
      if (!changes.length) { say('The SLOs are as they were.'); return; }
      if (await perform('Set the SLOs?', 'Set SLOs', 'slo', { objectives }, { changes, form })) this.undo();
    });
  }
}

const number = (text) => (/^\d+$/.test(text.trim()) ? Number(text) : text.trim());
function stageText({ lo, hi, instance_ids: names }) {
  const more = names.length > NAMES_SHOWN ? `, and ${names.length - NAMES_SHOWN} more` : '';
  return `[${lo}, ${hi}): ${names.slice(0, NAMES_SHOWN).join(', ') || 'no instance'}${more}`;
}

export class StagesForm extends Edited {
  constructor(perform, say) {
    const form = $('stages');
    const place = form.querySelector('.stages');
    let shown = null;
    super(form, (now) => {
      const key = JSON.stringify(now.stages);
      if (key === shown && !this.drawn) return;
      shown = key;
      this.drawn = false;
      place.replaceChildren();
      for (const stage of now.stages) this.add(stage);
    });
    this.place = place;
    $('add-stage').addEventListener('click', () => {
      this.edited = this.drawn = true;
      const last = this.read().at(-1);
      this.add({ lo: last?.hi ?? 0, hi: '', instance_ids: [] }).querySelector('input').focus();
    });
    form.addEventListener('input', () => { this.drawn = true; });
    form.addEventListener('submit', async (event) => {
      event.preventDefault();
      const stages = this.read();
      if (JSON.stringify(stages) === JSON.stringify(this.now.stages)) { say('The stages are as they were.'); return; }
      const list = (word, all) => (all.length ? all.map((stage) => `${word} ${stageText(stage)}`) : [`${word} no stages`]);
      const changes = [...list('before:', this.now.stages), ...list('after:', stages)];
      const question = stages.length ? 'Replace all stages?' : 'Remove all stages?';
      if (await perform(question, 'Set stages', 'stages', { stages }, { changes, form })) this.undo();
    });
  }

  read() {
    return [...this.place.children].map((row) => {
      const [lo, hi, names] = [...row.querySelectorAll('input')].map((input) => input.value);
      return { lo: number(lo), hi: number(hi), instance_ids: names.split(',').map((name) => name.trim()).filter(Boolean) };
    });
  }

  add({ lo, hi, instance_ids: names }) {
    const input = (label, value, wide) => el('label', { class: wide ? 'wide' : null }, el('span', {}, label),
      el('input', { type: 'text', value, autocomplete: 'off', inputmode: wide ? null : 'numeric' }));
    const row = el('fieldset', {}, el('legend'), input('from', lo), input('to', hi), input('instances', names.join(', '), true),
      el('button', { type: 'button', click: () => {
        this.edited = this.drawn = true;
        const beside = row.nextSibling ?? row.previousSibling;
        row.remove();
        (beside ? beside.querySelector('button') : $('add-stage')).focus();
        this.number();
      } }, 'Remove'));
    this.place.append(row);
    this.number();
    return row;
  }

  number() {
    [...this.place.children].forEach((row, n) => {
      row.firstChild.textContent = `Stage ${n}`;
      const fields = ['lo', 'hi', 'instance_ids'];
      row.querySelectorAll('input').forEach((input, k) => {
        input.name = `stages[${n}].${fields[k]}`;
        input.setAttribute('aria-label', `Stage ${n}, ${['from', 'to', 'instances'][k]}`);
      });
      row.querySelector('button').setAttribute('aria-label', `Remove stage ${n}`);
    });
  }
}
