// The audit trail: what was done, by whom, to what; whether it is whole; and all of it as JSON lines. #/audit/SUBJECT asks for one subject.
import { html, useEffect, useState } from "../../vendor/htm-preact.js"
import { get } from "../api.js"
import { counted, save, time } from "../format.js"
import { Button, Cell, Empty, Field, Note, Problem, Table, Title, useData } from "../parts.js"

const PAGE = 50, EXPORT = 1000
const ACTIONS = {
  "takedown.submit": "asked for a takedown", "takedown.purge": "erased the rows of a takedown", "key.create": "made a key", "key.revoke": "revoked a key",
  "rules.put": "wrote rules", "rules.delete": "deleted rules", "job.cancel": "asked a job to stop", "job.retry": "had a job tried again", "job.succeeded": "ended a job, done",
  "job.failed": "ended a job, failed", "job.cancelled": "ended a job, cancelled", "job.verify": "asked to measure again", "job.adopt": "asked to bring a module to this model",
  "job.activate": "asked to measure and activate", "module.add": "recorded a module", "guard.add": "recorded a guard", "audit.accept_head": "accepted a restored end of the trail",
  "store.sweep": "deleted a file that nothing needed",
}
const CHANGES = { activate: "activated", shadow: "put into shadow", suspend: "suspended", retire: "retired", superseded: "superseded", due: "began to activate" }
const KINDS = { "": "All", takedown: "Takedowns", job: "Jobs", module: "Modules", guard: "Guards", key: "Keys", rules: "Rules", store: "Store", audit: "The trail itself" }
const NOTHING = { action: "", actor: "", subject: "" }

function inWords(action) {
  const [kind, what] = action.split(".")
  return ACTIONS[action] ?? (CHANGES[what] ? `${CHANGES[what]} a ${kind}` : action)
}

function linked(subject) {
  const page = { td: "takedowns", mod: "modules", grd: "modules" }[subject.split("_")[0]]
  return page ? html`<a href=${`#/${page}/${subject}`}>${subject}</a>` : subject
}

const query = wanted => Object.entries(wanted).filter(([, text]) => text.trim()).map(([name, text]) => `&${name}=${encodeURIComponent(text.trim())}`).join("")

export function Audit({ path }) {
  const [wanted, want] = useState({ ...NOTHING, subject: path[0] ?? "" }), [form, set] = useState(wanted), [pages, turn] = useState([0])
  const after = pages.at(-1)
  const { data, error } = useData(() => get(`/admin/v1/audit?order=newest&limit=${PAGE}&after=${after}${query(wanted)}`).then(answer => ({ ...answer, after })), after ? 0 : 5, [after, wanted])
  const { data: keys } = useData(() => get("/admin/v1/keys"))
  const who = Object.fromEntries((keys?.data ?? []).map(key => [key.id, key.name]))
  const ask = values => { want(values); set(values); turn([0]) }
  useEffect(() => { if ((path[0] ?? "") !== wanted.subject) ask({ ...NOTHING, subject: path[0] ?? "" }) }, [path[0]]) // the menu leads to all
  const change = name => event => set({ ...form, [name]: event.target.value })
  const filtered = query(wanted) !== ""
  return html`<${Title} title="Audit" lead="Everything that was changed here, in order. Each entry holds the digest of the one before it." />
    <${Whole} />
    <form class="card filters" onSubmit=${event => { event.preventDefault(); ask(form) }}>
      <${Field} label="What" id="action"><select id="action" value=${form.action} onChange=${event => ask({ ...form, action: event.target.value })}>
        ${Object.entries(KINDS).map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></${Field}>
      <${Field} label="By whom" id="actor"><input id="actor" list="actors" placeholder="admin, or a key's id" value=${form.actor} onInput=${change("actor")} />
        <datalist id="actors"><option value="admin" />${Object.entries(who).map(([id, name]) => html`<option key=${id} value=${id}>${name}</option>`)}</datalist></${Field}>
      <${Field} label="To what" id="subject"><input id="subject" placeholder="an id, or a scope" value=${form.subject} onInput=${change("subject")} /></${Field}>
      <div class="row"><button class="main">Show</button>${filtered && html`<button type="button" onClick=${() => ask(NOTHING)}>Show all</button>`}
        <${Export} wanted=${wanted} /></div>
    </form>
    <${Problem} error=${error} />
    ${data?.data.length === 0 && html`<${Empty} title=${filtered ? "No entry is like that" : "Nothing was changed yet"}>${filtered ? "Ask for less, or show all." : "What is done on these pages, by the API or on the command line stands here."}</${Empty}>`}
    ${data?.data.length > 0 && html`<${Table} stacked label="Audit trail, the newest first" columns=${["Entry", "Time", "Who", "Did", "To", "Said"]}>${data.data.map(row => line(row, who))}</${Table}>
      <div class="row"><${Button} disabled=${pages.length === 1} onClick=${() => turn(pages.slice(0, -1))}>Newer</${Button}>
        <${Button} disabled=${!data.has_more || data.after !== after} onClick=${() => turn([...pages, data.data.at(-1).id])}>Older</${Button}>
        <span class="hint">Entries ${data.data.at(-1).id} to ${data.data[0].id}</span></div>`}`
}

