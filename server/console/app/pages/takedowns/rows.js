// The three ways to give rows, and what each sends.
import { html } from "../../../vendor/htm-preact.js"
import { counted } from "../../format.js"
import { Field } from "../../parts.js"
import { zipped } from "./zip.js"

const AS_IT_IS = /\.(jsonl|ndjson|zip|tar\.gz|tgz)$/i
const WAYS = { paste: "Paste", file: "File or archive", folder: "Folder" }
export const NO_ROWS = { way: "paste", text: "", files: [], include: "", exclude: "" }

const isLines = text => text.trimStart().startsWith("{")
// The rows of a JSON list of rows; null where it is none: then it is code.
function inList(text) {
  if (!text.trimStart().startsWith("[")) return null
  try {
    const found = JSON.parse(text)
    return found.length && found.every(row => typeof (row?.text ?? row?.prompt) === "string") ? found : null
  } catch { return null }
}
const listed = text => text.split(",").map(part => part.trim()).filter(Boolean)
const hidden = file => file.webkitRelativePath.split("/").slice(1).some(part => part.startsWith("."))
const wanted = rows => (rows.way === "folder" ? rows.files.filter(file => !hidden(file)) : rows.files)

// The rows of a request: {rows} for JSON, or {file, name, include, exclude} for a form; null where none are given.
export async function given(rows) {
  if (rows.way === "paste") {
    if (!rows.text.trim()) return null
    return isLines(rows.text) ? { file: new Blob([rows.text]), name: "pasted.jsonl" } : { rows: inList(rows.text) ?? [{ text: rows.text }] }
  }
  const files = wanted(rows)
  if (!files.length) return null
  for (const file of files) await file.slice(0, 1).arrayBuffer().catch(() => {
    throw { message: `rows: '${file.name}' cannot be read any more, as it was changed, moved or deleted since; choose it again`, param: "rows" }
  })
  const globs = { include: listed(rows.include), exclude: listed(rows.exclude) }
  if (rows.way === "file" && files.length === 1 && AS_IT_IS.test(files[0].name)) return { file: files[0], name: files[0].name, ...globs }
  const named = files.map(file => ({ name: file.webkitRelativePath || file.name, file }))
  return { file: await zipped(named), name: "files.zip", ...globs }
}

export function Rows({ rows, set }) {
  const change = values => set({ ...rows, ...values })
  return html`<fieldset><legend>The rows</legend>
    <div class="row choices">${Object.entries(WAYS).map(([way, label]) => html`<label class="pick" key=${way}><input type="radio" name="way"
      checked=${rows.way === way} onChange=${() => change({ way, files: [] })} />${label}</label>`)}</div>
    ${rows.way === "paste" ? html`<${Field} label="Rows or code" id="rows" hint=${pasted(rows.text)}>
        <textarea id="rows" rows="9" spellcheck=${false} aria-describedby="read-as" value=${rows.text}
          onInput=${event => change({ text: event.target.value })} /></${Field}>`
      : html`<${Field} label=${rows.way === "file" ? "Files" : "Folder"} id="files" hint=${picked(rows)}>
          <input id="files" type="file" multiple key=${rows.way} webkitdirectory=${rows.way === "folder"}
            onChange=${event => change({ files: [...event.target.files] })} /></${Field}>
        <div class="two"><${Field} label="Only files like" id="include" hint="Patterns with commas between them: *.py, src/*">
            <input id="include" value=${rows.include} onInput=${event => change({ include: event.target.value })} /></${Field}>
          <${Field} label="Leave out files like" id="exclude">
            <input id="exclude" value=${rows.exclude} onInput=${event => change({ exclude: event.target.value })} /></${Field}></div>`}
  </fieldset>`
}

function pasted(text) {
  if (!text.trim()) return html`<span id="read-as">JSON lines, each with <code>text</code>, or with <code>prompt</code> and <code>continuation</code>.
    Anything else is taken for code: one row.</span>`
  const list = inList(text), count = list?.length ?? text.split("\n").filter(line => line.trim()).length
  return html`<span id="read-as">Read as ${list ? `a JSON list: ${counted(count, "row")}` : isLines(text) ? counted(count, "JSON line") : `code: one row of ${counted(count, "line")}`}.</span>`
}

function picked(rows) {
  const left = rows.files.length - wanted(rows).length
  if (rows.files.length) return `${counted(wanted(rows).length, "file")} chosen.${left ? ` ${counted(left, "file")} in hidden folders or hidden themselves are left out.` : ""}`
  return rows.way === "folder" ? "Its text files are cut into rows of at most 60 lines; all others are skipped."
    : "JSON lines (.jsonl), an archive (.zip, .tar.gz), or source files."
}
