// What an operator does to a module or guard, and what the API answered to it, the joint answer of a job included.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js"
import { call, get, passing } from "./api.js"
import { percent } from "./format.js"
import { Ask, Button, Field, Note, Problem } from "./parts.js"
import { announce } from "./session.js"
import { enforceIn } from "./standing.js"

const NAMES = { activate: "Activate", shadow: "Shadow", suspend: "Suspend", retire: "Retire", rollback: "Roll back" }
const ORDER = ["activate", "shadow", "suspend", "rollback", "retire"]
// What is asked back before: whatever takes protection away, or cannot be taken back.
const ASKED = {
  suspend: "It is taken out of use at once, for every request, until it is activated again. Where something demands it, requests get 503 meanwhile.",
  retire: "It is taken out of use for good. A retired version cannot be activated again.",
  rollback: "The version before it takes its place at once, without a measurement.",
}

// The buttons of one version; `done(answer)` is given what the API said. `former`: the version that a rollback leads to. `all`: also the
// one that cannot be taken back.
export function Actions({ module, former, done, all }) {
  const [asking, ask] = useState(null)
  const possible = ORDER.filter(action => action === "rollback" ? module.state === "active" && former
    : module.allowed.includes(action) && (all || action !== "retire"))

  async function act(action) {
    ask(null)
    try {
      const path = `/admin/v1/modules/${encodeURIComponent(module.id)}/${action}`
      const { status, body } = await call(path, { method: "POST", headers: { "If-Match": module.etag } })
      announce(`${NAMES[action]}: done`)
      done({ action, module, status, body })
    } catch (error) { done({ action, module, error }) }
  }

  return html`<div class="row">${possible.map(action => html`<${Button} key=${action} kind=${action === "retire" ? "danger" : ""}
      aria-label=${`${NAMES[action]} ${module.name}, version ${module.version}`}
      onClick=${() => ASKED[action] ? ask(action) : act(action)}>${NAMES[action]}</${Button}>`)}
    ${asking && html`<${Ask} title=${`${NAMES[asking]} ${module.name}, version ${module.version}?`} yes=${NAMES[asking]}
      onYes=${() => act(asking)} onNo=${() => ask(null)}>${ASKED[asking]}</${Ask}>`}</div>`
}

// What came of the newest action: brought into view, as the list below it may be long.
export function Outcome({ outcome, done, again }) {
  const place = useRef(null)
  useEffect(() => { if (outcome) place.current.scrollIntoView({ block: "nearest" }) }, [outcome])
  return html`<div class="outcome" ref=${place}>${outcome && html`<${Told} outcome=${outcome} done=${done} again=${again} />`}</div>`
}

function Told({ outcome, done, again }) {
  const { action, module, error, status, body } = outcome
  if (error) return html`<${Problem} error=${error} />`
  if (body.withheld) return html`<${Note} kind="warn">${module.name}: ${body.withheld}</${Note}>`
  // A record names the job that made it: what was answered with 202 names the one that was begun.
  if (status === 202) return html`<${JobNote} id=${body.job_id} module=${module} done=${done} again=${again} key=${body.job_id} />`
  if (action === "enforce") return html`<${Note} kind="good">${module.name} is enforced by the policy '${body.scope}'.${
    body.missing.length ? ` Not active, so that requests under it get 503: ${body.missing.join(", ")}.` : ""}</${Note}>`
  return html`<${Note} kind=${body.state === "active" ? "good" : body.warnings ? "warn" : ""}>${body.name}, version ${body.version}, is ${body.state}.
    It binds ${body.binds}.${body.warnings?.map(warning => html` <strong>And ${warning}.</strong>`)}</${Note}>`
}

// A job that measures what a module costs beside those in force, followed to its end.
function JobNote({ id, module, done, again }) {
  const [job, set] = useState(null), [error, fail] = useState(null)
  useEffect(() => {
    let timer = 0, ended = false
    const look = async () => {
      try {
        const now = await get(`/admin/v1/jobs/${id}`)
        if (ended) return
        set(now)
        if (["succeeded", "failed", "cancelled"].includes(now.state)) {
          announce(`The measurement has ${now.state}.`)
          return again()
        }
      } catch (problem) {
        if (!passing(problem)) return fail(problem)
      }
      timer = setTimeout(look, 1000)
    }
    look()
    return () => { ended = true; clearTimeout(timer) }
  }, [id])

  async function override() {
    try {
      const { status, body } = await call(`/admin/v1/modules/${module.id}/activate?override=true`, { method: "POST", headers: { "If-Match": "*" } })
      done({ action: "activate", module, status, body })
    } catch (problem) { done({ action: "activate", module, error: problem }) }
  }

  if (error || !job) return html`<${Problem} error=${error} />`
  const joint = job.result?.joint?.measured ? job.result.joint : null, over = job.outcome !== "active", running = job.state === "queued" || job.state === "running"
  return html`<${Note} kind=${running ? "" : over ? "warn" : "good"}>
    <p>${module.name}: other modules are in force, so what all of them cost together is measured first (job ${id}: ${job.state}${
      job.state === "running" ? `, ${job.stage} ${percent(job.progress)}` : job.state === "queued" ? ", waiting for a worker" : ""}).</p>
    ${job.error && html`<p>${job.error}</p>`}
    ${joint && html`<p>Together: ${figures(joint)}. ${job.result.joint_verdict ?? "Within the budgets: it is active."}</p>`}
    ${!running && over && html`<${Button} kind="danger" onClick=${override}>Activate all the same</${Button}>`}
  </${Note}>`
}

const figures = ({ kl, nll_increase, budgets }) =>
  `KL ${kl.toPrecision(2)} of at most ${budgets.kl}, NLL ${nll_increase.toPrecision(2)} more of at most ${budgets.nll}`

// The offer to bind requests to a module that is active and binds none by itself.
export function Enforce({ module, profiles, keys, done }) {
  const [asking, ask] = useState(false), [scope, set] = useState("global")
  async function enforce() {
    ask(false)
    try {
      const body = await enforceIn(scope, module.name)
      announce(`${module.name} is enforced`)
      done({ action: "enforce", module, body })
    } catch (error) { done({ action: "enforce", module, error }) }
  }
  return html`<${Button} aria-label=${`Enforce ${module.name}`} onClick=${() => ask(true)}>Enforce</${Button}>
    ${asking && html`<${Ask} title=${`Enforce ${module.name}`} yes="Enforce" onYes=${enforce} onNo=${() => ask(false)}>
      <p>The name goes into the rules of a scope. From then on requests in it cannot leave it out.</p>
      <${Field} label="For which requests" id="scope"><select id="scope" value=${scope} onChange=${event => set(event.target.value)}>
        <option value="global">every request</option>
        ${profiles.map(profile => html`<option key=${profile} value=${"profile:" + profile}>those under the profile '${profile}'</option>`)}
        ${keys.map(key => html`<option key=${key.id} value=${"key:" + key.id}>those with the key '${key.name}'</option>`)}</select></${Field}>
    </${Ask}>`}`
}
