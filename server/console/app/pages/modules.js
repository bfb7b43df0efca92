// Modules and guards: what state each is in, whom it binds, what its gate does, and the changes an operator makes.
import { html } from "../../vendor/htm-preact.js"
import { Title } from "../parts.js"

export function Modules() {
  return html`<${Title} title="Modules" lead="Every module and guard, and which requests it binds." />`
}
