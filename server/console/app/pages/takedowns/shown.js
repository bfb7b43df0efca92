// One takedown: its job while it runs, what was made and binds, the report, the evidence, and how it ends.
import { html, useRef, useState } from "../../../vendor/htm-preact.js"
import { get, send } from "../../api.js"
import { counted, save, short, time } from "../../format.js"
import { Ask, Badge, Button, Cell, Empty, Note, Problem, Table, Title, useData } from "../../parts.js"
import { announce } from "../../session.js"
import { Job } from "./job.js"
import { Report } from "./report.js"
import { NOTICE, SCOPES, standing, WARNINGS } from "./words.js"

const SHOWN_JOBS = 5, SHOWN_JOINS = 20
const OPTIONS = { protect: "What is made", policy: "In place of the rows", activation: "Activation", scope: "Whom it binds", gate: "Gate", replace: "Replaces" }

async function look(id) {
  const takedown = await get("/admin/v1/takedowns/" + encodeURIComponent(id))
  const jobs = await Promise.all(takedown.jobs.slice(-SHOWN_JOBS).map(job => get("/admin/v1/jobs/" + job)))
  const of = ids => Promise.all((ids ?? []).slice(-SHOWN_JOINS).map(other => get("/admin/v1/takedowns/" + other)))
  return { takedown, jobs, job: jobs.at(-1), joining: await of(takedown.joined_by), joined: await of(takedown.options.joins) }
}

export function Shown({ id }) {
  const [ended, setEnded] = useState(false), ran = useRef(false), [problem, setProblem] = useState(null), [asking, setAsking] = useState(null)
  const { data, error, again } = useData(() => look(id).then(tell), ended ? 5 : 1, [id])

  function tell(seen) {
    const runs = ["queued", "running"].includes(seen.job.state)
    if (ran.current && !runs) announce(`The job ${seen.job.state}.`)
    ran.current = runs
    setEnded(!runs)
    return seen
  }

  async function act(work) {
    setProblem(null)
    try { await work() } catch (error) { setProblem(error) }
    setAsking(null)
    await again()
  }

  if (!data) return html`<${Title} title="Takedown" /><${Problem} error=${error} />
    ${error?.status === 404 && html`<${Empty} title="There is no such takedown">Choose one of <a href="#/takedowns">the list</a>.</${Empty}>`}`
  const { takedown, job, jobs, joining, joined } = data
  const state = standing({ job, in_force: takedown.in_force })
  const made = [...takedown.modules, ...(takedown.guard ? [takedown.guard] : [])]
  // What another stands in for would be active again without it, and is withdrawn, too.
  const live = made.filter(record => record.allowed.includes("retire") && (record.state !== "superseded" || joining.length))
  return html`<${Title} title=${takedown.name} lead=${html`Binds ${takedown.binds}.`}><${Badge} kind=${state.kind}>${state.word}</${Badge}>
      <a href="#/takedowns">All takedowns</a></${Title}>
    <${Problem} error=${problem ?? error} />
    ${WARNINGS.get(id)?.map(text => html`<${Note} kind="warn" key=${text}>${text}</${Note}>`)}
    <${Job} job=${job} takedown=${takedown} act=${act} ask=${setAsking} />
    <${Report} job=${jobs.findLast(one => one.result?.verify) ?? job} />
    <section class="card"><h2>What was made</h2>${made.length ? html`<${Made} made=${made} />`
      : html`<p class="hint">Nothing yet. A module appears here once its job is done.</p>`}
      <${Others} takedowns=${joining} count=${takedown.joined_by.length} lead="Its rows are also in what joins it">Where such a module is
        active, it stands in for the one above.</${Others}>
      <${Others} takedowns=${joined} count=${takedown.options.joins?.length} lead="It joins">Once its module is active, it stands in for
        theirs.</${Others}></section>
    <div class="two">
      <${Asked} takedown=${takedown} jobs=${jobs} />
      <section class="card"><h2>Evidence</h2>
        <p>What was done, by whom and what it binds as of now, signed with this server's key. <code>unbind evidence verify</code> checks the document
          without this server.</p>
        <div class="row"><${Button} onClick=${() => act(() => evidence(id, "json"))}>Signed document</${Button}>
          <${Button} onClick=${() => act(() => evidence(id, "html"))}>Page for people</${Button}></div>
        <h2 class="later">End it</h2>
        <p>${takedown.purged_at ? `The rows were erased on ${time(takedown.purged_at)}. Their digest stays.${
            takedown.rows_kept_by.length ? ` But they are kept for ${takedown.rows_kept_by.join(", ")}, which has them too: erase those as well.` : ""}`
          : "Erasing deletes the rows and samples kept here; module, guard and records stay. Withdrawing retires module and guard for good."}</p>
        <div class="row">
          ${live.length > 0 && html`<button class="danger" onClick=${() => setAsking("withdraw")}>Withdraw</button>`}
          ${!takedown.purged_at && html`<button class="danger" onClick=${() => setAsking("erase")}>Erase rows</button>`}</div>
      </section>
    </div>
    ${asking === "cancel" && html`<${Ask} title="Stop the job?" yes="Stop the job" onNo=${() => setAsking(null)}
      onYes=${() => act(() => send("POST", `/admin/v1/jobs/${job.id}/cancel`))}>The module is not made. The guard, where there is one, goes on holding.
      The job can be tried again; finished stages are kept.</${Ask}>`}
    ${asking === "withdraw" && html`<${Ask} title=${`Withdraw ${takedown.name}?`} yes="Withdraw" onNo=${() => setAsking(null)}
      onYes=${() => act(() => withdraw(live))}>${counted(live.length, "record")} will be retired, which is for good: nothing of it binds any request then.
      ${joining.length > 0 && html`<strong>But its rows stay in the module of ${joining.at(-1).name} until that is made anew without them.</strong> `}
      ${joined.length > 0 && html`<strong>What it joins stays superseded: to have that hold, activate it first.</strong> `}
      To put it out of use for a while, suspend it on the page Modules.</${Ask}>`}
    ${asking === "erase" && html`<${Ask} title=${`Erase the rows of ${takedown.name}?`} yes="Erase" onNo=${() => setAsking(null)}
      onYes=${() => act(() => send("POST", `/admin/v1/takedowns/${takedown.id}/purge`))}>They cannot be had back. The module can no longer be measured
      again, and the evidence has no samples.</${Ask}>`}`
}