function line(row, who) {
  const detail = Object.entries(row.detail).filter(([, value]) => value !== null)
  return html`<tr key=${row.id} role="row"><th scope="row" role="rowheader">${row.id}</th><${Cell} of="Time" class="nowrap">${time(row.at)}</${Cell}>
    <${Cell} of="Who">${who[row.actor] ?? row.actor}<div class="hint">${row.source}</div></${Cell}><${Cell} of="Did">${inWords(row.action)}<div class="hint mono">${row.action}</div></${Cell}>
    <${Cell} of="To" class="mono">${linked(row.subject)}</${Cell}>
    <${Cell} of="Said">${detail.length > 0 && html`<details><summary>${counted(detail.length, "field")}</summary><pre class="wrap">${JSON.stringify(Object.fromEntries(detail), null, 1)}</pre></details>`}</${Cell}></tr>`
}

// Whether the chain holds. The whole trail is read for it, so it is asked once, and again by the button.
function Whole() {
  const { data, error, again } = useData(() => get("/admin/v1/audit/verify").then(answer => ({ ...answer, at: Date.now() / 1000 })))
  const button = html`<${Button} onClick=${again}>Check again</${Button}>`
  if (!data) return html`<${Problem} error=${error} />${!error && html`<p class="hint">Checking the chain.</p>`}`
  if (data.whole) return html`<div class="note good row"><span>The trail is whole: no entry was changed, deleted, inserted or moved, as of ${time(data.at)}.</span>${button}</div>`
  return html`<div role="alert"><${Note} kind="bad"><p><strong>The trail is not whole.</strong></p><ul>${data.problems.map(text => html`<li key=${text}>${text}</li>`)}</ul>
    <p>Somebody wrote to the database past this service, or an older copy was restored. Where it was a copy, accept its end with <code>unbind audit accept-head --reason ...</code>.
      Else keep the database and the file <code>audit.head</code> as they are for whoever looks into it, and restore a copy that is whole.</p>${button}</${Note}></div>`
}

function Export({ wanted }) {
  const [told, tell] = useState(""), [problem, setProblem] = useState(null)
  async function all() {
    const lines = []
    setProblem(null)
    try {
      for (let after = 0, more = true; more;) {
        const { data, has_more } = await get(`/admin/v1/audit?limit=${EXPORT}&after=${after}${query(wanted)}`)
        lines.push(...data.map(row => JSON.stringify(row) + "\n"))
        after = data.at(-1)?.id ?? 0
        more = has_more
        tell(`${counted(lines.length, "entry", "entries")} so far`)
      }
      save("audit.jsonl", lines, "application/jsonl")
      tell(`${counted(lines.length, "entry", "entries")} saved`)
    } catch (error) { setProblem(error) }
  }
  return html`<${Button} onClick=${all}>Export as JSON lines</${Button}><span class="hint" role="status">${told}</span><${Problem} error=${problem} />`
}
