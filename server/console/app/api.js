// Every call to the server. Errors are the API's own: message, field and code; a server that cannot be reached is told of once,
// in the banner.
import { announce, change, leave, session } from "./session.js"

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message)
    Object.assign(this, { status, param: error.param ?? null, code: error.code ?? null })
  }
}

// The answer of `path` as {status, body, headers}. `body` is sent as JSON, or as it is where it is FormData.
// `key`: another one than the session's. `raw`: the answer's text as it came, for what is signed. Throws ApiError; a key that is no longer good leads to the login.
export async function call(path, { method, body, headers = {}, signal, raw, key = session.key } = {}) {
  const answer = await reached(path, { method, body, headers, signal, key })
  const text = await answer.text().catch(error => lost(error, signal))
  const type = answer.headers.get("content-type") ?? ""
  return { status: answer.status, body: type.includes("json") && !raw ? read(text) : text, headers: answer.headers }
}

// Something before the server may answer in its place: a proxy with a login of its own, or a page of a network.
const ELSEWHERE = "what answered was not this server, but something before it, as a proxy that asks for a login"

function read(text) {
  try { return JSON.parse(text) } catch { throw new ApiError(502, { message: ELSEWHERE }) }
}

export const get = async (path, options) => (await call(path, options)).body
export const send = async (method, path, body, headers) => (await call(path, { method, body, headers })).body

// /console/state.json: who asks, and what there is. Throws as `call` does.
export async function look(options) {
  const state = await get("/console/state.json", options)
  if (!state?.caller) throw new ApiError(502, { message: ELSEWHERE })
  return state
}

// The events of a streamed answer, each parsed: `for await (const event of stream(path, body, {signal, onHeaders}))`.
export async function* stream(path, body, { signal, onHeaders } = {}) {
  const answer = await reached(path, { method: "POST", body, headers: {}, signal, key: session.key })
  onHeaders?.(answer.headers)
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  let left = ""
  for (;;) {
    const { value, done } = await reader.read().catch(error => lost(error, signal))
    if (done) return
    const lines = (left + value).split("\n")
    left = lines.pop()
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue
      const event = JSON.parse(line.slice(6))
      if (event.error) throw new ApiError(answer.status, event.error)
      yield event
    }
  }
}

// Whether an error is of a server that is away or cannot answer now: what it was asked may be asked again.
export const passing = error => error.status === 0 || error.status >= 500

// Where the server is: a proxy may have put it under a path of its own.
export const address = path => new URL("." + path, document.baseURI)

async function reached(path, { method, body, headers, signal, key }) {
  const sent = { ...headers }
  if (key) sent.Authorization = "Bearer " + key
  const plain = body instanceof FormData || body instanceof Blob
  if (body !== undefined && !plain) sent["Content-Type"] = "application/json"
  const options = { method: method ?? (body === undefined ? "GET" : "POST"), headers: sent, signal, cache: "no-store" }
  if (body !== undefined) options.body = plain ? body : JSON.stringify(body)
  const answer = await fetch(address(path), options).catch(error => lost(error, signal))
  if (answer.ok) return answer
  const error = await refused(answer)
  if (answer.status === 401 && key === session.key && session.state) {
    leave(key ? error.message : "a key has been made, so this server asks for one now")
    announce(session.reason)
  }
  throw error
}

async function refused(answer) {
  const text = await answer.text().catch(() => "")
  try {
    const { error } = JSON.parse(text)
    if (error.message) return new ApiError(answer.status, error)
  } catch { /* it is of something before the server */ }
  return new ApiError(answer.status, { message: `the server answered ${answer.status} ${answer.statusText}` })
}

function lost(error, signal) {
  if (signal?.aborted && signal.reason.name !== "TimeoutError") throw error
  change({ away: "The server does not answer. Trying again every second." })
  throw new ApiError(0, { message: "the server does not answer", code: "away" })
}
