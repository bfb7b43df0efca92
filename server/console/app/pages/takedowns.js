// Takedowns: all of them with what each binds; a new one (#/takedowns/new), or one that joins others (#/takedowns/join); older ones (#/takedowns/older/ID/ID), or those found
// (#/takedowns/find/TEXT); one with its job and report (#/takedowns/ID).
import { html, useLayoutEffect, useState } from "../../vendor/htm-preact.js"
import { get } from "../api.js"
import { counted, time } from "../format.js"
import { Badge, Button, Cell, Empty, Field, Problem, Table, Title, useData, useFocus } from "../parts.js"
import { New } from "./takedowns/new.js"
import { Shown } from "./takedowns/shown.js"
import { standing } from "./takedowns/words.js"

const PAGE = 100

export function Takedowns({ path }) {
  const finds = path[0] === "find", [which, ...behind] = finds ? path.slice(2) : path
  useFocus(path.join("/"))
  if (["new", "join"].includes(which)) return html`<${New} joining=${which === "join"} key=${which} />`
  if (!which || which === "older") return html`<${List} find=${finds ? path[1] ?? "" : ""} turned=${behind} key=${path.join("/")} />`
  return html`<${Shown} id=${which} key=${which} />`
}

// `find`: what is looked for; `turned`: the ids that the pages turned so far begin behind. They are in the address, so that the way back from
// a takedown leads to its page.
function List({ find, turned }) {
  const after = turned.at(-1) ?? "", [sought, seek] = useState(find)
  const go = (text, pages) => {
    location.hash = ["#/takedowns", ...(text ? ["find", encodeURIComponent(text)] : []), ...(pages.length ? ["older", ...pages] : [])].join("/")
  }
  useLayoutEffect(() => { if (after) scrollTo(0, 0) }, [])
  const { data, error } = useData(() => get(`/admin/v1/takedowns?limit=${PAGE}&after=${after}&find=${encodeURIComponent(find)}`), 2, [after, find])
  const takedowns = data?.data
  return html`<${Title} title="Takedowns" lead="What was asked to be forgotten, how far that is, and which requests it binds now.">
      ${takedowns?.length > 1 && html`<a class="button" href="#/takedowns/join">Join</a>`}
      <a class="button main" href="#/takedowns/new">New takedown</a></${Title}>
    <${Problem} error=${error} />
    ${(find || takedowns?.length > 0) && html`<form class="row find" role="search" onSubmit=${event => { event.preventDefault(); go(sought.trim(), []) }}>
      <${Field} label="Find" id="find"><input id="find" type="search" maxlength="200" placeholder="In names and notices" value=${sought}
        onInput=${event => seek(event.target.value)} /></${Field}>
      <button>Show</button>${find && html`<button type="button" onClick=${() => go("", [])}>Show all</button>`}</form>`}
    ${takedowns?.length === 0 && find && html`<${Empty} title="No takedown is like that">Names and notices are looked through. Ask for less, or show all.</${Empty}>`}
    ${takedowns?.length === 0 && !find && html`<${Empty} title="Nothing was asked to be forgotten yet">
      Choose <a href="#/takedowns/new">New takedown</a> and give the rows. A dry run says first what it will take.</${Empty}>`}
    ${takedowns?.length > 0 && html`<${Table} stacked label="Takedowns" columns=${["Name", "State", "Binds", "Rows", "Claimant", "Received"]}>
      ${takedowns.map(line)}</${Table}>
      ${(after || data.has_more) && html`<div class="row"><${Button} disabled=${!after} onClick=${() => go(find, turned.slice(0, -1))}>Newer</${Button}>
        <${Button} disabled=${!data.has_more} onClick=${() => go(find, [...turned, takedowns.at(-1).id])}>Older</${Button}></div>`}
      <p class="hint">${counted(takedowns.length, after ? "older takedown" : "takedown")}${find && ` with “${find}”`}, the newest first.</p>`}`
}

function line(takedown) {
  const { kind, word, told } = standing(takedown)
  return html`<tr key=${takedown.id} role="row">
    <th scope="row" role="rowheader"><a href=${"#/takedowns/" + takedown.id}>${takedown.name}</a></th>
    <${Cell} of="State"><${Badge} kind=${kind}>${word}</${Badge}>${told && html`<div class="hint">${told}</div>`}</${Cell}>
    <${Cell} of="Binds" class="words">${takedown.binds}</${Cell}>
    <${Cell} of="Rows">${takedown.row_count.toLocaleString("en")}${takedown.purged_at && html`<div class="hint">erased</div>`}</${Cell}>
    <${Cell} of="Claimant" class="breaking">${takedown.notice.claimant ?? "-"}</${Cell}>
    <${Cell} of="Received" class="nowrap">${time(takedown.created_at)}</${Cell}>
  </tr>`
}
