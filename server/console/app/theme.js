// Light or dark: the system's choice until the switch is used. The choice is the only thing that this console keeps.
import { html, useState } from "../vendor/htm-preact.js"

const KEPT = "unbind-theme", NEXT = { auto: "light", light: "dark", dark: "auto" }
const NAMES = { auto: "system", light: "light", dark: "dark" }

function kept() {
  try { return localStorage.getItem(KEPT) ?? "auto" } catch { return "auto" }
}

function show(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme
  else document.documentElement.dataset.theme = theme
}

show(kept())

export function ThemeSwitch() {
  const [theme, set] = useState(kept)
  function next() {
    const chosen = NEXT[theme] ?? "auto"
    show(chosen)
    try { localStorage.setItem(KEPT, chosen) } catch { /* it holds until the reload */ }
    set(chosen)
  }
  return html`<button class="quiet" onClick=${next} aria-label=${"Colours: " + NAMES[theme] + ". Change"}>Colours: ${NAMES[theme]}</button>`
}
