// Takedowns: all of them with what each binds; a new one (#/takedowns/new), or one that joins others (#/takedowns/join); older ones (#/takedowns/older/ID/ID); one with its job and report (#/takedowns/ID).
import { html, useLayoutEffect } from "../../vendor/htm-preact.js"
import { get } from "../api.js"
import { counted, time } from "../format.js"
import { Badge, Button, Cell, Empty, Problem, Table, Title, useData, useFocus } from "../parts.js"
import { New } from "./takedowns/new.js"
import { Shown } from "./takedowns/shown.js"
import { standing } from "./takedowns/words.js"

const PAGE = 100

export function Takedowns({ path }) {
  const [which] = path
  useFocus(path.join("/"))
  if (["new", "join"].includes(which)) return html`<${New} joining=${which === "join"} key=${which} />`
  if (which === "older") return html`<${List} turned=${path.slice(1)} key=${path.join("/")} />`
  return which ? html`<${Shown} id=${which} key=${which} />` : html`<${List} />`
}

// `turned`: the ids that the pages turned so far begin behind. They are in the address, so that the way back from a takedown leads to its page.
function List({ turned = [] }) {
  const after = turned.at(-1) ?? ""
  const turn = pages => { location.hash = ["#/takedowns", ...(pages.length ? ["older", ...pages] : [])].join("/") }
  useLayoutEffect(() => { if (after) scrollTo(0, 0) }, [])
  const { data, error } = useData(() => get(`/admin/v1/takedowns?limit=${PAGE}&after=${after}`), 2, [after])
  const takedowns = data?.data
  return html`<${Title} title="Takedowns" lead="What was asked to be forgotten, how far that is, and which requests it binds now.">
      ${takedowns?.length > 1 && html`<a class="button" href="#/takedowns/join">Join</a>`}
      <a class="button main" href="#/takedowns/new">New takedown</a></${Title}>
    <${Problem} error=${error} />
    ${takedowns?.length === 0 && html`<${Empty} title="Nothing was asked to be forgotten yet">
      Choose <a href="#/takedowns/new">New takedown</a> and give the rows. A dry run says first what it will take.</${Empty}>`}
    ${takedowns?.length > 0 && html`<${Table} stacked label="Takedowns" columns=${["Name", "State", "Binds", "Rows", "Claimant", "Received"]}>
      ${takedowns.map(line)}</${Table}>
      ${(after || data.has_more) && html`<div class="row"><${Button} disabled=${!after} onClick=${() => turn(turned.slice(0, -1))}>Newer</${Button}>
        <${Button} disabled=${!data.has_more} onClick=${() => turn([...turned, takedowns.at(-1).id])}>Older</${Button}></div>`}
      <p class="hint">${counted(takedowns.length, after ? "older takedown" : "takedown")}, the newest first.</p>`}`
}

function line(takedown) {
  const { kind, word, told } = standing(takedown)
  return html`<tr key=${takedown.id} role="row">
    <th scope="row" role="rowheader"><a href=${"#/takedowns/" + takedown.id}>${takedown.name}</a></th>
    <${Cell} of="State"><${Badge} kind=${kind}>${word}</${Badge}>${told && html`<div class="hint">${told}</div>`}</${Cell}>
    <${Cell} of="Binds" class="words">${takedown.binds}</${Cell}>
    <${Cell} of="Rows">${takedown.row_count.toLocaleString("en")}${takedown.purged_at && html`<div class="hint">erased</div>`}</${Cell}>
    <${Cell} of="Claimant">${takedown.notice.claimant ?? "-"}</${Cell}>
    <${Cell} of="Received" class="nowrap">${time(takedown.created_at)}</${Cell}>
  </tr>`
}
