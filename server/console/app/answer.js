// A panel with one answer: every token coloured by what the gates did there, marked spans, and in words how it ended.
// One stop of the Tab key; the arrow keys go from token to token, and the line below tells of the one that is looked at.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js"
import { inWords } from "./answering.js"
import { counted, duration } from "./format.js"
import { Note } from "./parts.js"

const STEPS = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -Infinity, End: Infinity }

export function Answer({ title, id, answer, running }) {
  const [at, look] = useState(-1), tokens = answer.tokens
  const shown = Math.min(at, tokens.length - 1), box = useRef(null)
  useEffect(() => { if (running) look(-1) }, [running])
  useEffect(() => { box.current.querySelector(".looked")?.scrollIntoView({ block: "nearest" }) }, [shown])
  const most = Math.max(...tokens.map(strongest), 0)

  function step(event) {
    if (!(event.key in STEPS) || event.ctrlKey || event.altKey || event.metaKey) return
    event.preventDefault()
    look(Math.max(0, Math.min(tokens.length - 1, Math.max(shown, -1) + STEPS[event.key])))
  }

  // A table of where each token begins, so that marks, which are by character, can be cut at its borders.
  let start = 0
  const pieces = tokens.map((token, number) => {
    const begins = start
    start += token.text.length
    const level = most && strongest(token) > 0 ? Math.max(1, Math.ceil(3 * strongest(token) / most)) : 0
    return html`<span key=${number} data-at=${number} class=${`token open-${level}${number === shown ? " looked" : ""}${token.end ? " end-token" : ""}`}>${
      token.end ? "end" : cut(token.text, begins, answer.spans)}</span>`
  })
  const { usage, seconds, applied } = answer
  return html`<section class="card answer" aria-labelledby=${id + "-title"}>
    <header><h2 id=${id + "-title"}>${title}</h2>
      <span class="hint">${answer.done && usage ? `${counted(usage.completion_tokens, "token")}, ${duration(seconds)}` : running ? "running" : ""}</span></header>
    <p class="hint applied">${applied.length ? `applied: ${applied.join(", ")}` : answer.done ? "nothing applied" : "\u00a0"}</p>
    <pre id=${id} ref=${box} role="group" tabindex="0" aria-label=${`${title}: the answer; arrow keys go from token to token`}
      onKeyDown=${step} onMouseOver=${event => hovered(event, look)} onFocus=${() => { if (shown < 0 && tokens.length) look(0) }}>${blank(answer, running)}${pieces}</pre>
    <p class="readout" aria-live="polite">${shown >= 0 ? told(tokens[shown], shown, tokens.length) : "\u00a0"}</p>
    ${answer.done && inWords(answer).map(({ kind, text }) => html`<${Note} kind=${kind} key=${text}>${text}</${Note}>`)}
    ${answer.done && (answer.report?.modules ?? []).map(module => html`<p class="hint" key=${module.name}>
      ${module.name}: gate open at ${module.open} of ${module.positions} tokens, ${
      module.strength ? `strength ${module.strength}` : "measured only (shadow)"}</p>`)}
  </section>`
}

// What stands where no text does.
function blank({ done, text, ended }, running) {
  if (text || (running && !done)) return ""
  return html`<span class="hint">${ended ? "(no text) " : done ? "(no answer)" : "The answer appears here."}</span>`
}

const strongest = token => Math.max(0, ...Object.values(token.gates ?? {}))

function hovered(event, look) {
  const token = event.target.closest("[data-at]")
  if (token) look(Number(token.dataset.at))
}

function told(token, at, count) {
  const gates = Object.entries(token.gates ?? {})
  const figures = gates.map(([name, value]) => `${name} ${value > 0 ? `open, activation ${value.toPrecision(3)}` : "closed"}`)
  const said = token.gates === null ? "gates are not told" : figures.join("; ") || "no gate was asked"
  return `Token ${at + 1} of ${count}, ${token.end ? "the end" : JSON.stringify(token.text)}: ${said}`
}

// The text of a token, which begins at `begins` of the answer, with what lies in spans marked.
function cut(text, begins, spans) {
  const mine = spans.filter(span => span.start < begins + text.length && span.end > begins)
  if (!mine.length) return text
  const borders = [...new Set([0, text.length, ...mine.flatMap(span => [span.start - begins, span.end - begins])])]
    .filter(border => border >= 0 && border <= text.length).sort((a, b) => a - b)
  return borders.slice(1).map((end, number) => {
    const from = borders[number], over = mine.filter(span => span.start - begins <= from && span.end - begins >= end)
    const piece = text.slice(from, end)
    return over.length ? html`<mark class=${over.some(span => span.kind === "run") ? "run" : "same"} title=${over[0].label}>${piece}</mark>` : piece
  })
}
