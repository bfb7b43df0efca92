// The shell: what stands around every page, which page is shown, the login, and the beat that finds out whether all is well.
import { html, render, useEffect, useState } from "../vendor/htm-preact.js"
import { ApiError, look } from "./api.js"
import { Login } from "./login.js"
import { pages } from "./pages.js"
import { Title, useFocus } from "./parts.js"
import { change, leave, may, session, useSession } from "./session.js"
import { ThemeSwitch } from "./theme.js"

const BEAT = 3000, BEAT_AWAY = 1000, PATIENCE = 10_000 // milliseconds

// `#/modules/mod_1` is the page `modules` with the path ["mod_1"]; no page at all is the first.
function route() {
  const [name, ...path] = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decoded)
  return { page: name ? pages.find(page => page.route === name) : pages[0], path }
}

// An address may be cut off or typed: what is no escape stays as it is, and is the name of nothing.
function decoded(part) {
  try { return decodeURIComponent(part) } catch { return part }
}

function useRoute() {
  const [now, set] = useState(route)
  useEffect(() => {
    const changed = () => set(route())
    addEventListener("hashchange", changed)
    return () => removeEventListener("hashchange", changed)
  }, [])
  return now
}

// What comes when somebody has signed out or in meanwhile is of another key, and is let lie.
async function beat() {
  const { key, login } = session, current = () => key === session.key && login === session.login
  try {
    const state = await look({ signal: AbortSignal.timeout(PATIENCE) })
    change(current() ? { state, login: false, open: session.open || !key, away: null } : { away: null })
  } catch (error) {
    if (!(error instanceof ApiError)) throw error
    if (error.status === 401 && !key) change({ open: false })
    if (error.status >= 500) change({ away: `The server says: ${error.message}. Trying again every second.` })
    else if (error.status) change({ away: null })
    if ((error.status === 401 || error.status === 403) && current()) leave(session.reason || (key ? error.message : ""))
  }
}

function useBeat() {
  useEffect(() => {
    let timer = 0, ended = false
    const again = async () => {
      if (!session.login || session.away) await beat()
      if (!ended) timer = setTimeout(again, session.away ? BEAT_AWAY : BEAT)
    }
    again()
    return () => { ended = true; clearTimeout(timer) }
  }, [])
}

// Where the control that had the focus is gone, as a button is after what it did, the focus goes to the page: else it would be with nobody.
function useLeftFocus() {
  useEffect(() => {
    let last = null
    const note = event => { last = event.target }
    const watch = new MutationObserver(() => {
      if (last === null || last.isConnected) return
      last = null
      if (document.activeElement === document.body) document.getElementById("main").focus({ preventScroll: true })
    })
    addEventListener("focusin", note)
    watch.observe(document.getElementById("main"), { childList: true, subtree: true })
    return () => { removeEventListener("focusin", note); watch.disconnect() }
  }, [])
}

function Head({ now }) {
  const { state } = useSession()
  const name = state?.caller.name
  return html`<header class="head">
    <a class="skip" href="#main" onClick=${skip}>Skip to the page</a>
    <div class="bar">
      <strong class="brand">Unbind</strong>
      ${state && html`<span class="model" id="model">${state.model}</span>`}
      <span class="grow"></span>
      <${ThemeSwitch} />
      ${state && html`<span class="who">${name ?? "no key given"}
        <button class="quiet" onClick=${() => leave("")}>${name ? "Sign out" : "Sign in"}</button></span>`}
    </div>
    ${state && html`<nav aria-label="Pages"><ul>${pages.map(page => html`<li key=${page.route}>
      <a href=${"#/" + page.route} aria-current=${page === now ? "page" : undefined}>${page.title}</a></li>`)}</ul></nav>`}
  </header>`
}

// A hash of its own would be taken for a route.
function skip(event) {
  event.preventDefault()
  document.getElementById("main").focus()
}

function Shell() {
  const { state, login, reason, away, said } = useSession()
  const { page, path } = useRoute()
  const where = login ? "login" : state ? page : null
  useBeat()
  useLeftFocus()
  useFocus(where, !login) // the login has a field of its own for that
  useEffect(() => { document.title = login ? "Sign in - Unbind" : `${page?.title ?? "Not found"} - Unbind` }, [where])
  let shown
  if (login) shown = html`<${Login} reason=${reason} />`
  else if (!state) shown = html`<p class="hint">Asking the server.</p>`
  else if (!page) shown = html`<${Title} title="There is no such page" lead="Choose one of the pages above." />`
  else if (!may(page.scope)) shown = html`<${Login} scope=${page.scope} page=${page.title} />`
  else shown = html`<${page.view} path=${path} key=${page.route} />`
  return html`<${Head} now=${page} />
    <div role="alert">${away && html`<p class="banner">${away}</p>`}</div>
    <main id="main" tabindex="-1">${shown}</main>
    <div class="unseen" role="status" aria-live="polite">${said}</div>`
}

document.getElementById("app").replaceChildren()
render(html`<${Shell} />`, document.getElementById("app"))
