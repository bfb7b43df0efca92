// What stages, outcomes and states mean, in words; docs/operations/takedowns.md says more of each.
import { percent } from "../../format.js"

// The stages of each kind of job, in order.
export const STAGES = {
  takedown: ["check", "fit", "verify", "joint", "publish"],
  adopt: ["adopt", "verify", "joint", "publish"],
  verify: ["verify"],
  activate: ["joint"],
}
export const STAGE = {
  check: "Ask whether the model knows the rows",
  fit: "Make the module",
  adopt: "Measure the module on this model",
  verify: "Measure before and after",
  joint: "Measure the cost beside the other modules",
  publish: "Write the module",
}
export const KIND = { takedown: "making the module", verify: "measuring again", adopt: "bringing it to this model", activate: "activating" }

// What a notice says of itself, and whom a takedown may bind whoever asks.
export const NOTICE = { claimant: "Claimant", work: "Work", reference: "Reference", received_at: "Notice received", note: "Note" }
export const SCOPES = { global: "Every request to this service", named: "Only requests that name it" }

// What the server warned of when a takedown was submitted, by its id: shown on its page while this one is open.
export const WARNINGS = new Map()

// An outcome -> [kind of badge, in a word, what it means and what to do].
const OUTCOME = {
  active: ["good", "active", "The module was made and is active."],
  shadow: ["", "in shadow", "The module was made and is measured, not applied. Activate it on the page Modules when you trust its rates."],
  calibrated: ["warn", "made, not active", "The module was made and binds nothing. Activate it on the page Modules."],
  guarded: ["good", "guarded", "The guard that was asked for holds."],
  verified: ["good", "measured", "Before and after were measured once more."],
  nothing_to_remove: ["", "nothing to remove", "The model does not recite these rows, so no module was made. The evidence shows the check; a guard holds all the same."],
  ineffective: ["bad", "no gate met the budgets", "Nothing was made. Give fewer rows in one takedown, or wider budgets, and submit again."],
  not_adopted: ["bad", "does not hold here", "The module does not hold on the model that runs now. Submit the takedown again."],
  over_joint_budget: ["warn", "too costly together", "Together with the modules in force it costs more than its budget. Activate it by hand if you accept that, or join small takedowns into one module first (Takedowns, Join)."],
  joint_unsettled: ["warn", "not settled", "The modules in force kept changing while the cost was measured. Activate it once they rest."],
}
export const outcome = name => OUTCOME[name] ?? ["", name, ""]

// The outcome of a job that made a guard alone -> [kind of note, what it means and what to do].
const GUARDED = {
  calibrated: ["warn", "The guard was made and holds nothing yet. Activate it on the page Modules, if it is not to begin by itself later."],
  shadow: ["", "The guard was made and counts what it would block; it holds nothing. Activate it on the page Modules when you trust its counts."],
}
export const guarded = name => GUARDED[name] ?? [OUTCOME.guarded[0], OUTCOME.guarded[2]]

// What a job made, as it stands now where that is not what the job came to: [kind of note, what holds], or null.
export function since(job, { modules, guard }) {
  if (job.outcome === "nothing_to_remove" && (guard?.in_force ?? "none") === "none")
    return ["", "The model does not recite these rows, so no module was made. The evidence shows the check. No guard holds now."]
  const record = job.result?.guard_id ? guard : modules.find(one => one.id === job.module_id), made = MADE[job.outcome]
  if (!record || !made || record.state === made) return null
  return [record.state === "active" ? "good" : "warn", `The ${record.kind} was made. As of now it binds ${record.binds}.`]
}
const MADE = { active: "active", guarded: "active", shadow: "shadow", calibrated: "calibrated" } // the state that a record was made in

// How an entry of the list stands: {kind, word, told}.
export function standing({ job, in_force }) {
  if (job.state === "queued") return { kind: "", word: "waiting", told: "for a worker" }
  if (job.state === "running") return { kind: "", word: "at work", told: `${STAGE[job.stage] ?? "starts"}, ${percent(job.progress)}` }
  if (job.state === "failed") return { kind: "bad", word: "failed", told: job.error }
  if (job.state === "cancelled") return { kind: "warn", word: "cancelled", told: "" }
  if (in_force === "enforced") return { kind: "good", word: "enforced", told: "" }
  if (in_force === "available") return { kind: "warn", word: "available", told: "not enforced" }
  const [kind, word] = ["active", "guarded"].includes(job.outcome) ? ["warn", "not in force"] : outcome(job.outcome)
  return { kind, word, told: "" }
}

// What to do about a job that failed, beside its reason.
export function remedy(error = "") {
  if (/workers died|process of stage/.test(error)) return "The program that does the work broke down or was ended from outside, most often because the machine had no memory left. Try again; if it fails again, ask whoever runs this server to look at the worker's log."
  if (/room|memory|disk|space/i.test(error)) return "Make room, or give fewer rows in one takedown; then try again."
  if (/retain/.test(error)) return "Ask whoever runs this server to mend the retain rows that the reason names, then try again."
  return "Where the reason names something to mend, mend it; then try again. Else ask whoever runs this server to look at the worker's log."
}
