// The rules of a scope, changed as a whole and only where nobody changed them meanwhile.
import { html, useEffect, useState } from "../../../vendor/htm-preact.js"
import { call } from "../../api.js"
import { Button, Empty, Field, Form, Note, Problem, Title, useData } from "../../parts.js"
import { announce } from "../../session.js"
import { hint } from "./new.js"
import { inWords, names, strengths, WHEN_OPEN_CHOICES, written } from "./words.js"

const NAMED = { enforced: ["Enforced", "On, whatever anybody allows; no request can switch it off."], modules: ["On", "As far as the key allows."] }

function formOf(rules) {
  return { enforced: written(rules.enforced), modules: written(rules.modules), shadow: rules.shadow.join(", "), only: rules.allowed !== null,
    allowed: (rules.allowed ?? []).join(", "), when_open: rules.when_open ?? "" }
}

function rulesOf(form) {
  return { enforced: strengths(form.enforced), modules: strengths(form.modules), shadow: names(form.shadow), allowed: form.only ? names(form.allowed) : null,
    when_open: form.when_open || null }
}

function titleOf(scope, known) {
  const [kind, id] = scope.split(":")
  if (kind === "profile" && id) return `the profile ${id}`
  if (kind === "key" && id) return `the key ${known.keys.find(key => key.id === id)?.name ?? id}`
  return scope === "global" ? "every request" : scope // an address that somebody typed
}

export function RulesForm({ scope, known, again }) {
  const path = "/admin/v1/policies/" + encodeURIComponent(scope)
  const [seen, setSeen] = useState(null), [form, set] = useState(null), [problem, setProblem] = useState(null), [other, setOther] = useState(null)
  const change = (name, value) => set({ ...form, [name]: value })

  async function look() {
    const { body, headers } = await call(path)
    return { rules: body, etag: headers.get("etag") }
  }
  function take(found) {
    setSeen(found)
    set(formOf(found.rules))
    setOther(null)
    setProblem(null)
  }
  const { data: first, error } = useData(look)
  useEffect(() => { if (first) take(first) }, [first])

  async function write(etag) {
    setProblem(null)
    try {
      const { body } = await call(path, { method: "PUT", body: rulesOf(form), headers: { "If-Match": etag } })
      announce("The rules hold from the next request on.")
      await again()
      if (body.missing.length) take(await look())
      else location.hash = "#/keys"
    } catch (error) {
      if (error.code === "stale") await look().then(setOther, setProblem) // they may be gone altogether
      else setProblem(error)
    }
  }

  const title = `What holds for ${titleOf(scope, known)}`
  if (!form) return html`<${Title} title=${title} /><${Problem} error=${error} />
    ${error?.status === 404 && html`<${Empty} title="There is no such key or profile">Choose one of <a href="#/keys">the list</a>.</${Empty}>`}`
  const input = name => html`<input id=${name} value=${form[name]} onInput=${event => change(name, event.target.value)} />`
  return html`<${Title} title=${title} lead="What is written here replaces what stands, from the next request on." />
    <${Form} class="card" onSubmit=${() => write(seen.etag)}>
      ${seen.rules.missing.length > 0 && html`<${Note} kind="bad">Not active: ${seen.rules.missing.join(", ")}. Requests under these rules are refused with 503 until they are.
        Activate them on the page Modules, or take their names out.</${Note}>`}
      ${Object.entries(NAMED).map(([name, [label, told]]) => html`<${Field} label=${label} id=${name} key=${name} hint=${`${told} ${hint(known.names)}`}>${input(name)}</${Field}>`)}
      <${Field} label="Measured only" id="shadow" hint="Gates are read and counted, and nothing is applied.">${input("shadow")}</${Field}>
      <${Field} label="While a gate is open" id="when_open" hint="Log-probabilities, and what steers the choice of tokens."><select id="when_open" value=${form.when_open} onChange=${event => change("when_open", event.target.value)}>
        ${Object.entries(WHEN_OPEN_CHOICES).map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select></${Field}>
      <label class="pick"><input type="checkbox" checked=${form.only} onChange=${event => change("only", event.target.checked)} />Requests may add only some modules</label>
      ${form.only && html`<${Field} label="May add" id="allowed" hint="Names with commas between them; none at all means nothing may be added.">${input("allowed")}</${Field}>`}
      <${Problem} error=${problem} />
      ${other && html`<${Conflict} scope=${scope} other=${other} known=${known} theirs=${() => take(other)} mine=${() => { setOther(null); return write(other.etag) }} />`}
      <div class="row"><button class="main">Save</button><a href="#/keys">Back without a change</a></div>
    </${Form}>`
}

// Somebody wrote other rules since these were read.
const Conflict = ({ scope, other, known, theirs, mine }) => html`<div role="alert"><${Note} kind="warn">
  <p><strong>Somebody else changed these rules while you had them open</strong>, and nothing of yours was written. Now they say:</p>
  <ul>${inWords(scope, other.rules, known).map(text => html`<li key=${text}>${text}</li>`)}</ul>
  <div class="row"><${Button} onClick=${theirs}>Take theirs into the form</${Button}><${Button} kind="danger" onClick=${mine}>Write mine over them</${Button}></div></${Note}></div>`

export function NewProfile() {
  const [name, set] = useState(""), [problem, setProblem] = useState(null), [there, setThere] = useState("")
  const rules = profile => "#/keys/rules/" + encodeURIComponent("profile:" + profile)
  async function make() {
    setProblem(null)
    setThere("")
    const wanted = name.trim()
    try {
      await call("/admin/v1/profiles/" + encodeURIComponent(wanted), { method: "PUT", body: {}, headers: { "If-None-Match": "*" } })
      location.hash = rules(wanted)
    } catch (error) {
      if (error.code === "already_there") setThere(wanted)
      else setProblem(error)
    }
  }
  return html`<${Title} title="New profile" lead="A named set of rules: a key may have it, and a request may ask under it by /p/NAME/v1/... or the model MODEL~NAME." />
    <${Form} class="card" onSubmit=${make}><${Field} label="Name" id="name"><input id="name" required maxlength="64" value=${name} onInput=${event => set(event.target.value)} /></${Field}>
      <${Problem} error=${problem} />
      <div role="alert">${there && html`<${Note} kind="warn">There is a profile ${there} already, and nothing of it was changed.${" "}
        <a href=${rules(there)}>See what it says</a>, or choose another name.</${Note}>`}</div>
      <div class="row"><button class="main">Make the profile</button><a href="#/keys">Back</a></div></${Form}>`
}
