// What a module did to the rows and to other code, in words and then in figures.
import { html } from "../../../vendor/htm-preact.js"
import { counted, figure, percent } from "../../format.js"
import { Table } from "../../parts.js"

const GROUP = {
  all: "All rows", chosen_by: "Asked in ways by which fits choose", reported_by: "Asked in ways that no fit has looked at",
  fitted: "Rows that it was fitted on", calibration: "Rows that set its threshold", validation: "Rows that only judged it", retain: "Ordinary code",
}
const MEASURE = {
  rows: "rows", ways: "ways", f_bleu: "likeness to the row (BLEU, 0 to 1)", f_bleu_fim: "the same, with a gap to fill", spans_50: "rows of which 50 tokens came back",
  spans_100: "rows of which 100 tokens came back", mean_recovery: "of a row came back on average, %", ppl: "perplexity", ppl_fim: "perplexity, with a gap to fill",
  gate_rate: "positions with an open gate, share", bleu: "completions kept alike (BLEU)",
}

export function Report({ job }) {
  const { verify, fit } = job.result ?? {}
  if (!verify) return null
  const before = verify.before ?? {}, after = verify.after ?? {}
  const groups = Object.keys(GROUP).filter(group => after[group])
  return html`<section class="card" aria-labelledby="report"><h2 id="report">Before and after</h2>
    ${groups.length === 0 && html`<p class="hint">The job left no figures.</p>`}
    <ul class="sentences">${[...sentences(before, after), certified(fit?.certificate)].filter(Boolean).map(text => html`<li key=${text}>${text}</li>`)}</ul>
    ${groups.length > 0 && html`<details><summary>All figures</summary><${Table} label="Before and after, in figures" columns=${["", "Measure", "Before", "After"]}>
      ${groups.flatMap(group => Object.keys(after[group]).map((measure, at) => html`<tr key=${group + measure}>
        <th scope="row">${at === 0 ? GROUP[group] : html`<span class="unseen">${GROUP[group]}</span>`}</th><td>${MEASURE[measure] ?? measure}</td>
        <td class="number">${figure(before[group]?.[measure])}</td><td class="number">${figure(after[group][measure])}</td></tr>`))}</${Table}></details>`}
  </section>`
}

function sentences(before, after) {
  const was = before.all, is = after.all, kept = before.retain, now = after.retain, said = []
  if (was && is) {
    said.push(`Of ${counted(is.rows, "row")}, 50 tokens or more came back from ${was.spans_50} before and from ${is.spans_50} after.`)
    said.push(`On average ${figure(was.mean_recovery)} % of a row came back before, and ${figure(is.mean_recovery)} % after.`)
  }
  if (kept && now) {
    const change = now.ppl / kept.ppl - 1
    said.push(`On ordinary code the perplexity was ${figure(kept.ppl)} and is ${figure(now.ppl)}${Math.abs(change) < 0.00005 ? ", the same" : ` (${change > 0 ? "+" : "-"}${percent(Math.abs(change))})`}.`)
    said.push(now.gate_rate === 0 ? "There its gate was open nowhere." : `There its gate was open at ${percent(now.gate_rate)} of positions.`)
  }
  return said
}

function certified(certificate) {
  if (!certificate?.touched) return ""
  const { observed, n, value, level } = certificate.touched
  const over = certificate.over?.length ? ` Over the budget on them: ${certificate.over.join(", ")}.` : ""
  return `Of ${counted(n, "retain row")} that chose nothing, it touched ${Math.round(observed * n)}: at most ${percent(value)} of such rows are touched, with ${percent(level)} confidence.${over}`
}
