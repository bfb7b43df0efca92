// Activity: what the server does now and did while this console was open, from /metrics.
import { html, useEffect, useReducer } from "../../vendor/htm-preact.js"
import { counted, duration, figure, percent } from "../format.js"
import { Empty, Note, Problem, Table, Title } from "../parts.js"
import { may, useSession } from "../session.js"
import { Chart, COLOURS } from "./activity/chart.js"
import { EVERY, follow, modules, now, rates, shares } from "./activity/metrics.js"

const MINUTES = [1, 10, 60]

export function Activity() {
  const [, again] = useReducer(count => count + 1, 0)
  const { away } = useSession()
  useEffect(() => {
    const leave = follow(again), clock = setInterval(again, 1000)
    return () => { leave(); clearInterval(clock) }
  }, [])
  const { samples, error } = now(), newest = samples.at(-1)
  const age = newest ? Math.max(0, Date.now() / 1000 - newest.at) : 0
  return html`<${Title} title="Activity" lead="What the server does, from its metrics. This page keeps two hours of it, from when it was first opened.">
      <span class=${"hint" + (age > 4 * EVERY ? " warn" : "")} id="age">${newest ? `Figures of ${Math.round(age)} s ago${away ? "; the server does not answer" : `; read every ${EVERY} s`}` : ""}</span></${Title}>
    <${Problem} error=${error} />
    ${samples.length < 2 ? html`<${Empty} title="Reading the first figures">The lines begin with the second reading, in ${EVERY} seconds. Keep the console open for more of them.</${Empty}>`
      : html`<${Charts} samples=${samples} />`}`
}

function Charts({ samples }) {
  const at = samples.map(one => one.at), of = name => samples.map(one => one[name])
  const lines = [
    { title: "Requests a second", series: [{ label: "for answers", values: rates(samples, "requests") }, { label: "others, this page's too", values: rates(samples, "others") }] },
    { title: "Tokens a second", series: [{ label: "generated", values: rates(samples, "generated") }, { label: "of prompts", values: rates(samples, "prompt") }] },
    { title: "Requests in the engine", series: [{ label: "running", values: of("running") }, { label: "waiting", values: of("waiting") },
      { label: "slots", values: of("slots"), dashed: true }] },
    { title: "Guards, a minute", series: [{ label: "runs barred", values: rates(samples, "bars", 60) }, { label: "answers ended", values: rates(samples, "stops", 60) },
      { label: "only counted", values: rates(samples, "would", 60) }] },
  ].map(chart => ({ ...chart, series: chart.series.map((one, number) => ({ ...one, colour: number + 1 })) }))
  return html`<div class="two charts">${lines.map(chart => html`<${Chart} key=${chart.title} at=${at} ...${chart} />`)}</div>
    <${Gates} samples=${samples} at=${at} />
    <${Figures} samples=${samples} lines=${lines} />`
}

function Gates({ samples, at }) {
  const { gates, calibrated } = samples.at(-1), names = modules(samples)
  const lines = names.slice(0, COLOURS).flatMap((name, number) => {
    const rate = calibrated?.[name]?.retain, colour = number + 1
    const line = [{ label: name, values: shares(samples, name), colour }]
    return rate === undefined ? line : [...line, { label: `${name}, calibrated`, values: at.map(() => rate), colour, dashed: true }]
  })
  if (!names.length) return html`<${Empty} title="No gate was read yet">A gate is read where a module applies to a request. Turn one on by the page Modules or by a policy, and ask for a completion.</${Empty}>`
  return html`<${Chart} title="Gates open, share of positions in the last minute" at=${at} series=${lines} shown=${percent} top=${0.01}>
      ${calibrated ? html`<p class="hint">Dashed: how often calibration saw the gate open on ordinary code. Far more than that on ordinary requests is a module to look at.</p>`
        : html`<${Note}>This server does not tell the rates that modules were calibrated at, so there is nothing to hold these against.</${Note}>`}
      ${!may("report") && html`<${Note}>With this key the counts of gates are those that the server read last, at set times (the setting <code>metrics_interval</code>).</${Note}>`}
      ${names.length > COLOURS && html`<p class="hint">The ${COLOURS} modules whose gates opened most; all are in the table.</p>`}</${Chart}>
    <div class="figures"><${Table} label="Gates by module" columns=${["Module", "Positions read", "Gate open", "Since start", "Last minute", "Calibrated: ordinary code", "Calibrated: protected rows"]}>
      ${names.map(name => html`<tr key=${name}><th scope="row">${name}</th><td class="number">${gates[name].read.toLocaleString("en")}</td>
        <td class="number">${gates[name].open.toLocaleString("en")}</td><td class="number">${percent(gates[name].open / gates[name].read)}</td>
        <td class="number">${percent(shares(samples, name).at(-1))}</td>
        <td class="number">${percent(calibrated?.[name]?.retain)}</td><td class="number">${percent(calibrated?.[name]?.forget)}</td></tr>`)}</${Table}></div>`
}

// What the lines show, as text: the mean of each over the last minutes, and its highest.
function Figures({ samples, lines }) {
  const end = samples.at(-1).at, span = end - samples[0].at
  const mean = (values, minutes, shorter) => {
    if (span < 60 * (shorter ?? 0)) return null // it would be the mean of less time, once more
    const found = values.filter((value, number) => value !== null && samples[number].at >= end - 60 * minutes)
    return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null
  }
  const columns = ["", "", "Now", ...MINUTES.map(minutes => `Mean of ${counted(minutes, "minute")}`), "Highest"]
  return html`<h2>The same in figures</h2><p class="hint">Over ${duration(span)} of ${counted(samples.length, "reading")}.</p>
    <div class="figures"><${Table} label="Activity in figures" columns=${columns}>${lines.flatMap(({ title, series }) => series.map(({ label, values }) => html`<tr key=${title + label}>
      <th scope="row">${title}</th><td>${label}</td><td class="number">${figure(values.at(-1))}</td>
      ${MINUTES.map((minutes, number) => html`<td class="number" key=${minutes}>${figure(mean(values, minutes, MINUTES[number - 1]))}</td>`)}
      <td class="number">${figure(values.reduce((most, value) => (value !== null && (most === null || value > most) ? value : most), null))}</td></tr>`))}</${Table}></div>`
}
