// The console's own API: a stream of snapshots, questions and actions.

let token = '';
const fragment = new URLSearchParams(location.hash.slice(1)).get('token');
if (fragment) {
  sessionStorage.setItem('token', fragment);
  history.replaceState(null, '', `${location.pathname}#/fleet`);
}
token = sessionStorage.getItem('token') ?? '';

// The cluster that is shown; empty: the console's own.
let cluster = '';
let stop = null;
let wake = null;
export function choose(name) {
  if (name === cluster) return;
  cluster = name;
  stop?.abort();
  wake?.();
}
const inCluster = (path, name = cluster) => (name ? `${path}?cluster=${encodeURIComponent(name)}` : path);

export function setToken(given) {
  token = given.trim();
  sessionStorage.setItem('token', token);
}

const headers = (more = {}) => (token ? { Authorization: `Bearer ${token}`, ...more } : more);

export class Failed extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function checked(reply) {
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  throw new Failed(reply.status, said.error ?? `HTTP ${reply.status}`);
}

export async function get(path) {
  return (await checked(await fetch(inCluster(path), { headers: headers() }))).json();
}

// Act in a cluster: the one that was shown when the question was asked.
export async function act(name, body, where) {
  const reply = await fetch(inCluster(`api/actions/${name}`, where), {
    method: 'POST',
    headers: headers({ 'Content-Type': 'application/json', 'X-Tailrace-Console': '1' }),
    body: JSON.stringify(body),
  });
  return (await (await checked(reply)).json()).done;
}

// Follow the chosen cluster's fleet while the page can be seen; nobody polls for a hidden one.
export async function follow(onSnapshot, onState) {
  for (let failures = 0; ; ) {
    if (document.hidden) {
      onState('paused', false);
      await new Promise((seen) => document.addEventListener('visibilitychange', seen, { once: true }));
      continue;
    }
    const stopped = stop = new AbortController();
    const onHidden = () => document.hidden && stopped.abort();
    document.addEventListener('visibilitychange', onHidden);
    try {
      const reply = await checked(await fetch(inCluster('api/events'), { headers: headers(), signal: stopped.signal }));
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      const parts = [];
      for (;;) {
        const { value, done } = await reader.read();
        if (done) throw new Failed(0, 'the console ended the stream');
        parts.push(value);
        if (!value.endsWith('\n\n')) continue;
        failures = 0;
        // Of several that came at once, the last.
        const events = parts.splice(0).join('').split('\n\n');
        onSnapshot(JSON.parse(events[events.length - 2].slice('data: '.length)));
      }
    } catch (error) {
      if (!stopped.signal.aborted) {
        failures += 1;
        const retry = await onState(error.status ? error.message : 'no connection to the console', true, error.status);
        if (!retry) {
          await new Promise((later) => { wake = later; setTimeout(later, Math.min(10_000, 500 * 2 ** failures)); });
        }
      }
    } finally {
      document.removeEventListener('visibilitychange', onHidden);
    }
  }
}
