// What a completion is without modules and with them, side by side.
import { html } from "../../vendor/htm-preact.js"
import { Title } from "../parts.js"

export function Playground() {
  return html`<${Title} title="Playground" lead="One prompt, completed without modules and with them." />`
}
