// The pages, in the order of the menu. `scope`: what a key needs for it. `view`: a component that is given `path`, the parts of the
// address behind the page's own.
import { Activity } from "./pages/activity.js"
import { Audit } from "./pages/audit.js"
import { Keys } from "./pages/keys.js"
import { Modules } from "./pages/modules.js"
import { Playground } from "./pages/playground.js"
import { Takedowns } from "./pages/takedowns.js"

export const pages = [
  { route: "playground", title: "Playground", scope: "inference", view: Playground },
  { route: "takedowns", title: "Takedowns", scope: "admin", view: Takedowns },
  { route: "modules", title: "Modules", scope: "admin", view: Modules },
  { route: "activity", title: "Activity", scope: "metrics", view: Activity },
  { route: "keys", title: "Keys and policies", scope: "admin", view: Keys },
  { route: "audit", title: "Audit", scope: "admin", view: Audit },
]
