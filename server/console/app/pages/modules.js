// Modules and guards: what state each is in, whom it binds, what its gate does, and the changes an operator makes.
import { html, useState } from "../../vendor/htm-preact.js"
import { Actions, Enforce, Outcome } from "../actions.js"
import { counted, percent, short, time } from "../format.js"
import { Badge, Cell, Empty, Note, Problem, Table, Title, useData } from "../parts.js"
import { bound, expected, standings } from "../standing.js"

const KINDS = { active: "good", shadow: "warn", suspended: "bad", calibrated: "" }
const COLUMNS = ["Name", "State", "Which requests it binds", "What it does", "Gate: expected", "Gate: live", "Change"]

export function Modules({ path }) {
  const { data, error, again } = useData(standings, 5)
  const [outcome, set] = useState(null)
  const done = answer => { set(answer); return again() }
  const heads = data ? current(data.modules) : []
  const chosen = data?.modules.find(module => module.id === path[0])
  return html`<${Title} title="Modules" lead="Every module and guard in its newest version, and which requests it binds." />
    <${Problem} error=${error} />
    <${Outcome} outcome=${outcome} done=${done} again=${again} />
    ${data?.problems.map(({ file, reason }) => html`<${Note} kind="bad" key=${file}>${file} could not be loaded: ${reason}</${Note}>`)}
    ${!data ? !error && html`<p class="hint">Asking the server.</p>` : !heads.length ? html`<${Empty} title="There is no module yet">
      Post a takedown: its guard holds at once, and its module appears here when it is calibrated. Or put a finished module file
      into the server's modules folder.</${Empty}>` : html`<${Table} label="Modules and guards" columns=${COLUMNS} stacked>
      ${heads.map(module => html`<${Row} key=${module.id} module=${module} data=${data} done=${done} />`)}</${Table}>
      <p class="hint">Expected: as calibration measured it on code that is to be kept. Live: positions of requests to this server process since
        it started. A gate that opens far more often than expected blocks what it should not; one that is never asked protects nothing.</p>`}
    ${path[0] && data && (chosen ? html`<${Details} module=${chosen} data=${data} done=${done} />`
      : html`<${Empty} title="There is no such version"><a href="#/modules">All modules</a></${Empty}>`)}`
}

// Of every name and kind the version that is loaded here, else one that is live, for another model, else the newest.
function current(modules) {
  const found = new Map()
  for (const module of modules) {
    const key = module.kind + ":" + module.name, before = found.get(key)
    if (!before || standing(module) >= standing(before)) found.set(key, module)
  }
  return [...found.values()]
}

const standing = module => module.loaded ? 2 : ["active", "shadow"].includes(module.state) ? 1 : 0

// The version that a rollback leads to.
const former = (module, modules) => modules.filter(other => other.name === module.name && other.kind === module.kind &&
  other.fingerprint === module.fingerprint && other.version < module.version && other.state === "superseded").at(-1)

function Row({ module, data, done }) {
  const binding = bound(module, data.enforcers)
  return html`<tr role="row"><th scope="row" role="rowheader"><a href=${"#/modules/" + module.id}>${module.name}</a>
      <div class="hint">${module.kind}, version ${module.version}</div><div class="hint mono">${short(module.digest)}</div></th>
    <${Cell} of="State"><${State} module=${module} /></${Cell}>
    <${Cell} of="Binds" class="words"><span class=${binding.kind}>${binding.text}</span>
      ${binding.unbound && html`<p class="warn">Being active, it still protects nobody who does not ask for it.</p>
        <${Enforce} module=${module} profiles=${data.profiles} keys=${data.keys} done=${done} />`}</${Cell}>
    <${Cell} of="Does">${does(module)}</${Cell}>
    <${Cell} of="Expected"><${Expected} module=${module} /></${Cell}>
    <${Cell} of="Live"><${Live} module=${module} counts=${data.counts.get(module.name)} /></${Cell}>
    <${Cell} of="Change"><${Actions} module=${module} former=${former(module, data.modules)} done=${done} /></${Cell}></tr>`
}

