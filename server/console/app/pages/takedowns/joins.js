// What a new takedown joins (`options.joins`): takedowns whose module is active here, and whose rows one module is to have.
import { html } from "../../../vendor/htm-preact.js"
import { counted, percent } from "../../format.js"
import { Button, Empty } from "../../parts.js"
import { allModules, expected } from "../../standing.js"

// Modules that expire, or that came as files, cannot be joined.
export async function joinable() {
  const [modules] = await allModules()
  return modules.filter(module => module.kind === "module" && module.state === "active" && module.in_force !== "none" && module.takedown_id && !module.expires_at)
}

export function Joins({ modules, chosen, set }) {
  if (!modules.length) return html`<${Empty} title="There is nothing to join">A module of a takedown has to be active, and without an end, for that.</${Empty}>`
  const names = modules.map(module => module.name), all = names.every(name => chosen.includes(name))
  return html`<fieldset><legend>What it joins</legend>
    <div class="joins">${modules.map(module => html`<div key=${module.id}><label class="pick"><input type="checkbox" checked=${chosen.includes(module.name)}
        aria-describedby=${"of-" + module.id} onChange=${event => set(names.filter(name => name === module.name ? event.target.checked : chosen.includes(name)))} />${module.name}</label>
      <div class="hint" id=${"of-" + module.id}>Binds ${module.binds}${costs(module)}</div></div>`)}</div>
    <div class="row"><${Button} onClick=${() => set(all ? [] : names)}>${all ? "Choose none" : "Choose all"}</${Button}>
      <span class="hint" aria-live="polite">${chosen.length} of ${counted(names.length, "module")} chosen.</span></div>
  </fieldset>`
}

function costs(module) {
  const { retain } = expected(module)
  return retain === null ? "." : `; open at ${percent(retain)} of ordinary code.`
}
