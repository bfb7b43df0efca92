// A new key: what it may, how much, and its text, which is shown once.
import { html, useRef, useState } from "../../../vendor/htm-preact.js"
import { send } from "../../api.js"
import { Button, Field, Form, Note, Problem, Title } from "../../parts.js"
import { announce } from "../../session.js"
import { limits, names, strengths } from "./words.js"

const SCOPES = {
  inference: "ask for completions", report: "read what gates and guards did", metrics: "read the metrics", admin: "change anything, as on these pages" }
const DAY = 86_400
const LASTS = { "": "Until it is revoked", [DAY]: "A day", [30 * DAY]: "30 days", [90 * DAY]: "90 days", [365 * DAY]: "A year" }
const BEGIN = { name: "", scopes: ["inference"], profile: "", expires_in: "", requests_per_minute: "", burst: "", tokens_per_minute: "", enforced: "", only: false, allowed: "" }
const NUMBERS = { requests_per_minute: ["Answers a minute", "Each prompt of a call, times its answers."], burst: ["At once", "As many as a minute has, unless given."],
  tokens_per_minute: ["Tokens a minute", "Of prompts and answers."] }

export function NewKey({ known, again }) {
  const [form, set] = useState(BEGIN), [problem, setProblem] = useState(null), [made, setMade] = useState(null)
  const change = (name, value) => set({ ...form, [name]: value })
  const input = (name, rest = {}) => html`<input id=${name} value=${form[name]} onInput=${event => change(name, event.target.value)} ...${rest} />`

  async function make() {
    setProblem(null)
    const body = { name: form.name.trim(), scopes: form.scopes, enforced: strengths(form.enforced) }
    if (form.profile) body.profile = form.profile
    if (form.only) body.allowed = names(form.allowed)
    for (const name of ["expires_in", ...Object.keys(NUMBERS)]) if (form[name] !== "") body[name] = Number(form[name])
    try {
      setMade(await send("POST", "/admin/v1/keys", body))
      announce("The key was made. Its text is shown once.")
      await again()
    } catch (error) { setProblem(error) }
  }

  if (made) return html`<${Made} made=${made} />`
  return html`<${Title} title="New key" lead="Its text is shown once, when it is made. This server keeps only a hash of it." />
    <${Form} class="card" onSubmit=${make}>
      ${!known.keys.length && html`<${Note} kind="warn">This is the first key: once it is made, every request to this server needs one.</${Note}>`}
      <${Field} label="Name" id="name" hint="Whom it is for; stands in errors and in the audit trail.">${input("name", { required: true, maxlength: 100 })}</${Field}>
      <fieldset><legend>It may</legend>${Object.entries(SCOPES).map(([scope, text]) => html`<label class="pick" key=${scope}><input type="checkbox" checked=${form.scopes.includes(scope)}
        onChange=${event => change("scopes", Object.keys(SCOPES).filter(one => (one === scope ? event.target.checked : form.scopes.includes(one))))} />${text} <span class="hint">(${scope})</span></label>`)}</fieldset>
      <div class="two">
        <${Field} label="Profile" id="profile" hint="What the profile says applies to all that it asks."><select id="profile" value=${form.profile} onChange=${event => change("profile", event.target.value)}>
          <option value="">None</option>${known.profiles.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</select></${Field}>
        <${Field} label="It lasts" id="expires_in"><select id="expires_in" value=${form.expires_in} onChange=${event => change("expires_in", event.target.value)}>
          ${Object.entries(LASTS).map(([seconds, text]) => html`<option key=${seconds} value=${seconds}>${text}</option>`)}</select></${Field}>
        ${Object.entries(NUMBERS).map(([name, [label, hint]]) => html`<${Field} label=${label} id=${name} key=${name} hint=${hint}>${input(name, { type: "number", min: "1", placeholder: "no limit" })}</${Field}>`)}
        <${Field} label="Enforced modules" id="enforced" hint=${hint(known.names)}>${input("enforced")}</${Field}>
      </div>
      <label class="pick"><input type="checkbox" checked=${form.only} onChange=${event => change("only", event.target.checked)} />Its requests may add only some modules</label>
      ${form.only && html`<${Field} label="May add" id="allowed" hint="Names with commas between them; none at all means nothing may be added.">${input("allowed")}</${Field}>`}
      <${Problem} error=${problem} />
      <div class="row"><button class="main">Make the key</button><a href="#/keys">Back to the keys</a></div>
    </${Form}>`
}

export const hint = known => known.length ? `Names with commas between them, strengths as name=0.5. Here: ${known.slice(0, 8).join(", ")}${known.length > 8 ? " and more" : ""}.`
  : "Names with commas between them, strengths as name=0.5. No module is loaded here yet."

function Made({ made }) {
  const text = useRef(null), [copied, setCopied] = useState("")
  async function copy() {
    text.current.select()
    try {
      await navigator.clipboard.writeText(made.key)
      setCopied("Copied.")
    } catch { setCopied("The browser does not let this page copy: the text is selected, copy it by hand.") }
  }
  return html`<${Title} title=${`The key ${made.name}`} />
    <section class="card"><${Note} kind="warn">This is the only time that it is shown. Whoever loses it needs a new one.</${Note}>
      ${made.missing.length > 0 && html`<${Note} kind="warn">Not active, so requests with the key are refused until it is: ${made.missing.join(", ")}.</${Note}>`}
      <${Field} label="The key" id="text"><input id="text" class="mono" readonly ref=${text} value=${made.key} /></${Field}>
      <div class="row"><${Button} kind="main" onClick=${copy}>Copy</${Button}><span role="status">${copied}</span></div>
      <dl class="facts later"><dt>May</dt><dd>${made.scopes.join(", ")}</dd><dt>Limits</dt><dd>${limits(made)}</dd><dt>Id</dt><dd class="mono">${made.id}</dd></dl>
      <p><a href="#/keys">I have kept it: back to the keys</a></p></section>`
}