async function evidence(id, form) {
  const text = await get(`/admin/v1/takedowns/${id}/evidence?format=${form}`, { raw: true }) // numbers written anew would break the signature
  save(`${id}.evidence.${form}`, [text], form === "json" ? "application/json" : "text/html")
  announce("The evidence was downloaded.")
}

async function withdraw(records) {
  for (const record of records) await send("POST", `/admin/v1/modules/${record.id}/retire`, undefined, { "If-Match": record.etag })
}

const Made = ({ made }) => html`<${Table} stacked label="Module and guard" columns=${["", "Version", "State", "Binds", "File"]}>
  ${made.map(record => html`<tr key=${record.id} role="row"><th scope="row" role="rowheader"><a href=${"#/modules/" + record.id}>${record.kind}</a></th>
    <${Cell} of="Version">${record.version}</${Cell}><${Cell} of="State"><${Badge} kind=${record.state === "active" ? "good" : ""}>${record.state}</${Badge}></${Cell}>
    <${Cell} of="Binds" class="words">${record.binds}</${Cell}><${Cell} of="File" class="mono">${short(record.digest)}</${Cell}></tr>`)}</${Table}>`

const Others = ({ takedowns, count, lead, children }) => takedowns.length > 0 && html`<p>${lead}: ${takedowns.map((one, place) =>
  html`${place ? ", " : ""}<a key=${one.id} href=${"#/takedowns/" + one.id}>${one.name}</a> (${one.in_force === "none" ? "not in force" : one.in_force})`)}${
  count > takedowns.length ? ` and ${count - takedowns.length} more` : ""}. ${children}</p>`

function Asked({ takedown, jobs }) {
  const said = Object.entries(OPTIONS).filter(([name]) => name in takedown.options)
  return html`<section class="card"><h2>What was asked</h2><dl class="facts">
    <dt>Received</dt><dd>${time(takedown.created_at)}</dd>
    <dt>Rows</dt><dd>${takedown.row_count.toLocaleString("en")}</dd>
    ${Object.entries(takedown.notice).map(([name, text]) => html`<dt key=${name}>${NOTICE[name] ?? name}</dt><dd>${text}</dd>`)}
    ${said.map(([name, label]) => html`<dt key=${name}>${label}</dt><dd>${SCOPES[takedown.options[name]] ?? String(takedown.options[name])}</dd>`)}
    <dt>Id</dt><dd class="mono">${takedown.id}</dd>
    <dt>SHA-256 of the rows</dt><dd class="mono">${short(takedown.forget_digest)}</dd>
    <dt>Jobs</dt><dd>${jobs.map(job => html`<div key=${job.id}><span class="mono">${job.id}</span> ${job.kind}, ${job.state}</div>`)}</dd>
    </dl><p><a href=${"#/audit/" + takedown.id}>What the audit trail says of it</a></p></section>`
}
