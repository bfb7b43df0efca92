// What pages are made of.
import { html, useCallback, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js"
import { passing } from "./api.js"
import { session } from "./session.js"

const RETRY = 2 // seconds

// A page's heading, what it is for, and controls beside it.
export const Title = ({ title, lead, children }) => html`<div class="title"><div><h1>${title}</h1>
  ${lead && html`<p class="hint">${lead}</p>`}</div><div class="row">${children}</div></div>`

// An error as the API gave it: its message, and the field where the message does not begin with it. Read out when it comes.
export function Problem({ error }) {
  const field = error?.param && !error.message.includes(error.param) ? `${error.param}: ` : ""
  return html`<div role="alert">${error && html`<p class="note bad">${field}${error.message}</p>`}</div>`
}

// A remark; `kind`: "", "good", "warn" or "bad".
export const Note = ({ kind = "", children }) => html`<div class=${"note " + kind}>${children}</div>`

// What is shown where there is nothing, with what to do next.
export const Empty = ({ title, children }) => html`<section class="empty"><h2>${title}</h2><div>${children}</div></section>`

// A control with its label above it and a hint below; the control has the id.
export const Field = ({ label, id, hint, children }) => html`<div class="field"><label for=${id}>${label}</label>${children}
  ${hint && html`<p class="hint">${hint}</p>`}</div>`

// A state in a word; `kind` as of a note.
export const Badge = ({ kind = "", children }) => html`<span class=${"badge " + kind}>${children}</span>`

// A wide table scrolls within itself, by keyboard as well. `columns`: headings; `label`: what the table is. `stacked`: on a narrow
// screen each row is a block and its cells, made by `cell`, stand below each other.
export const Table = ({ label, columns, stacked, children }) => html`<div class="scroll" role="region" aria-label=${label} tabindex="0">
  <table class=${stacked ? "stacked" : ""} role="table"><thead role="rowgroup"><tr role="row">${columns.map(name =>
    html`<th scope="col" role="columnheader" key=${name}>${name}</th>`)}</tr></thead><tbody role="rowgroup">${children}</tbody></table></div>`

// A cell of a stacked table, which has its column's name with it.
export const Cell = ({ of, children, ...rest }) => html`<td role="cell" data-label=${of} ...${rest}>${children}</td>`

// A button that does nothing while `onClick`, which may be asynchronous, is at work. It keeps the focus: the browser takes it from what is disabled.
export function Button({ onClick, children, kind = "", disabled, ...rest }) {
  const [busy, set] = useState(false)
  async function pressed() {
    if (busy) return
    set(true)
    try { await onClick() } finally { set(false) }
  }
  return html`<button type="button" class=${kind} disabled=${disabled} aria-disabled=${busy} aria-busy=${busy} onClick=${pressed} ...${rest}>${children}</button>`
}

// A form that is sent once however often it is pressed while `onSubmit`, which may be asynchronous, is at work.
export function Form({ onSubmit, children, ...rest }) {
  const busy = useRef(false)
  async function sent(event) {
    event.preventDefault()
    if (busy.current) return
    busy.current = true
    try { await onSubmit() } finally { busy.current = false }
  }
  return html`<form ...${rest} onSubmit=${sent}>${children}</form>`
}

// A question before something is done: a dialog of the browser's own, so that focus stays within, Escape
// leaves it, and focus is then where it was.
export function Ask({ title, yes, onYes, onNo, children }) {
  const dialog = useRef(null)
  useLayoutEffect(() => { dialog.current.showModal() }, [])
  return html`<dialog ref=${dialog} aria-labelledby="asked" onClose=${onNo}>
    <h2 id="asked">${title}</h2><div>${children}</div>
    <div class="row end"><button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
      <button type="button" class="main" onClick=${() => { dialog.current.close(); onYes() }}>${yes}</button></div>
  </dialog>`
}

// What `load` gives, asked again `seconds` after each answer and by `again()`: {data, error, again}. One question is under way at a time, so
// that the answers of a slow server are seen as well. While the server is away the last answer stays and nothing is asked; what it could not
// answer is asked again once it can be, where `seconds` is 0 too. `error` is the API's.
export function useData(load, seconds = 0, depends = []) {
  const [now, set] = useState({ data: null, error: null })
  const turn = useRef(0)
  const again = useCallback(async () => {
    const mine = ++turn.current
    try {
      const data = await load()
      if (mine === turn.current) set({ data, error: null })
    } catch (error) {
      if (mine === turn.current && error.code !== "away") set(before => ({ ...before, error }))
      return !passing(error)
    }
    return true
  }, depends)
  useEffect(() => {
    let timer = 0, ended = false
    const ask = async () => wait(await again() ? seconds : seconds || RETRY)
    const wait = pause => { if (pause && !ended) timer = setTimeout(() => (session.away || document.hidden ? wait(pause) : ask()), 1000 * pause) }
    ask()
    return () => { ended = true; turn.current++; clearTimeout(timer) }
  }, [again, seconds])
  return { ...now, again }
}

// The focus goes to the page's main part when `which` has changed: with the rendering, since an effect comes after it, and would
// take the focus from whoever types there already. Where nothing was shown before, `which` was null and the focus stays.
export function useFocus(which, wanted = true) {
  const before = useRef(which)
  useLayoutEffect(() => {
    if (wanted && before.current !== null && before.current !== which) document.getElementById("main").focus()
    before.current = which
  }, [which])
}
