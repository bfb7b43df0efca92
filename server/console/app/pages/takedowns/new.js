// A new takedown: rows, on whose word, what is made of them and whom it binds; a dry run says what it will take. `joining`: one whose
// module is to have the rows of others, and to stand in for theirs.
import { html, useEffect, useRef, useState } from "../../../vendor/htm-preact.js"
import { get, send } from "../../api.js"
import { counted } from "../../format.js"
import { Button, Field, Problem, Title, useData } from "../../parts.js"
import { announce, session } from "../../session.js"
import { DryRun, dropped } from "./dry.js"
import { joinable, Joins } from "./joins.js"
import { given, NO_ROWS, Rows } from "./rows.js"
import { NOTICE, SCOPES, WARNINGS } from "./words.js"

const PROTECT = {
  "": "Guard at once, module once fitted",
  guard: "Guard alone",
  module: "Module alone, once it is fitted",
}
const POLICY = { "": "Other code, as if unseen (rewrite)", silent: "Nothing: the answer ends (silent)" }
const JOINED = { "": "Guard at once, module once fitted", module: "Module alone, once it is fitted" }
const ACTION = {
  steer: "Another token (steer)",
  stop: "The end of the answer (stop)",
  report: "Nothing: it is only counted (report)",
}
const ACTIVATION = {
  auto: "At once, where it is within the budgets",
  shadow: "Measure only at first (shadow)",
  manual: "Not before somebody activates it",
}
const BEGIN = { name: "", scope: "", protect: "", policy: "", activation: "auto", action: "steer", run: "", secrets: false, replace: false, joins: [] }

function Choice({ label, id, hint, choices, value, onChange, ...rest }) {
  return html`<${Field} label=${label} id=${id} hint=${hint}><select id=${id} value=${value} ...${rest} onChange=${event => onChange(event.target.value)}>
    ${Object.entries(choices).map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}</select></${Field}>`
}

// What the form says, as `options` of the API: what is left at its default is left out.
function options(form) {
  const said = { replace: form.replace }
  if (form.scope) said.scope = form.scope === "named" ? null : form.scope
  if (form.joins.length) said.joins = form.joins
  if (form.activation !== "auto") said.activation = form.activation
  if (form.protect) said.protect = form.protect
  if (form.policy && form.protect !== "guard") said.policy = form.policy
  const guarded = form.protect === "guard" || form.action !== BEGIN.action || form.run !== BEGIN.run || form.secrets
  if (guarded && form.protect !== "module") said.guard = { action: form.action }
  if (said.guard && form.secrets) said.guard.secrets = true
  if (said.guard && form.run !== BEGIN.run) said.guard.run = Number(form.run)
  return said
}

async function post({ form, notice, rows }, dry, key) {
  const found = await given(rows)
  if (!found && !form.joins.length) throw { message: "rows: none given; paste some, or choose a file or a folder", param: "rows" }
  const said = {
    name: form.name.trim(), options: { ...options(form), dry_run: dry },
    notice: Object.fromEntries(Object.entries(notice).filter(([, text]) => text.trim())),
  }
  if (!found?.file) return send("POST", "/admin/v1/takedowns", { ...said, ...found }, key)
  const body = new FormData()
  body.append("name", said.name)
  for (const part of ["notice", "options"]) body.append(part, JSON.stringify(said[part]))
  for (const part of ["include", "exclude"]) for (const glob of found[part] ?? []) body.append(part, glob)
  body.append("file", found.file, found.name)
  return send("POST", "/admin/v1/takedowns", body, key)
}

// What of that which was given is not among the rows.
const left = answer => answer.files_skipped ? [`Of what was given ${counted(answer.rows, "row")} ${answer.rows === 1 ? "is" : "are"} taken${dropped(answer)}. Save such files as UTF-8 where they are source code, and give them in a takedown of their own.`] : []

