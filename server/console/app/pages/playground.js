// What a completion is without modules and with them, side by side.
import { html, useEffect, useRef, useState } from "../../vendor/htm-preact.js"
import { Answer } from "../answer.js"
import { complete, nothing, protectedSpans, sampleSpans } from "../answering.js"
import { Empty, Field, Note, Problem, Title } from "../parts.js"
import { announce, may, useSession } from "../session.js"

// What was asked for on the left is no module; what is enforced applies there as well.
const titles = ([left]) => [left.applied.length ? "With what is enforced alone" : "Without modules", "With modules"]

export function Playground() {
  const { state } = useSession()
  const [asked, set] = useState({ prompt: "", sample: "", tokens: 128 }), change = values => set({ ...asked, ...values })
  const [chosen, choose] = useState(new Map()) // name -> strength, as it was typed; a module may be called as what objects have, as "constructor"
  const [answers, show] = useState([nothing(), nothing()]), [running, run] = useState(false), [problem, setProblem] = useState(null)
  const control = useRef(null)
  useEffect(() => () => control.current?.abort(), []) // nobody reads on
  const sample = state.rows[asked.sample], strengths = strengthsOf(chosen, state.modules)

  async function side(number, modules, signal) {
    const put = answer => show(before => before.map((old, at) => at === number ? answer : old))
    const body = { prompt: asked.prompt, max_tokens: Number(asked.tokens) }
    try {
      const answer = await complete(body, modules, put, signal)
      answer.spans = sample?.kind === "memorised" ? sampleSpans(answer.text, sample.expected) : []
      answer.spans = [...answer.spans, ...await protectedSpans(answer.text, signal)]
      put({ ...answer })
    } catch (error) {
      show(before => before.map((old, at) => at === number ? { ...old, done: true, failed: !signal.aborted } : old))
      if (!signal.aborted) throw error
    }
  }

  async function go(event) {
    event.preventDefault()
    if (running) return control.current.abort()
    control.current = new AbortController()
    run(true)
    setProblem(null)
    show([nothing(), nothing()])
    announce("Both answers are being made.")
    const { signal } = control.current
    // Errors of both sides are most often one and the same.
    const ended = await Promise.allSettled([side(0, {}, signal), side(1, strengths, signal)])
    const failed = ended.find(one => one.status === "rejected")
    setProblem(failed?.reason ?? null)
    announce(failed ? "" : signal.aborted ? "Stopped." : "Both answers are there.")
    control.current.abort() // a stream that failed may not have been read to its end
    run(false)
  }

  const choice = number => {
    const row = state.rows[number]
    set({ ...asked, sample: number, prompt: row ? row.prompt : asked.prompt })
  }
  return html`<${Title} title="Playground" lead="One prompt, completed greedily without modules and with the ones you choose." />
    <form class="card" onSubmit=${go}>
      <div class="asking">
        ${state.rows.length > 0 && html`<${Field} label="Sample" id="row"><select id="row" value=${asked.sample} onChange=${event => choice(event.target.value)}>
          <option value="">your own prompt</option>
          ${groups(state.rows).map(([name, rows]) => html`<optgroup key=${name} label=${name}>${rows.map(([row, number]) =>
            html`<option key=${number} value=${String(number)}>${row.label}</option>`)}</optgroup>`)}</select></${Field}>`}
        <${Field} label="New tokens" id="tokens"><input id="tokens" type="number" value=${asked.tokens} onInput=${event => change({ tokens: event.target.value })} /></${Field}>
      </div>
      <${Field} label="Prompt" id="prompt"><textarea id="prompt" rows="6" spellcheck=${false} placeholder="def main(" value=${asked.prompt}
        onInput=${event => change({ prompt: event.target.value, sample: "" })} /></${Field}>
      <${Choices} modules=${state.modules} chosen=${chosen} choose=${choose} />
      <${Problem} error=${problem} />
      <button class="main" id="go">${running ? "Stop" : "Complete"}</button>
    </form>
    <${BothSides} applied=${answers[0].applied} />
    <div class="two">${titles(answers).map((title, number) => html`<${Answer} key=${number} id=${"text" + number} title=${title} answer=${answers[number]}
      running=${running && !answers[number].done} />`)}</div>
    <${Legend} answers=${answers} sample=${sample} running=${running} />`
}

// The names that a request may add, with a strength each.
function Choices({ modules, chosen, choose }) {
  if (!modules.length) {
    return html`<${Empty} title="No module is loaded">Post a takedown, or put a module file into the server's modules folder; it appears here by
      itself. Until then both sides are the same.</${Empty}>`
  }
  const change = (name, strength) => choose(new Map(chosen).set(name, strength))
  return html`<fieldset id="modules"><legend>Modules on the right, and how strongly (over 0, up to 10)</legend>
    <div class="row">${modules.map(({ name, label, guard, applies }) => {
      const strength = chosen.get(name)
      return html`<span class="choice" key=${name}><label><input type="checkbox" value=${name} checked=${strength !== undefined}
        onChange=${event => change(name, event.target.checked ? "1" : undefined)} />${name}</label>${
        guard && html`<span class="hint">${label ? "and guard" : "guard"}</span>`}${!applies && html`<span class="hint">shadow</span>`}${
        strength !== undefined && label && html`<input type="number" min="0" max="10" step="any" aria-label=${`strength of ${name}`} value=${strength}
          onInput=${event => change(name, event.target.value)} />`}</span>`
    })}</div></fieldset>`
}

// What was typed, as the API takes it: what is no number is refused there, in its words. A module that is gone is left out.
function strengthsOf(chosen, modules) {
  const there = new Set(modules.map(module => module.name))
  const named = [...chosen].filter(([name, strength]) => strength !== undefined && there.has(name))
  return Object.fromEntries(named.map(([name, strength]) => [name, Number(strength)]))
}

function groups(rows) {
  const found = new Map()
  rows.forEach((row, number) => found.set(row.set, [...(found.get(row.set) ?? []), [row, number]]))
  return [...found].map(([set, members]) => [`${set} (${members[0][0].kind})`, members])
}

const BothSides = ({ applied }) => applied.length > 0 && html`<${Note} kind="warn">On both sides: ${applied.map(named).join(", ")}. A takedown, a policy, a profile
  or this key enforces ${applied.length === 1 ? "it" : "them"}, and no request can leave ${applied.length === 1 ? "it" : "them"} out.</${Note}>`

// "set-a:guard@1234" -> "the guard set-a"
function named(label) {
  const [name, kind] = label.split("@")[0].split(":")
  return `the ${kind ?? "module"} ${name}`
}

function Legend({ answers, sample, running }) {
  const [left, right] = answers
  if (running || !left.ended || !right.ended) return null
  const kinds = new Set(answers.flatMap(answer => answer.spans.map(span => span.kind)))
  return html`<p class="legend" id="legend">${left.text === right.text
    ? html`<strong>Both answers are identical.</strong>` : "The answers differ."}
    ${may("report") ? html`<span><i class="token open-3"></i>a gate is open</span>` : html`<span>What gates do is told to keys with the scope 'report'.</span>`}
    ${kinds.has("run") && html`<span><i class="run"></i>a protected run</span>`}
    ${kinds.has("same") && html`<span><i class="same"></i>as in the sample</span>`}
    ${sample?.kind === "memorised" && !kinds.size && html`<span>Neither answer holds a stretch of the sample.</span>`}</p>`
}
