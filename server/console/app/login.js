// The login: the whole page where the server asks for a key, and a page's stead where the key in use may not see it.
import { html, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js"
import { look } from "./api.js"
import { Field, Problem } from "./parts.js"
import { change, useSession } from "./session.js"

const UNKNOWN = "the server does not know this key"

export function Login({ reason = "", scope, page }) {
  const [key, setKey] = useState(""), [problem, setProblem] = useState(null), [busy, setBusy] = useState(false)
  const { open } = useSession(), form = useRef(null)
  useLayoutEffect(() => { if (!page) form.current.elements.key.focus() }, [])

  async function enter(event) {
    event.preventDefault()
    setProblem(null)
    if (/[^\x21-\x7e]/.test(key.trim())) return setProblem({ message: "a key has neither spaces nor letters beyond ASCII" })
    setBusy(true)
    try {
      const state = await look({ key: key.trim() })
      if (state.caller.name === null) setProblem({ message: UNKNOWN })
      else if (scope && !state.caller.scopes.includes(scope)) setProblem({ message: `this key does not have the scope '${scope}'` })
      else change({ key: key.trim(), state, login: false, reason: "" })
    } catch (error) { setProblem(error) }
    setBusy(false)
  }

  // Where the server asks for no key one gets in without.
  async function goOn() {
    try { change({ state: await look({ key: "" }), key: "", login: false, reason: "" }) }
    catch (error) { setProblem(error) }
  }

  return html`<section class="login card">
    <h1>${page ? `${page}: sign in` : "Sign in"}</h1>
    ${reason && html`<p class="note bad" role="alert">Signed out: ${reason}</p>`}
    <p>${page ? `This page needs a key with the scope '${scope}'.` : "This server asks for a key."}${" "}
      The admin key is in the file <code>admin.key</code> of the server's data folder. It is kept in this page's memory alone:
      a reload asks for it again.</p>
    <form ref=${form} onSubmit=${enter}>
      <${Field} label="API key" id="key"><input id="key" type="password" autocomplete="off" required value=${key}
        onInput=${event => setKey(event.target.value)} /></${Field}>
      <${Problem} error=${problem} />
      <div class="row"><button class="main" disabled=${busy}>Sign in</button>
        ${!page && open && html`<button type="button" class="quiet" onClick=${goOn}>Go on without a key</button>`}</div>
    </form>
  </section>`
}