export function New({ joining }) {
  const title = joining ? "Join takedowns" : "New takedown", draft = session.drafts.get(title) ?? { form: BEGIN, notice: {}, rows: NO_ROWS, key: { current: null } }
  const [form, setForm] = useState(draft.form), [notice, setNotice] = useState(draft.notice), [rows, setRows] = useState(draft.rows)
  const [problem, setProblem] = useState(null), [plan, setPlan] = useState(null)
  const [key] = useState(draft.key), here = useRef(true) // one key for each thing asked, so that what is sent twice is made once
  const { data: scopes } = useData(reachable), { data: modules, error } = useData(() => joining && joinable(), 0, [joining])
  // Of a draft some may have been joined elsewhere, or taken out of use, since they were chosen.
  const joins = modules ? form.joins.filter(name => modules.some(module => module.name === name)) : form.joins

  const changed = set => value => { key.current = null; setPlan(null); set(value) }
  const change = name => value => changed(setForm)({ ...form, [name]: value })
  const typed = form !== BEGIN || rows !== NO_ROWS || Object.values(notice).some(Boolean)
  useEffect(() => {
    if (!typed) return undefined
    session.drafts.set(title, { form, notice, rows, key })
    const stay = event => event.preventDefault() // the browser asks before what was typed is gone with the page
    addEventListener("beforeunload", stay)
    return () => removeEventListener("beforeunload", stay)
  }, [form, notice, rows])
  useEffect(() => () => { here.current = false }, [])
  useEffect(() => {
    const over = event => { if (event.dataTransfer?.types.includes("Files") && event.target.type !== "file") event.preventDefault() } // else it leaves for the file
    const drop = event => {
      over(event)
      if (!event.defaultPrevented || joining) return
      const folder = [...event.dataTransfer.items].some(item => item.webkitGetAsEntry?.()?.isDirectory)
      if (folder) setProblem({ message: "rows: that is a folder; choose it as such, under 'Folder'" })
      else changed(setRows)({ ...rows, way: "file", files: [...event.dataTransfer.files] })
    }
    addEventListener("dragover", over)
    addEventListener("drop", drop)
    return () => { removeEventListener("dragover", over); removeEventListener("drop", drop) }
  }, [rows])

  async function ask(dry) {
    setProblem(null)
    if (joining && !joins.length) return setProblem({ message: "Say what it joins: choose one module at least." })
    if (!joining && !form.scope) return setProblem({ message: "Say whom it binds: every request, or only those that name it, are under a profile or have a key." })
    key.current ??= crypto.getRandomValues(new Uint32Array(4)).join("-")
    const asked = key.current // another one once the form has changed
    try {
      const answer = await post({ form: { ...form, joins }, notice, rows }, dry, dry ? {} : { "Idempotency-Key": key.current })
      if (dry && asked !== key.current) return // the plan of what stood there before
      announce(dry ? "The plan is below." : "The takedown was submitted.")
      if (dry) return setPlan(answer)
      WARNINGS.set(answer.takedown_id, [...left(answer), ...answer.warnings])
      if (asked === key.current) session.drafts.delete(title)
      if (here.current) location.hash = "#/takedowns/" + answer.takedown_id
    } catch (error) {
      if (!error.message) throw error
      setPlan(null)
      setProblem(error)
    }
  }

  const rest = Object.fromEntries(Object.entries(SCOPES).filter(([scope]) => !joining || scope !== "named"))
  return html`<${Title} title=${title} lead=${joining ? "One module in place of those of several small takedowns: what each costs ordinary code adds up. Theirs hold until it is active; their guards and records stay."
      : "What is given here goes to this server alone. It is readable by the service's account, appears in no log, and can be erased."}/>
    <${Problem} error=${error} />
    <form class="card" onSubmit=${event => { event.preventDefault(); ask(true) }}>
      ${joining && modules && html`<${Joins} modules=${modules} chosen=${joins} set=${change("joins")} />`}
      ${joining ? html`<details><summary>And more rows</summary><${Rows} rows=${rows} set=${changed(setRows)} /></details>`
        : html`<${Rows} rows=${rows} set=${changed(setRows)} />`}
      <div class="two">
        <${Field} label="Name" id="name" hint="Of the module and the guard: letters, digits, dot, dash and underscore.">
          <input id="name" required maxlength="64" value=${form.name} onInput=${event => change("name")(event.target.value)} /></${Field}>
        <${Choice} label="Whom it binds" id="scope" choices=${{ "": joining ? "The requests that theirs bind" : "Choose", ...rest, ...scopes }} value=${form.scope} onChange=${change("scope")}
          hint=${joining ? "Where theirs bind different requests, it has to be every request: nobody who is bound now is free then."
            : "A promise to a claimant needs one that is enforced: every request."} />
        <${Choice} label="What is made" id="protect" choices=${joining ? JOINED : PROTECT} value=${form.protect} onChange=${change("protect")}
          hint="A guard keeps every answer from holding a run of these rows; a module has the model go on as if it never saw them." />
        <${Choice} label="When the module holds" id="activation" choices=${ACTIVATION} value=${form.activation} onChange=${change("activation")} />
      </div>
      <details><summary>How it holds</summary><div class="two">
        ${form.protect !== "guard" && html`<${Choice} label="What is written in place of the rows" id="policy" choices=${POLICY} value=${form.policy} onChange=${change("policy")} />`}
        ${form.protect !== "module" && html`<${Choice} label="What the guard does" id="action" choices=${ACTION} value=${form.action} onChange=${change("action")}
            hint=${`Where an answer would complete a run of the rows.${form.action === "steer" ? " After three such tokens the answer ends." : ""}`} />
          <${Field} label="Words and signs of a run" id="run" hint="8 to 1,000; 50 unless given, and 12 letters and digits of secrets. Shorter rows are not guarded.">
            <input id="run" type="number" min="8" max="1000" placeholder=${form.secrets ? "12" : "50"} value=${form.run} onInput=${event => change("run")(event.target.value)} /></${Field}>
          <div class="field"><label class="pick"><input type="checkbox" checked=${form.secrets} onChange=${event => change("secrets")(event.target.checked)} />
            The rows are secrets, as keys and passwords: what continues each is guarded letter by letter</label>
            ${form.secrets && html`<p class="hint">Give JSON lines with prompt and continuation, which is the secret alone. Of anything else a part is not guarded.</p>`}</div>`}
        <div class="field"><label class="pick"><input type="checkbox" checked=${form.replace} onChange=${event => change("replace")(event.target.checked)} />
          It is the next version of a name that is in use</label></div>
      </div></details>
      <details><summary>On whose word</summary><p class="hint">Stands in the evidence. The reference is told to clients whose answers the guard ends.</p>
        <div class="two">${Object.entries(NOTICE).map(([name, label]) => html`<${Field} label=${label} id=${name} key=${name}>
          <input id=${name} maxlength="2000" value=${notice[name] ?? ""} onInput=${event => changed(setNotice)({ ...notice, [name]: event.target.value })} /></${Field}>`)}</div>
      </details>
      <${Problem} error=${problem} />
      <div class="row"><${Button} onClick=${() => ask(true)}>Dry run</${Button}>
        <${Button} kind="main" onClick=${() => ask(false)}>Submit</${Button}><a href="#/takedowns">Back to the list</a></div>
    </form>
    ${plan && html`<${DryRun} plan=${plan} />`}`
}

async function reachable() {
  const [profiles, keys] = await Promise.all([get("/admin/v1/profiles"), get("/admin/v1/keys")])
  return Object.fromEntries([
    ...profiles.data.map(({ name }) => ["profile:" + name, `Every request under the profile ${name}`]),
    ...keys.data.filter(key => !key.revoked_at).map(({ id, name }) => ["key:" + id, `Every request with the key ${name}`]),
  ])
}
