// The pages, in the order of the menu. `scope`: what a key needs for it. `view`: a component that is given `path`, the parts of the
// address behind the page's own.
import { Modules } from "./pages/modules.js"
import { Playground } from "./pages/playground.js"

export const pages = [
  { route: "playground", title: "Playground", scope: "inference", view: Playground },
  { route: "modules", title: "Modules", scope: "admin", view: Modules },
]