const State = ({ module }) => html`<${Badge} kind=${KINDS[module.state] ?? ""}>${module.state}</${Badge}>
  ${["active", "shadow"].includes(module.state) && !module.loaded && html`<div class="bad">not loaded here</div>`}
  ${module.effective_at && html`<div class="hint">due ${time(module.effective_at)}</div>`}
  ${module.expires_at && html`<div class="hint">until ${time(module.expires_at)}</div>`}`

function does(module) {
  if (module.kind === "guard") return `${ACTIONS[module.action] ?? module.action} at runs of ${module.run} ${module.secrets ? "letters and digits" : "lexemes"}; ${counted(module.rows, "row")}`
  if (!module.policy) return "told once it is loaded"
  const policy = { silent: "ends the answer", rewrite: "goes another way" }[module.policy] ?? module.policy
  return `layer ${module.layer}, ${module.policy}: ${policy}`
}

const ACTIONS = { steer: "steers away", stop: "ends the answer", report: "counts only" }

function Expected({ module }) {
  if (module.kind === "guard") return "exact"
  const { retain, bound: most, forget, opens } = expected(module)
  if (retain === null) return module.measured ? "not measured" : "told once it is loaded"
  return html`<span>open at ${percent(retain)}</span>${most !== null && html`<div class="hint">at most ${percent(most)}, 95 % sure</div>`}
    ${forget !== null && html`<div class="hint">protected rows: open at ${percent(forget)}</div>`}
    ${opens?.median !== null && opens?.median !== undefined && html`<div class="hint">protected rows: from token ${opens.median} (median)</div>`}`
}

function Live({ module, counts }) {
  if (module.kind === "guard") return "-"
  if (!module.loaded) return html`<span class="hint">not loaded</span>`
  if (!counts?.evaluated) return html`<span class="hint">not asked yet</span>`
  return html`<span>open at ${percent(counts.open / counts.evaluated)}</span>
    <div class="hint">${counts.open.toLocaleString("en")} of ${counted(counts.evaluated, "position")}</div>`
}

const FACTS = ["id", "digest", "origin", "takedown_id", "job_id", "scope", "detector", "correction", "rank", "tau", "kappa", "forms", "forget_digest",
  "action", "run", "secrets", "rows", "too_short", "bars", "file"]

function Details({ module, data, done }) {
  const versions = data.modules.filter(other => other.name === module.name && other.kind === module.kind).reverse()
  return html`<section class="card" aria-labelledby="details"><div class="title"><h2 id="details">${module.name}, version ${module.version}</h2>
      <a href="#/modules">Close</a></div>
    <dl class="facts">${FACTS.filter(name => module[name] !== undefined && module[name] !== null).map(name => html`<dt key=${name}>${name}</dt>
      <dd class="mono">${Array.isArray(module[name]) ? module[name].join(", ") : String(module[name])}</dd>`)}
      <dt>made</dt><dd>${time(module.created_at)}</dd><dt>changed</dt><dd>${time(module.changed_at)}</dd></dl>
    <h3>Versions</h3>
    <${Table} stacked label="Versions" columns=${["Version", "State", "Digest", "Changed", "Change"]}>${versions.map(other => html`<tr key=${other.id} role="row">
      <th scope="row" role="rowheader"><a href=${"#/modules/" + other.id}>${other.version}</a></th><${Cell} of="State"><${State} module=${other} /></${Cell}>
      <${Cell} of="Digest" class="mono">${short(other.digest)}</${Cell}><${Cell} of="Changed" class="nowrap">${time(other.changed_at)}</${Cell}>
      <${Cell} of="Change"><${Actions} module=${other} former=${former(other, data.modules)} done=${done} all /></${Cell}></tr>`)}</${Table}></section>`
}
