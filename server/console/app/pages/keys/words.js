// Rules in words, and the text of a form to rules.
import { counted, figure } from "../../format.js"

const WHEN_OPEN = {
  allow: "While a gate is open log-probabilities are told and steering is heeded.",
  strip: "While a gate is open log-probabilities are withheld and steering is not heeded.",
  refuse: "Requests that ask for log-probabilities or steer are refused where a module applies.",
}
export const WHEN_OPEN_CHOICES = { "": "Not said here", allow: "Tell and heed (allow)", strip: "Withhold (strip)", refuse: "Refuse such requests (refuse)" }

const named = strengths => Object.entries(strengths).map(([name, strength]) => (strength === 1 ? name : `${name} at ${figure(strength)}`)).join(", ")

// The sentences of a scope. `said`: its rules; `known`: what `everything` of keys.js gives.
export function inWords(scope, said, { policy, enforced }) {
  const told = [], made = enforced[scope]
  if (made) told.push(`Enforced, as their takedowns say: ${made.join(", ")}.`)
  if (scope === "global" && Object.keys(policy.settings.enforced).length) told.push(`Enforced by the settings: ${named(policy.settings.enforced)}.`)
  if (Object.keys(said.enforced).length) told.push(`Enforced: ${named(said.enforced)}.`)
  if (Object.keys(said.modules ?? {}).length) told.push(`On, as far as the key allows: ${named(said.modules)}.`)
  if (said.shadow.length) told.push(`Measured only: ${said.shadow.join(", ")}.`)
  if (said.allowed) told.push(said.allowed.length ? `Requests may add only ${said.allowed.join(", ")}.` : "Requests may add nothing.")
  if (said.when_open) told.push(WHEN_OPEN[said.when_open])
  if (said.profile) told.push(`What the profile ${said.profile} says.`)
  if (scope === "global" && !said.when_open) told.push(WHEN_OPEN[policy.settings.when_open])
  if (said.missing?.length) told.push(`Not active: ${said.missing.join(", ")}. Requests under these rules are refused until they are.`)
  return told.length ? told : [scope === "global" ? "Nothing is demanded of every request." : "Nothing beyond what holds for every request."]
}

export function limits(key) {
  const told = []
  if (key.requests_per_minute) told.push(`${counted(key.requests_per_minute, "answer")} a minute, ${key.burst.toLocaleString("en")} at once`)
  if (key.tokens_per_minute) told.push(`${counted(key.tokens_per_minute, "token")} a minute`)
  return told.join("; ") || "none"
}

// "a, b=0.5" -> {a: 1, b: 0.5}; what is no number is left as it is, for the API to refuse by name.
export function strengths(text) {
  return Object.fromEntries(names(text).map(part => {
    const [name, strength] = part.split("=").map(one => one.trim())
    return [name, strength === undefined ? 1 : Number.isFinite(Number(strength)) && strength !== "" ? Number(strength) : strength]
  }))
}

export const names = text => text.split(",").map(part => part.trim()).filter(Boolean)
export const written = rules => Object.entries(rules).map(([name, strength]) => (strength === 1 ? name : `${name}=${strength}`)).join(", ")
