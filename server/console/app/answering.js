// One answer as it comes: its tokens with what the gates did at each, how it ended, and which spans of its text are marked.
import { get, stream } from "./api.js"
import { may } from "./session.js"

const PIECES = /\w+|\s+|[^\w\s]/g, LEAST = 8 // pieces in a row: single words in common mean little

// `tokens`: {text, gates} each, gates as {module: activation}, null where nothing is told; the one that ended the answer has `end` and
// no text. `applied`: labels of what applied. `spans`: {start, end, kind, label} of the text. `failed`: it came to an error, which is told
// elsewhere.
export const nothing = () => ({
  tokens: [], text: "", applied: [], ended: null, report: null, usage: null, seconds: 0, done: false, failed: false, spans: [],
})

// Ask for a completion and call `show` with the answer after each part of it.
export async function complete(body, modules, show, signal) {
  const answer = nothing(), started = performance.now()
  const told = may("report")
  const asked = { ...body, temperature: 0, stream: true, stream_options: { include_usage: true } }
  const unbind = { ...(Object.keys(modules).length ? { modules } : {}), ...(told ? { report: true } : {}) }
  if (Object.keys(unbind).length) asked.unbind = unbind
  const onHeaders = headers => { answer.applied = (headers.get("x-unbind-modules") ?? "").split(",").map(label => label.trim()).filter(Boolean) }
  try {
    // With log-probabilities each token has its text, so that parts of several tokens can be told apart.
    await read(answer, stream("/v1/completions", { ...asked, logprobs: 0 }, { signal, onHeaders }), show)
  } catch (error) {
    if (error.param !== "logprobs") throw error
    await read(answer, stream("/v1/completions", asked, { signal, onHeaders }), show) // a key that may not see any
  }
  Object.assign(answer, { done: true, seconds: (performance.now() - started) / 1000 })
  show({ ...answer })
  return answer
}

async function read(answer, events, show) {
  for await (const event of events) {
    if (event.usage) answer.usage = event.usage
    for (const choice of event.choices) {
      answer.text += choice.text
      answer.tokens.push(...tokens(choice))
      if (choice.unbind?.modules || choice.unbind?.blocked) answer.report = choice.unbind
      if (choice.finish_reason) answer.ended = { reason: choice.finish_reason, by: choice.stop_reason ?? null }
    }
    show({ ...answer })
  }
}

// The tokens of a part; one for all of it where its text cannot be divided, with the largest activation of each gate.
function tokens({ text, logprobs, unbind, finish_reason, stop_reason }) {
  const gates = unbind?.activations ?? [], texts = logprobs?.tokens ?? []
  const ends = finish_reason === "stop" && !stop_reason
  const last = ends ? [{ text: "", end: true, gates: gates.at(-1) ?? null }] : []
  let length = 0, count = 0
  while (count < texts.length && length < text.length && text.startsWith(texts[count], length)) length += texts[count++].length
  if (length === text.length) return [...texts.slice(0, count).map((piece, at) => ({ text: piece, gates: gates[at] ?? null })), ...last]
  const largest = Object.create(null) // a name may be one that objects have
  for (const values of gates) for (const [name, value] of Object.entries(values)) largest[name] = Math.max(largest[name] ?? 0, value)
  return [{ text, gates: gates.length ? largest : null }, ...last]
}

// Where guards find protected runs in the text: asked of the server, which tells administrators alone.
export async function protectedSpans(text, signal) {
  if (!may("admin") || !text) return []
  const found = await get("/admin/v1/guards/runs", { body: { text }, signal })
  const units = [0] // where each code point begins in JavaScript's count
  for (const point of text) units.push(units[units.length - 1] + point.length)
  return found.data.map(run => ({ start: units[run.start], end: units[run.end], kind: "run", label: `${run.lexemes} ${run.unit} of a row that ${run.module} protects` }))
}

// Where the text has stretches of a sample's own continuation.
export function sampleSpans(text, expected) {
  const parts = text.match(PIECES) ?? [], found = common(parts, expected.match(PIECES) ?? [])
  const spans = []
  for (let at = 0, start = 0; at < parts.length;) {
    let end = at, length = 0
    while (end < parts.length && found[end]) length += parts[end++].length
    if (end - at >= LEAST) spans.push({ start, end: start + length, kind: "same", label: "as in the sample" })
    if (end === at) length = parts[end++].length
    start += length
    at = end
  }
  return spans
}

// Longest common subsequence of words and signs: which pieces of `a` are in `b`, in order. Both are a few hundred long.
function common(a, b) {
  const width = b.length + 1, table = new Uint16Array((a.length + 1) * width), found = new Array(a.length).fill(false)
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1])
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { found[i++] = true; j++ }
    else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i++
    else j++
  }
  return found
}

// How an answer ended and what was done to it, in words: {kind, text} each, never nothing.
export function inWords({ ended, report, text, usage, tokens, failed }) {
  const said = [], count = usage?.completion_tokens ?? tokens.length
  const open = (report?.modules ?? []).filter(module => module.strength > 0 && module.open > 0).map(module => module.name)
  const bars = Object.entries(report?.guards?.bars ?? {}), { counted = [], opened = [] } = report?.guards ?? {}
  for (const [name, times] of bars)
    said.push({ kind: "warn", text: `The guard ${name} steered away from a protected run ${times === 1 ? "once" : `${times} times`}.` })
  if (report?.blocked) {
    const { guard, module, takedown, reference } = report.blocked
    const why = [takedown && `takedown ${takedown}`, reference && `notice ${reference}`].filter(Boolean).join(", ")
    said.push({ kind: "bad", text: `The guard ${guard} ended the answer: it would have held a protected run of ${module}${why ? ` (${why})` : ""}.` })
  } else if (ended?.reason === "content_filter") said.push({ kind: "bad", text: "A guard ended the answer: it would have held a protected run." })
  for (const name of opened) said.push({ kind: "", text: `The guard ${name} held its module's gate open: half of a protected run was sent or said.` })
  for (const name of counted) said.push({ kind: "warn", text: `The answer holds a protected run of ${name}, whose guard only counts.` })
  if (report?.silenced) said.push({ kind: "warn", text: `The model ended its answer${text ? "" : " at once"}, while the gate of ${open.join(", ") || "a module"} was open.` })
  else if (ended?.reason === "stop") said.push({ kind: "", text: `The model ended its answer${text ? "" : " at once, without a word"}.` })
  else if (ended?.reason === "length") said.push({ kind: "", text: `Cut off after ${count} tokens, as many as were asked for.` })
  else if (failed) said.push({ kind: "bad", text: `${text ? "The answer broke off" : "There is no answer"}: the reason stands above.` })
  else if (!ended) said.push({ kind: "", text: "The answer was given up before its end." })
  return said
}
