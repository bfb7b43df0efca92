// The newest job of a takedown: its stages as they go on, what it came to, and what can be done about it.
import { html } from "../../../vendor/htm-preact.js"
import { send } from "../../api.js"
import { bytes, duration, percent, time } from "../../format.js"
import { Button, Note } from "../../parts.js"
import { guarded, KIND, outcome, remedy, since, STAGE, STAGES } from "./words.js"

export function Job({ job, takedown, act, ask }) {
  const at_work = job.state === "queued" || job.state === "running"
  const retry = () => act(() => send("POST", `/admin/v1/jobs/${job.id}/retry`))
  if (job.result?.guard_id) {
    const [kind, told] = since(job, takedown) ?? guarded(job.outcome)
    return html`<section class="card"><${Note} kind=${kind}>${told}</${Note}></section>`
  }
  return html`<section class="card" aria-labelledby="job"><h2 id="job">The job: ${KIND[job.kind] ?? job.kind}</h2>
    ${at_work ? html`<${Progress} job=${job} />` : html`<${Ended} job=${job} takedown=${takedown} />`}
    <${Stages} job=${job} />
    <div class="row">
      ${at_work && html`<button class="danger" disabled=${job.cancel_requested} onClick=${() => ask("cancel")}>${job.cancel_requested ? "Stopping" : "Stop the job"}</button>`}
      ${(job.state === "failed" || job.state === "cancelled") && html`<${Button} kind="main" onClick=${retry}>Try again</${Button}>`}
    </div></section>`
}

function Progress({ job }) {
  const plan = job.plan
  const planned = plan ? ` The plan was about ${duration(plan.seconds)} and ${bytes(plan.memory_bytes)} of memory.` : ""
  if (job.state === "queued") return html`<${Note}>It waits for a worker.${planned} Where it waits long, see whether one runs
    (<code>unbind worker</code>, or a server without <code>--no-worker</code>).</${Note}>`
  const left = job.eta_seconds === null ? "" : ` About ${duration(job.eta_seconds)} left, as past jobs went.`
  return html`<label class="progress"><span>${STAGE[job.stage] ?? "Starting"}: ${percent(job.progress)} of the job</span>
    <progress max="1" value=${job.progress} /></label>
    <p class="hint">${job.message ? `${job.message}. ` : ""}${duration(job.elapsed_seconds)} so far.${left}${planned}</p>`
}

function Ended({ job, takedown }) {
  const when = `${time(job.finished_at)}, after ${duration(job.elapsed_seconds)}`
  if (job.state === "failed") return html`<${Note} kind="bad"><p><strong>It failed:</strong> ${job.error}</p><p>${remedy(job.error)} Finished stages are not repeated.</p>
    <p>${meanwhile(takedown)}</p></${Note}>
    <p class="hint">${when}, attempt ${job.attempt}.</p>`
  if (job.state === "cancelled") return html`<${Note} kind="warn">It was cancelled. What was finished is kept: trying again goes on from there. ${meanwhile(takedown)}</${Note}>
    <p class="hint">${when}.</p>`
  const [given, word, meant] = outcome(job.outcome), [kind, told] = since(job, takedown) ?? [given, meant]
  const { remark, joint_verdict: joint, fit } = job.result
  return html`<${Note} kind=${remark && kind === "good" ? "warn" : kind}><p>${told || word}</p>${remark && html`<p>${remark}</p>`}${joint && html`<p>Beside the other modules: ${joint}</p>`}
    ${fit?.retain_rows_left_out > 0 && html`<p>${fit.retain_rows_left_out} retain rows hold parts of these rows and were left out; take them out of the retain set.</p>`}
    ${fit?.retain_rows_alike > 0 && html`<p>${fit.retain_rows_alike} retain rows are nearly protected and were learned as ordinary code; other code that is as much alike may be edited.</p>`}</${Note}>
    <p class="hint">Ended ${when}.</p>`
}

// Whether anything of the takedown holds while its job does not go on.
const meanwhile = ({ in_force, binds }) => in_force === "none" ? "Until then nothing of this takedown keeps the rows back."
  : `Meanwhile what was made before holds, and binds ${binds}.`

function Stages({ job }) {
  const running = job.state === "running"
  return html`<ol class="stages">${(STAGES[job.kind] ?? []).map(stage => {
    const took = job.timings[stage], now = running && job.stage === stage && took === undefined
    const lost = job.state === "failed" && job.stage === stage && took === undefined
    const told = took !== undefined ? `done in ${duration(took)}` : now ? "now" : lost ? "failed here" : running || job.state === "queued" ? "to come" : "not run"
    const kind = took !== undefined ? "good" : now ? "now" : lost ? "bad" : ""
    return html`<li key=${stage} class=${kind} aria-current=${now ? "step" : undefined}><span>${STAGE[stage]}</span> <span class="hint">${told}</span></li>`
  })}</ol>`
}
