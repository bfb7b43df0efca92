// The text of /metrics to figures, and the figures of two hours to lines. Pure but for the sampler at the end.
import { call } from "../../api.js"
import { session } from "../../session.js"

export const EVERY = 5 // seconds
const KEPT = 2 * 3600 / EVERY // samples
const OVER = 60 // seconds that a rate of gates looks back over: they open seldom
const OTHERS = /^\/(admin|console|metrics|health|ready|version|openapi|props|models|v1\/models|$)/ // routes that make no answers
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)/
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g
const UNESCAPED = { n: "\n", '"': '"', "\\": "\\" }

// Every series of an exposition: name -> [{labels, value}].
export function parsed(text) {
  const found = new Map()
  for (const line of text.split("\n")) {
    const [, name, labels = "", value] = LINE.exec(line) ?? []
    if (!name) continue
    const said = Object.fromEntries([...labels.matchAll(LABEL)].map(([, key, one]) => [key, one.replace(/\\(.)/g, (_, letter) => UNESCAPED[letter] ?? letter)]))
    if (!found.has(name)) found.set(name, [])
    found.get(name).push({ labels: said, value: Number(value) })
  }
  return found
}

// What the charts need of one exposition, taken at `at` (seconds). Figures that the server does not tell are null.
export function sample(text, at) {
  const series = parsed(text)
  const sum = (name, of = () => true) => (series.has(name) ? series.get(name).filter(({ labels }) => of(labels)).reduce((total, { value }) => total + value, 0) : null)
  const gates = Object.create(null), calibrated = Object.create(null) // a name may be one that objects have, as "constructor"
  const gate = module => (gates[module] ??= { read: 0, open: 0 })
  for (const { labels, value } of series.get("unbind_gate_evaluations_total") ?? []) gate(labels.module).read += value
  for (const { labels, value } of series.get("unbind_gate_activations_total") ?? []) gate(labels.module).open += value
  for (const { labels, value } of series.get("unbind_module_calibrated_rate") ?? []) (calibrated[labels.module] ??= {})[labels.side] = value
  return {
    at, gates, calibrated: series.has("unbind_module_calibrated_rate") ? calibrated : null,
    requests: sum("unbind_requests_total", ({ route }) => !OTHERS.test(route)), others: sum("unbind_requests_total", ({ route }) => OTHERS.test(route)),
    generated: sum("unbind_generated_tokens_total"), prompt: sum("unbind_prompt_tokens_total"),
    running: sum("unbind_requests_running"), waiting: sum("unbind_requests_waiting"), slots: sum("unbind_slots"),
    bars: sum("unbind_guard_bars_total") ?? 0, stops: sum("unbind_guard_stops_total") ?? 0, would: sum("unbind_guard_would_block_total") ?? 0,
  }
}

const grown = (now, before) => (now === null || before === null || now < before ? null : now - before) // less: the server was started anew

// The growth of a counter by `per` seconds, between each sample and the one before it.
export function rates(samples, name, per = 1) {
  return samples.map((now, number) => {
    const before = samples[number - 1], more = before ? grown(now[name], before[name]) : null
    return more === null ? null : more * per / (now.at - before.at)
  })
}

// The share of positions read within the last minute at which a module's gate was open; null where none was read.
export function shares(samples, module) {
  let first = 0
  return samples.map((now, number) => {
    while (first < number && samples[first].at < now.at - OVER) first++
    const before = samples[first].gates[module] ?? { read: 0, open: 0 }, is = now.gates[module]
    const read = is && first < number ? grown(is.read, before.read) : null
    return read ? grown(is.open, before.open) / read : null
  })
}

// The modules whose gates were read, those that opened most first.
export function modules(samples) {
  const gates = samples.at(-1)?.gates ?? {}
  const rate = name => gates[name].open / Math.max(1, gates[name].read)
  return Object.keys(gates).filter(name => gates[name].read > 0).sort((a, b) => rate(b) - rate(a) || a.localeCompare(b))
}

// The samples of this page's life, at most two hours. They are taken from the first look at the page on, on other pages too, until the key changes.
const taken = { samples: [], key: null, timer: 0, listeners: new Set(), error: null, asking: false }

async function take() {
  const { key } = session
  if (!session.state || key !== taken.key) return stop()
  if (!session.away && !taken.asking) {
    taken.asking = true
    try {
      const { body } = await call("/metrics")
      if (key !== taken.key) return // what one key may see is not shown to another
      taken.samples = [...taken.samples.slice(1 - KEPT), sample(body, Date.now() / 1000)]
      taken.error = null
    } catch (error) { taken.error = error.code === "away" ? null : error } finally { taken.asking = false }
  }
  for (const listener of taken.listeners) listener()
}

function stop() {
  clearInterval(taken.timer)
  Object.assign(taken, { samples: [], key: null, timer: 0, error: null })
}

// Begin to take samples where it has not begun; `listener` is called after each. Returns how to stop listening.
export function follow(listener) {
  if (taken.timer && taken.key !== session.key) stop()
  taken.listeners.add(listener)
  if (!taken.timer) {
    Object.assign(taken, { key: session.key, timer: setInterval(take, 1000 * EVERY) })
    take()
  }
  return () => taken.listeners.delete(listener)
}

export const now = () => taken
