// The page: what each view shows of a snapshot, and what an operator does.
import { act, choose, follow, get, setToken } from './api.js';
import {
  $, PHASES, STATES, Table, bytes, clock, duration, el, instanceLink, link, linkIn, percent, requestLink, setCluster,
  setText, svg, whole,
} from './dom.js';
import { Lanes, countByModel, grouped } from './lanes.js';
import { Life } from './life.js';
import { POOLS, SloForm, StagesForm, showError } from './settings.js';

const ROWS_MAX = 300;
const HISTORY = 120;
const POLICIES_MS = 5000;
const LIFE_MS = 3000;

const lanes = new Lanes();
const life = new Life();
let now = null;
let view = { cluster: '', name: 'fleet', what: '' };
let asTable = false;
let history = {};

// The theme: the system's, or the one that was chosen.
const system = matchMedia('(prefers-color-scheme: dark)');
const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? 'dark' : 'light')) === 'dark';
function applyTheme() {
  setText($('theme'), isDark() ? 'Use light theme' : 'Use dark theme');
  lanes.readColours();
  lanes.draw();
}
const stored = localStorage.getItem('theme');
if (stored === 'dark' || stored === 'light') document.documentElement.dataset.theme = stored;
$('theme').addEventListener('click', () => {
  document.documentElement.dataset.theme = isDark() ? 'light' : 'dark';
  localStorage.setItem('theme', document.documentElement.dataset.theme);
  applyTheme();
});
system.addEventListener('change', applyTheme);
applyTheme();

let silence;
function say(text, bad = false) {
  clearTimeout(silence);
  $('said').className = bad ? 'bad' : '';
  $('said').textContent = text;
  silence = setTimeout(() => { $('said').textContent = ''; }, 12_000);
}

// Ask, act and say what came of it; return whether it was done. `changes`: what will be different, a line each.
async function perform(question, verb, name, body, { changes = [], form = null } = {}) {
  if (!now) return false;
  const where = now.session.own ? '' : now.session.cluster;
  setText($('confirm-what'), question);
  $('confirm-changes').replaceChildren(...changes.map((line) => el('li', {}, line)));
  const { session } = now;
  setText($('confirm-where'), `In ${session.cluster || session.admin}, as ${session.who}.`);
  setText($('confirm-do'), verb);
  const dialog = $('confirm');
  dialog.returnValue = '';
  dialog.showModal();
  await new Promise((closed) => dialog.addEventListener('close', closed, { once: true }));
  if (dialog.returnValue !== 'do') return false;
  say(`${verb}: under way`);
  try {
    say(await act(name, body, where));
  } catch (error) {
    // A form says it itself.
    say(form ? '' : `${verb}: ${error.message}`, true);
    if (form) showError(form, error.message);
    return false;
  }
  if (form) showError(form, '');
  return true;
}

const actButton = (text, onclick) => el(
  'button', { type: 'button', click: onclick, disabled: now && !now.session.may_act }, text);

// The figures above all views.
function figure(key, name, value, unit, number) {
  history[key] ??= [];
  history[key].push(number ?? 0);
  if (history[key].length > HISTORY) history[key].shift();
  return { name, value, unit, past: history[key] };
}

