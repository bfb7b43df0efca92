// Keys and policies: who may ask, and what applies to whom. #/keys/new makes a key, #/keys/rules/SCOPE changes the rules of a scope.
import { html, useState } from "../../vendor/htm-preact.js"
import { call, get, send } from "../api.js"
import { time } from "../format.js"
import { Ask, Badge, Cell, Empty, Problem, Table, Title, useData, useFocus } from "../parts.js"
import { announce, useSession } from "../session.js"
import { allModules } from "../standing.js"
import { NewKey } from "./keys/new.js"
import { NewProfile, RulesForm } from "./keys/rules.js"
import { inWords, limits } from "./keys/words.js"

const SECONDS = 3

// All that says what applies to whom.
export async function everything() {
  const [policy, profiles, { body: keys, headers }, [modules]] = await Promise.all([
    get("/admin/v1/policies/global"), get("/admin/v1/profiles"), call("/admin/v1/keys"), allModules("loaded")])
  const now = Date.parse(headers.get("date") ?? new Date()) / 1000 // keys end by the server's clock, whatever this computer's says
  const enforced = {}
  for (const { name, kind, scope, in_force } of modules)
    if (in_force === "enforced") (enforced[scope] ??= []).push(kind === "guard" ? `${name} (guard)` : name)
  return { now, policy, profiles: profiles.data, keys: keys.data, names: [...new Set(modules.map(module => module.name))], enforced }
}

export function Keys({ path }) {
  const [what, name] = path
  const { data, error, again } = useData(everything, SECONDS)
  useFocus(what)
  if (!data) return html`<${Title} title="Keys and policies" /><${Problem} error=${error} />`
  if (what === "new") return html`<${NewKey} known=${data} again=${again} />`
  if (what === "profile") return html`<${NewProfile} />`
  if (what === "rules" && name) return html`<${RulesForm} scope=${name} known=${data} again=${again} key=${name} />`
  return html`<${Title} title="Keys and policies" lead="Who may ask this server, and which modules apply to what they ask.">
      <a class="button main" href="#/keys/new">New key</a><a class="button" href="#/keys/profile">New profile</a></${Title}>
    <${Problem} error=${error} />
    <${KeyTable} keys=${data.keys} now=${data.now} again=${again} />
    <h2>What applies to whom</h2>
    <p class="hint">Everything that is said here applies together: of the server, of the key, and of the profile that a request asks under. Where two give a strength the larger holds, and
      no request can switch off what is enforced.</p>
    <${Rules} known=${data} again=${again} />`
}

function stateOf(key, now) {
  if (key.revoked_at) return ["", `revoked ${time(key.revoked_at)}`]
  if (key.expires_at && key.expires_at < now) return ["warn", `expired ${time(key.expires_at)}`]
  return ["good", "usable"]
}

function KeyTable({ keys, now, again }) {
  const [asked, ask] = useState(null), [problem, setProblem] = useState(null)
  const { state } = useSession()
  async function revoke() {
    setProblem(null)
    try {
      const { warnings } = await send("DELETE", "/admin/v1/keys/" + asked.id)
      announce([`The key ${asked.name} is revoked.`, ...warnings].join(" "))
    } catch (error) { setProblem(error) }
    ask(null)
    await again()
  }
  if (!keys.length) return html`<${Empty} title="There is no key yet">Until there is one this server asks for none, and only the admin key changes anything.
    Choose <a href="#/keys/new">New key</a>; from then on every request needs one.</${Empty}>`
  return html`<${Problem} error=${problem} /><${Table} stacked label="Keys" columns=${["Name", "State", "May", "Profile", "Limits", "Expires", ""]}>
    ${keys.toReversed().map(key => { const [kind, word] = stateOf(key, now); return html`<tr key=${key.id} role="row"><th scope="row" role="rowheader">${key.name}<div class="hint mono">${key.id}</div></th>
      <${Cell} of="State"><${Badge} kind=${kind}>${word}</${Badge}></${Cell}><${Cell} of="May">${key.scopes.join(", ")}</${Cell}><${Cell} of="Profile">${key.profile ?? "-"}</${Cell}>
      <${Cell} of="Limits">${limits(key)}</${Cell}><${Cell} of="Expires" class="nowrap">${key.expires_at ? time(key.expires_at) : "never"}</${Cell}>
      <${Cell} of="">${!key.revoked_at && html`<button class="danger" aria-label=${"Revoke " + key.name} onClick=${() => ask(key)}>Revoke</button>`}</${Cell}></tr>` })}</${Table}>
    ${asked && html`<${Ask} title=${`Revoke the key ${asked.name}?`} yes="Revoke" onYes=${revoke} onNo=${() => ask(null)}>Whoever uses it is refused from the next request on,
      for good.${asked.name === state?.caller.name && " You may be signed in with it: then this console asks for another key."}</${Ask}>`}`
}

function Rules({ known, again }) {
  const { policy, profiles, keys, now } = known
  const [asked, ask] = useState(null), [problem, setProblem] = useState(null)
  async function forget() {
    try { await send("DELETE", "/admin/v1/profiles/" + asked) } catch (error) { setProblem(error) }
    ask(null)
    await again()
  }
  const line = (scope, title, said, rest) => html`<tr key=${scope} role="row"><th scope="row" role="rowheader">${title}</th>
    <${Cell} of=""><ul class="sentences">${inWords(scope, said, known).map(text => html`<li key=${text}>${text}</li>`)}</ul></${Cell}><${Cell} of="" class="nowrap">${rest}</${Cell}></tr>`
  const change = (scope, title) => html`<a href=${"#/keys/rules/" + encodeURIComponent(scope)} aria-label=${`Change what holds for ${title}`}>Change</a>`
  return html`<${Problem} error=${problem} /><${Table} stacked label="Policies" columns=${["For", "What applies", ""]}>
      ${line("global", "Every request", policy, change("global", "every request"))}
      ${profiles.map(profile => line("profile:" + profile.name, `Profile ${profile.name}`, profile, profile.source === "settings" ? html`<span class="hint">in the settings file</span>`
        : html`${change("profile:" + profile.name, profile.name)} <button class="quiet" aria-label=${"Delete the profile " + profile.name} onClick=${() => ask(profile.name)}>Delete</button>`))}
      ${keys.filter(key => stateOf(key, now)[0] === "good").map(key => line("key:" + key.id, `Key ${key.name}`, key, change("key:" + key.id, key.name)))}</${Table}>
    ${asked && html`<${Ask} title=${`Delete the profile ${asked}?`} yes="Delete" onYes=${forget} onNo=${() => ask(null)}>Keys that have it are refused until it exists again, and so are
      requests that ask under it.</${Ask}>`}`
}
