// What the page knows while it is open: the key, who that is, what the server said last, and whether it can be reached.
// Nothing of it is written down anywhere: a reload asks for the key again.
import { useEffect, useReducer } from "../vendor/htm-preact.js"

// `state`: /console/state.json, null until it came. `login`: whether a key is asked for, and `reason` why.
// `open`: whether one gets in without a key. `away`: in words why the server cannot be asked now, null while it answers. `said`: the newest message for screen readers.
// `drafts`: what was typed into a form that was left, by its name; forgotten by who signs out, kept for who was signed out.
export const session = { key: "", state: null, login: false, reason: "", open: false, away: null, said: "", drafts: new Map() }
const listeners = new Set()

export function change(values) {
  if (Object.entries(values).every(([name, value]) => session[name] === value)) return
  Object.assign(session, values)
  for (const listener of listeners) listener()
}

// The session, and another rendering of the component whenever it changes.
export function useSession() {
  const [, again] = useReducer(count => count + 1, 0)
  useEffect(() => { listeners.add(again); again(); return () => listeners.delete(again) }, [])
  return session
}

// Whether the caller may do what `scope` names; pages ask it before they show what the API would refuse.
export const may = scope => !!session.state?.caller.scopes.includes(scope)

// Say something to screen readers, without moving the focus.
export const announce = text => change({ said: text })

// Back to the login; `reason` is shown there.
export function leave(reason = "") {
  if (!reason) session.drafts.clear()
  change({ key: "", state: null, login: true, reason })
}