function showFigures() {
  const recent = now.recent;
  const share = recent.answers ? recent.slo_attainment : null;
  const slo = Object.entries({ ttft_s: 'TTFT', tpot_s: 'TPOT' })
    .filter(([key]) => now.slo[key]).map(([key, word]) => `${word} ${now.slo[key]} s`).join(', ');
  const good = recent.answers * recent.slo_attainment / 60;
  const shown = [
    figure('slo', 'SLO met', share === null ? '-' : percent(share, 1), slo, share),
    figure('good', 'Goodput', good.toFixed(1), 'answers/s', good),
    figure('tokens', 'Throughput', whole(now.tokens_per_s), 'tokens/s', now.tokens_per_s),
    figure('moves', 'Moves', whole(recent.moves_in), 'a minute', recent.moves_in),
    figure('requests', 'Requests', whole(now.requests_total), `on ${now.instances.id.length} instances`, now.requests_total),
    { name: 'Policy', value: now.policy?.name ?? '-', unit: now.policy?.suspended ? 'suspended' : '', past: null },
  ];
  const place = $('figures');
  if (place.children.length !== shown.length) {
    place.replaceChildren(...shown.map(() => el('div', {}, el('dt'), el('dd'), svg('svg',
      { viewBox: '0 0 120 24', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, svg('polyline')))));
  }
  shown.forEach(({ name, value, unit, past }, number) => {
    const [dt, dd, chart] = place.children[number].children;
    setText(dt, unit ? `${name} (${unit})` : name);
    setText(dd, value);
    if (!past) { chart.setAttribute('hidden', ''); return; }
    const most = Math.max(...past, 1e-9);
    chart.firstChild.setAttribute('points',
      past.map((v, i) => `${HISTORY - past.length + i},${(22 - 20 * v / most).toFixed(1)}`).join(' '));
  });
}

// Fleet.
const rowsOfInstances = () => grouped(now.instances).map((n) => ({ id: now.instances.id[n], n }));
const i = (key) => (row) => now.instances[key][row.n];
const instances = new Table($('instances'), 'Instances', [
  { head: 'Instance', text: (row) => row.id, href: (row) => instanceLink(row.id) },
  { head: 'State', text: (row) => i('state')(row) ?? '-', kind: (row) => (i('state')(row) === 'suspect' ? 'bad' : '') },
  { head: 'Pool', text: (row) => i('pool')(row)?.replaceAll('_', ' ') ?? '-' },
  { head: 'Stage', text: (row) => (i('stage')(row) < 0 ? '-' : String(i('stage')(row))), number: true },
  { head: 'Running', text: (row) => String(i('running')(row)), number: true },
  { head: 'Waiting', text: (row) => String(i('waiting')(row)), number: true },
  { head: 'KV', text: (row) => percent(i('kv')(row) / Math.max(1, i('kv_total')(row))), number: true },
  { head: 'Tokens/s', text: (row) => whole(i('tokens_per_s')(row)), number: true },
  { head: 'ms/token', text: (row) => i('interval_ms')(row).toFixed(1), number: true },
  { head: 'SLO', text: (row) => (i('attainment')(row) === null ? '-' : percent(i('attainment')(row))), number: true },
  { head: 'Moves in', text: (row) => String(i('moves_in')(row)), number: true },
  { head: 'Moves out', text: (row) => String(i('moves_out')(row)), number: true },
  { head: 'Report', text: (row) => `${i('silent_s')(row).toFixed(1)} s ago`, number: true },
  { head: 'Model', text: (row) => i('model')(row) || '-' },
], (row) => row.id);

function showFleet() {
  showInstance();
  const counts = [0, 0, 0, 0];
  let waiting = 0;
  now.requests.phase.forEach((phase, row) => { counts[phase] += 1; waiting += now.requests.state[row] === 1; });
  const words = PHASES.map((word, n) => `${word} ${whole(counts[n])}`).slice(1);
  words.push(`waiting ${whole(waiting)} (hollow)`);
  if ($('legend').children.length !== words.length) {
    $('legend').replaceChildren(...[...PHASES.slice(1), 'waiting'].map((name) => el('li', {}, el('i', { class: name }), el('span'))));
  }
  words.forEach((word, n) => setText($('legend').children[n].lastChild, word));
  $('lanes').hidden = asTable;
  $('instances').hidden = !asTable;
  if (asTable) instances.show(rowsOfInstances());
  else {
    lanes.draw();
    const models = [...countByModel(now.instances)];
    const groups = models.length > 1 ? ` of ${models.length} models (${models.map(([m, count]) => `${m}: ${count}`).join(', ')})` : '';
    $('lanes-base').setAttribute('aria-label',
      `${now.instances.id.length} instances${groups} as lanes; ${words.join(', ')}. The table shows the same.`);
  }
}

const facts = el('dl');
const buttons = el('div', { class: 'buttons' });
const running = el('ul');
let described = '';
function showInstance() {
  const n = now.instances.id.indexOf(view.what);
  $('instance').hidden = n < 0;
  if (n < 0) { described = ''; return; }
  const id = view.what;
  const row = { id, n };
  const pool = i('pool')(row) ?? 'none';
  const key = `${id} ${i('state')(row)} ${pool} ${now.session.may_act}`;
  if (key !== described) {
    // Only when it changes, so that a button keeps the focus.
    described = key;
    const undrain = i('state')(row) === 'draining';
    buttons.replaceChildren(
      undrain
        ? actButton('Take back', () => perform(`Let ${id} take new requests again?`, 'Take back', 'drain', { instance: id, undrain: true }))
        : actButton('Drain', () => perform(`Drain ${id}? Its requests move elsewhere, and it gets no new ones.`, 'Drain', 'drain', { instance: id, undrain: false })),
      el('button', { type: 'button', click: () => { location.hash = link('fleet'); } }, 'Close'));
    $('instance').replaceChildren(el('h2', {}, id), facts, buttons, poolForm(id, pool), el('h3', {}, 'Requests'), running);
  }
  const pairs = instances.columns.slice(1).map((column) => [column.head, column.text(row)]);
  facts.replaceChildren(...pairs.flatMap(([head, text]) => [el('dt', {}, head), el('dd', {}, text)]));
  const r = now.requests;
  const mine = r.id.map((_, k) => k).filter((k) => r.instance[k] === n).slice(0, 50);
  const ids = mine.map((k) => r.id[k]).join();
  if (running.dataset.ids !== ids) {
    running.dataset.ids = ids;
    running.replaceChildren(...mine.map((k) => el('li', {}, el('a', { href: requestLink(r.id[k]) }, r.id[k]))));
  }
}

const word = (pool) => pool.replaceAll('_', ' ');
function poolForm(id, pool) {
  const choice = el('select', { name: 'pool' },
    ...POOLS.map((name) => el('option', { value: name, selected: name === pool }, word(name))));
  const form = el('form', { 'aria-label': `Pool of ${id}`, submit: (event) => {
    event.preventDefault();
    if (choice.value === pool) { say(`The pool of ${id} is ${word(pool)} already.`); return; }
    perform(`Set the pool of ${id}?`, 'Set pool', 'pool', { instance: id, pool: choice.value },
      { changes: [`pool: ${word(pool)} → ${word(choice.value)}`], form });
  } },
  el('label', {}, 'Pool', choice), el('button', { type: 'submit', disabled: !now.session.may_act }, 'Set pool'),
  el('p', { class: 'error', role: 'alert', id: 'pool-error' }));
  return form;
}

for (const [id, table] of [['show-lanes', false], ['show-table', true]]) {
  $(id).addEventListener('click', () => {
    asTable = table;
    $('show-lanes').setAttribute('aria-pressed', String(!table));
    $('show-table').setAttribute('aria-pressed', String(table));
    show();
  });
}
$('order').addEventListener('change', () => { lanes.order = $('order').value; lanes.draw(); });

// Requests.
const r = (key) => (row) => now.requests[key][row];
const requests = new Table($('requests'), 'Running requests', [
  { head: 'Request', text: r('id'), href: (row) => requestLink(r('id')(row)) },
  { head: 'Instance', text: (row) => now.instances.id[r('instance')(row)] ?? '-' },
  { head: 'Phase', text: (row) => PHASES[r('phase')(row)] || '-' },
  { head: 'State', text: (row) => (r('moving')(row) ? 'moving' : STATES[r('state')(row)] || '-') },
  { head: 'Epoch', text: (row) => String(r('epoch')(row)), number: true },
  { head: 'Prompt', text: (row) => whole(r('prompt')(row)), number: true },
  { head: 'Output', text: (row) => whole(r('output')(row)), number: true },
  { head: 'KV blocks', text: (row) => whole(r('kv')(row)), number: true },
  { head: 'Age', text: (row) => duration(r('age')(row)), number: true },
], (row) => now.requests.id[row]);

function showRequests() {
  const words = $('find').value.toLowerCase();
  const phase = Number($('phase').value);
  const found = [];
  now.requests.id.forEach((id, row) => {
    const where = now.instances.id[now.requests.instance[row]] ?? '';
    if ((!phase || now.requests.phase[row] === phase) && `${id} ${where}`.toLowerCase().includes(words)) found.push(row);
  });
  found.sort((a, b) => now.requests.age[b] - now.requests.age[a]);
  requests.show(found.slice(0, ROWS_MAX));
  setText($('requests-shown'), `${whole(found.length)} found${found.length > ROWS_MAX ? `, the oldest ${ROWS_MAX} shown` : ''}`);
}
$('find').addEventListener('input', () => now && showRequests());
$('phase').addEventListener('change', () => now && showRequests());

// One request.
let asked = 0;
async function askLife() {
  const { cluster, what: id } = view;
  asked = performance.now();
  try {
    const found = await get(`api/requests/${encodeURIComponent(id)}`);
    if (view.name === 'request' && view.what === id && view.cluster === cluster) life.show(found);
  } catch (error) {
    setText($('request-facts'), error.message);
  }
}

function showRequest() {
  const row = now.requests.id.indexOf(view.what);
  life.sample(now, row);
  $('migrate').hidden = row < 0 || !now.session.may_act;
  const here = now.requests.instance[row];
  const targets = now.instances.id.filter((_, n) => n !== here && now.instances.state[n] === 'active');
  if ($('target').dataset.ids !== targets.join()) {
    const before = $('target').value;
    $('target').dataset.ids = targets.join();
    $('target').replaceChildren(...targets.map((id) => el('option', { value: id }, id)));
    if (targets.includes(before)) $('target').value = before;
  }
  if (performance.now() - asked > LIFE_MS && (row >= 0 || life.life?.ended == null)) askLife();
}
$('migrate').addEventListener('submit', async (event) => {
  event.preventDefault();
  const target = $('target').value;
  await perform(`Migrate ${view.what} to ${target}?`, 'Migrate', 'migrate', { request: view.what, target });
  askLife();
});

// Moves.
const moves = new Table($('moves'), 'Migrations', [
  { head: 'At', text: (m) => clock(m.closed_s || m.opened_s) },
  { head: 'Request', text: (m) => m.request_id, href: (m) => requestLink(m.request_id) },
  { head: 'From', text: (m) => m.source_instance_id },
  { head: 'To', text: (m) => m.target_instance_id },
  { head: 'State', text: (m) => m.state ?? '-', kind: (m) => (m.state === 'aborted' || m.state === 'unknown' ? 'bad' : '') },
  { head: 'Way', text: (m) => m.way ?? '-' },
  { head: 'Phase', text: (m) => m.phase ?? '-' },
  { head: 'Rounds', text: (m) => String(m.rounds.length), number: true },
  { head: 'KV', text: (m) => bytes(m.bytes), number: true },
  { head: 'Pause ms', text: (m) => m.pause_ms.toFixed(1), number: true },
  { head: 'Steps', text: (m) => m.pause_steps.toFixed(1), number: true },
  { head: 'Why', text: (m) => m.error || m.reason || '-', wrap: true },
], (m) => m.migration_id);
const showMoves = () => moves.show([...now.migrations].sort((a, b) => b.opened_s - a.opened_s));

// Policies.
async function askPolicies() {
  if (view.name !== 'policies') return;
  asked = performance.now();
  const { cluster } = view;
  let found;
  try {
    found = await get('api/policies');
    if (view.cluster !== cluster) return;
  } catch (error) {
    $('shadow').replaceChildren(el('p', { class: 'dim' }, error.message));
    return;
  }
  showShadow(found.shadow);
  // What is being typed must not be replaced.
  const kept = $('policies').contains(document.activeElement) || $('policies').dataset.edited;
  if (kept && $('policies').dataset.known) return;
  const opened = new Set([...$('policies').querySelectorAll('details[open]')].map((d) => d.dataset.name));
  $('policies').dataset.known = 'yes';
  found.policies.sort((a, b) => b.active - a.active);
  $('policies').replaceChildren(...found.policies.map((p, number) => policyPanel(p, opened.has(p.name) || p.active, number)));
}

function policyPanel(policy, open, number) {
  const inputs = new Map();
  const table = el('div', { class: 'table' });
  new Table(table, `Parameters of ${policy.name}`, [
    { head: 'Parameter', text: (p) => p.name },
    { head: 'In force', text: (p) => (p.value === '' ? '-' : `${p.value} ${p.unit}`) },
    { head: 'Default', text: (p) => `${p.default} ${p.unit}` },
    { head: 'Allowed', text: (p) => p.allowed },
    { head: 'What it is', text: (p) => p.description, wrap: true },
    { head: 'Set to', text: () => '' },
  ], (p) => p.name).show(policy.parameters);
  [...table.querySelectorAll('tbody tr')].forEach((row, n) => {
    const parameter = policy.parameters[n];
    const input = el('input', {
      type: 'text', name: parameter.name, 'aria-label': `Set ${parameter.name} to`, placeholder: parameter.default, autocomplete: 'off',
      value: policy.active && parameter.value !== parameter.default ? parameter.value : null,
    });
    inputs.set(parameter.name, input);
    row.lastChild.append(input);
  });
  const given = () => Object.fromEntries(
    [...inputs].map(([name, input]) => [name, input.value.trim()]).filter(([, value]) => value));
  const set = async () => {
    const parameters = given();
    const changes = policy.active ? [] : [`policy: ${now.policy?.name ?? 'unknown'} → ${policy.name}`];
    for (const parameter of policy.parameters) {
      const before = policy.active ? parameter.value : parameter.default;
      const after = parameters[parameter.name] ?? parameter.default;
      if (before !== after) changes.push(`${parameter.name}: ${before} → ${after}${policy.active ? '' : ' (not the default)'}`);
    }
    if (!changes.length) { say(`The policy ${policy.name} is as it was.`); return; }
    if (await perform(`Set the policy ${policy.name}?`, 'Set policy', 'policy', { name: policy.name, parameters },
      { changes, form: panel })) renewPolicies();
  };
  const setShadow = async () => {
    const parameters = given();
    const changes = [`shadow: ${shadowName || 'none'} → ${policy.name}`, 'its counts begin at 0',
      ...Object.entries(parameters).map(([name, value]) => `${name}: ${value}`)];
    if (await perform(`Ask ${policy.name} as the shadow, too?`, 'Set shadow', 'shadow', { name: policy.name, parameters },
      { changes, form: panel })) renewPolicies();
  };
  const panel = el('details', { class: 'policy', open, 'data-name': policy.name, input: () => { $('policies').dataset.edited = 'yes'; } },
    el('summary', {}, el('strong', {}, policy.name), policy.active ? el('span', { class: 'chosen' }, policy.suspended ? 'suspended' : 'active') : null,
      el('span', { class: 'dim' }, policy.suspended || policy.summary)),
    el('p', { class: 'dim' }, `Order inside each instance: ${policy.batch_order || '-'}`),
    policy.parameters.length ? table : el('p', { class: 'dim' }, 'It has no parameters.'),
    el('p', { class: 'error', role: 'alert', id: `policy-error-${number}` }),
    actButton('Set policy', set), ' ', policy.active ? null : actButton('Set as shadow', setShadow));
  return panel;
}

function renewPolicies() {
  delete $('policies').dataset.known;
  delete $('policies').dataset.edited;
  askPolicies();
}

let shadow = null;
let shadowName = '';
async function endShadow() {
  const changes = [`shadow: ${shadowName} → none`, 'its counts are dropped'];
  if (await perform('End the shadow?', 'End shadow', 'shadow', { name: '' }, { changes })) renewPolicies();
}

function showShadow(found) {
  shadowName = found.name;
  if (!found.name) {
    shadow = null;
    $('shadow').className = '';
    $('shadow').replaceChildren(el('p', { class: 'dim' }, 'No shadow is set.'));
    return;
  }
  $('shadow').className = 'table';
  shadow ??= new Table($('shadow'), '', [
    { head: 'Decision', text: (c) => c.point },
    { head: 'Same', text: (c) => whole(c.same), number: true },
    { head: 'Different', text: (c) => whole(c.different), number: true },
    { head: 'Differs', text: (c) => percent(c.different / Math.max(1, c.same + c.different)), number: true },
    { head: 'Failed', text: (c) => whole(c.failed), number: true },
  ], (c) => c.point);
  if (!$('shadow').querySelector('button')) $('shadow').append(actButton('End shadow', endShadow));
  setText($('shadow').querySelector('caption'),
    `${found.name} as the shadow of ${found.policy}${found.suspended ? `; not asked any more: ${found.suspended}` : ''}`);
  shadow.show(found.counts);
}

// Alerts.
const services = new Table($('services'), 'Services', [
  { head: 'Service', text: (s) => s.kind },
  { head: 'Id', text: (s) => s.id },
  { head: 'Leader', text: (s) => (s.leader ? 'leader' : '') },
  { head: 'Address', text: (s) => s.address },
  { head: 'HTTP', text: (s) => (s.http_address || '-') + (s.asleep ? ' (asleep)' : '') },
  { head: 'Metrics', text: (s) => s.metrics_address || '-' },
], (s) => `${s.kind}/${s.id}`);
$('services').className = 'table';

function showAlerts() {
  const shown = now.alerts.length ? now.alerts : [{ level: 'good', what: '', text: 'There is nothing to look at.' }];
  const key = JSON.stringify(shown);
  if ($('alerts').dataset.key !== key) {
    $('alerts').dataset.key = key;
    $('alerts').replaceChildren(...shown.map((a) => el('li', { class: a.level },
      el('span', { class: 'dim' }, a.level === 'good' ? '' : `${a.level} `), el('b', {}, a.what), a.text)));
  }
  services.show(now.services);
}

// Settings.
const sloForm = new SloForm(perform, say);
const stagesForm = new StagesForm(perform, say);
function showSettings() {
  sloForm.show(now);
  stagesForm.show(now);
}

// Clusters.
function showClusters() {
  const { clusters, cluster, own } = now.session;
  $('clusters').hidden = clusters.length < 2;
  const key = JSON.stringify(clusters);
  if ($('cluster').dataset.key !== key) {
    $('cluster').dataset.key = key;
    $('cluster').replaceChildren(...clusters.map(({ name, models }, number) => el('option', { value: number ? name : '' },
      models.length ? `${name} (${models.join(', ')})` : name)));
  }
  if (document.activeElement !== $('cluster')) $('cluster').value = own ? '' : cluster;
}
$('cluster').addEventListener('change', () => {
  location.hash = linkIn($('cluster').value, view.name === 'request' ? 'requests' : view.name);
});

// Begin with another cluster: nothing of the one before may be seen in it.
function enter(cluster) {
  now = null;
  history = {};
  lanes.forget();
  sloForm.undo();
  stagesForm.undo();
  delete $('policies').dataset.known;
  delete $('policies').dataset.edited;
  $('shadow').replaceChildren();
  $('policies').replaceChildren();
  shadow = null;
  $('main').setAttribute('aria-busy', 'true');
  setText($('link'), 'connecting');
  setCluster(cluster);
  choose(cluster);
  for (const anchor of document.querySelectorAll('nav a')) anchor.href = link(anchor.dataset.view);
}

// Views by the address.
const SHOW = {
  fleet: showFleet, requests: showRequests, request: showRequest, moves: showMoves, policies: () => {},
  settings: showSettings, alerts: showAlerts,
};

function route() {
  const parts = location.hash.split('/').slice(1);
  const cluster = parts[0] === 'in' ? safelyDecoded(parts.splice(0, 2)[1] ?? '') : '';
  const [name = 'fleet', what = ''] = parts;
  if (cluster !== view.cluster) enter(cluster);
  view = { cluster, name: name in SHOW ? name : 'fleet', what: safelyDecoded(what) };
  for (const section of document.querySelectorAll('main > section')) section.hidden = section.id !== `view-${view.name}`;
  for (const anchor of document.querySelectorAll('nav a')) {
    if (anchor.dataset.view === (view.name === 'request' ? 'requests' : view.name)) anchor.setAttribute('aria-current', 'page');
    else anchor.removeAttribute('aria-current');
  }
  document.title = [view.what || view.name, cluster, 'Tailrace console'].filter(Boolean).join(' - ');
  if (view.name === 'request') {
    setText($('title-request'), `Request ${view.what}`);
    setText($('request-facts'), '');
    life.begin(view.what);
    askLife();
  }
  if (view.name === 'policies') renewPolicies();
  show();
}

function safelyDecoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function show() {
  if (!now) return;
  const count = now.alerts.filter((a) => a.level !== 'note').length;
  $('alert-count').hidden = !count;
  setText($('alert-count'), String(count));
  SHOW[view.name]();
}

addEventListener('hashchange', () => { route(); $('main').focus(); });
setInterval(askPolicies, POLICIES_MS);
route();
follow((snapshot) => {
  now = snapshot;
  $('main').removeAttribute('aria-busy');
  setText($('link'), `${now.session.admin} as ${now.session.who}${now.session.may_act ? '' : ' (may look only)'}`);
  $('link').className = '';
  showClusters();
  showFigures();
  lanes.take(now);
  show();
}, async (text, bad, status) => {
  setText($('link'), text);
  $('link').className = bad ? 'bad' : '';
  if (status === 404 && view.cluster) {
    say(text, true);
    location.hash = '#/fleet';
    return false;
  }
  if (status !== 401) return false;
  $('login').showModal();
  await new Promise((closed) => $('login').addEventListener('close', closed, { once: true }));
  setToken($('token').value);
  return true;
});
