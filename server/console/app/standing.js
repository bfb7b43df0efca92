// How modules and guards stand: whom each binds by its record and by policies, and what its gate did against what was expected.
import { call, get, send } from "./api.js"

// Everything that the page of modules shows: {modules, problems, enforcers, profiles, keys, counts}.
export async function standings() {
  const [[modules, problems], rules, counts] = await Promise.all([allModules(), enforcing(), gateCounts()])
  return { modules, problems, ...rules, counts }
}

// Every one, however many pages of the list that takes; `state`: "all", or "loaded" for those that requests can name.
export async function allModules(state = "all") {
  const found = []
  let problems = [], after = ""
  for (;;) {
    const page = await get(`/admin/v1/modules?state=${state}&limit=1000&after=${encodeURIComponent(after)}`)
    found.push(...page.data)
    problems = page.problems
    if (!page.has_more) return [found, problems]
    after = found.at(-1).id
  }
}

// `enforcers`: name of a module -> whose rules demand it, in words; and the `profiles` and `keys` whose rules may be changed.
async function enforcing() {
  const [policy, profiles, keys] = await Promise.all(["/policies/global", "/profiles", "/keys"].map(path => get("/admin/v1" + path)))
  const found = new Map()
  const note = (rules, who) => {
    for (const name of Object.keys({ ...rules.modules, ...rules.enforced })) found.set(name, [...(found.get(name) ?? []), who])
  }
  note({ enforced: policy.settings?.enforced }, "every request (settings)")
  note(policy, "every request (policy global)")
  for (const profile of profiles.data) note(profile, `requests under the profile '${profile.name}'`)
  const usable = keys.data.filter(key => !key.revoked_at)
  for (const key of usable) note(key, `requests with the key '${key.name}'`)
  const changeable = profiles.data.filter(profile => profile.source === "registry").map(profile => profile.name)
  return { enforcers: found, profiles: changeable, keys: usable }
}

// Name of a module -> {evaluated, open}, of this server since it started, all phases together.
async function gateCounts() {
  const found = new Map(), text = await get("/metrics")
  for (const [, kind, labels, value] of text.matchAll(/^unbind_gate_(evaluations|activations)_total\{([^}]*)\} (\S+)$/gm)) {
    const name = /module="([^"]*)"/.exec(labels)?.[1]
    const counts = found.get(name) ?? { evaluated: 0, open: 0 }
    counts[kind === "evaluations" ? "evaluated" : "open"] += Number(value)
    found.set(name, counts)
  }
  return found
}

// Enforce a name in a scope; the scope's other rules stay, and are not overwritten where they have changed meanwhile.
export async function enforceIn(scope, name) {
  const path = `/admin/v1/policies/${encodeURIComponent(scope)}`, { body, headers } = await call(path)
  const { enforced, modules, shadow, allowed, when_open } = body, etag = headers.get("etag")
  const rules = { enforced: { [name]: 1, ...enforced }, modules, shadow, allowed, when_open } // a strength that is said stays
  return send("PUT", path, rules, etag ? { "If-Match": etag } : {})
}

// What is expected of the gate: the share of retained positions at which it was open, and of the protected rows' where a fit
// told that, and where it opens in them.
export function expected({ measured }) {
  const cost = measured?.cost, certificate = measured?.certificate?.open_rate, opens = measured?.opens
  return {
    retain: cost?.open_rate ?? certificate?.observed ?? null, bound: certificate?.value ?? null,
    forget: measured?.forget_open_rate ?? null, opens: opens ?? null,
  }
}

// Whom it binds, in words, and what an operator should know of it: {text, kind, unbound}.
export function bound(module, enforcers) {
  const by = enforcers.get(module.name) ?? []
  const unbound = module.state === "active" && module.in_force === "available" && !by.length
  if (module.state === "active" && by.length) return { text: `Binds ${[...(module.scope ? [module.binds] : []), ...by].join("; ")}.`, kind: "", unbound }
  return { text: `Binds ${module.binds}.`, kind: unbound ? "warn" : "", unbound }
}
