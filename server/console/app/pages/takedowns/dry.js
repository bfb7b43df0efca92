// What a dry run answers: what was read, what it will bind, and what the fit will take.
import { html } from "../../../vendor/htm-preact.js"
import { bytes, counted, duration } from "../../format.js"
import { Note, Table } from "../../parts.js"

export function DryRun({ plan }) {
  const { guard, plan: fit } = plan
  return html`<section class="card" aria-labelledby="plan"><h2 id="plan">What it will take</h2>
    ${plan.warnings.map(text => html`<${Note} kind="warn" key=${text}>${text}</${Note}>`)}
    <dl class="facts">
      <dt>Read</dt><dd>${counted(plan.rows, "row")}${dropped(plan)}</dd>
      <dt>Binds</dt><dd>${plan.binds}</dd>
      <dt>Guard</dt><dd>${guard ? `holds ${counted(guard.rows, "row")} from the moment of submitting${short(guard)}` : "none"}</dd>
      <dt>Module</dt><dd>${plan.positions === null ? "none" : `${counted(plan.positions, "token")} to forget${takes(plan)}`}</dd>
      ${fit && html`<dt>Memory</dt><dd>${bytes(fit.memory_bytes)} at most on ${fit.device}, where ${bytes(fit.free_memory_bytes)} are free</dd>
        <dt>Disk</dt><dd>${bytes(fit.disk_bytes)} at most, where ${bytes(fit.free_disk_bytes)} are free</dd>`}
    </dl>
    ${fit && html`<p class=${fit.fits ? "good" : "bad"}>${fit.fits ? "There is room for it." : `There is no room: ${fit.problem}`}</p>
      <details><summary>By stage</summary><${Table} label="Plan by stage" columns=${["Stage", "Time", "Memory", "Disk"]}>
        ${fit.stages.map(stage => html`<tr key=${stage.name}><th scope="row">${stage.name}</th><td class="number">${duration(stage.seconds)}</td>
          <td class="number">${bytes(stage.memory)}</td><td class="number">${bytes(stage.disk)}</td></tr>`)}</${Table}></details>`}
    <p class="hint">Nothing was kept of this run. Submit does it.</p>
  </section>`
}

export function dropped({ duplicates_dropped, files_skipped }) {
  const twice = duplicates_dropped ? `; ${counted(duplicates_dropped, "duplicate")} dropped` : ""
  return twice + (files_skipped ? `; ${counted(files_skipped, "file")} skipped that ${files_skipped === 1 ? "is" : "are"} not UTF-8 text` : "")
}

const short = guard => guard.too_short ? `; ${counted(guard.too_short, "row")} too short for a run of ${guard.run}` : ""

function takes({ plan, total_seconds }) {
  const past = total_seconds ? `; past takedowns of that size took ${duration(total_seconds)}` : ""
  return (plan ? `, about ${duration(plan.seconds)}` : "") + past
}
