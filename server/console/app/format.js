// Figures and times in words, alike on all pages.

// A share as per cent, with as many digits as it takes to see it: 0.0012 is "0.12 %".
export function percent(share) {
  if (share === null || share === undefined) return "-"
  const value = 100 * share
  return `${value === 0 ? "0" : value < 0.001 ? "< 0.001" : value.toPrecision(value < 1 ? 2 : 3)} %`
}

// A time, given in seconds since the epoch, on this computer's clock, and which zone that is: evidence is in UTC.
export function time(seconds) {
  if (!seconds) return "-"
  const at = new Date(1000 * seconds), two = number => String(number).padStart(2, "0")
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())} ${zone(-at.getTimezoneOffset())}`
}

// Minutes before Greenwich: "UTC", "UTC+14", "UTC-3:30".
function zone(ahead) {
  const minutes = Math.abs(ahead) % 60, hours = Math.floor(Math.abs(ahead) / 60)
  return ahead ? `UTC${ahead > 0 ? "+" : "-"}${hours}${minutes ? `:${String(minutes).padStart(2, "0")}` : ""}` : "UTC"
}

// A duration in seconds: "4 s", "3 min 20 s", "2 h 5 min".
export function duration(seconds) {
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60)
  if (!minutes) return `${seconds < 9.95 ? Number(seconds.toFixed(1)) : whole} s`
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`
}

// A count with its noun: "1 row", "2 rows".
export const counted = (count, noun, nouns = noun + "s") => `${count.toLocaleString("en")} ${count === 1 ? noun : nouns}`

// The beginning of a digest, as the server shortens it in labels.
export const short = digest => digest ? digest.slice(0, 12) : "-"

// Bytes: "512 B", "3.4 MB", "12 GB".
export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"], step = count < 1 ? 0 : Math.min(4, Math.floor(Math.log10(count) / 3))
  const value = count / 1000 ** step
  return `${value < 10 && step ? value.toFixed(1) : Math.round(value)} ${units[step]}`
}

// A measured number with as many digits as one reads: 0.0123, 4.57, 1,204.
export function figure(value) {
  if (value === null || value === undefined) return "-"
  if (typeof value !== "number") return String(value)
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en")
  return String(Number(value.toPrecision(3)))
}

// Have the browser save `parts` as the file `name`.
export function save(name, parts, type) {
  const link = document.createElement("a")
  link.href = URL.createObjectURL(new Blob(parts, { type }))
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000)
}
