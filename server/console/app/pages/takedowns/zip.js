// Files to one .zip, which is how the API takes a folder. Each is deflated by the browser.
const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? 0xedb88320 ^ (byte >>> 1) : byte >>> 1
  return byte
})
const UTF8 = 0x0800, DEFLATED = 8, VERSION = 20, DAY = 0x0021 // the format's first day: the same files give the same archive

function crc32(bytes) {
  let crc = 0xffffffff
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 0xff] ^ (crc >>> 8)
  return (crc ^ 0xffffffff) >>> 0
}

// `numbers`: pairs of bytes and value, little-endian.
function packed(...numbers) {
  const view = new DataView(new ArrayBuffer(numbers.reduce((sum, [size]) => sum + size, 0)))
  let at = 0
  for (const [size, value] of numbers) {
    size === 2 ? view.setUint16(at, value, true) : view.setUint32(at, value, true)
    at += size
  }
  return view
}

// `files`: [{name, file}], `file` a Blob. Returns a Blob.
export async function zipped(files) {
  const parts = [], entries = []
  let at = 0
  for (const { name, file } of files) {
    const bytes = new Uint8Array(await file.arrayBuffer()), label = new TextEncoder().encode(name)
    const deflated = new Blob([bytes]).stream().pipeThrough(new CompressionStream("deflate-raw"))
    const body = await new Response(deflated).arrayBuffer()
    const shared = [[2, VERSION], [2, UTF8], [2, DEFLATED], [2, 0], [2, DAY], [4, crc32(bytes)], [4, body.byteLength],
      [4, bytes.length], [2, label.length], [2, 0]]
    entries.push(packed([4, 0x02014b50], [2, VERSION], ...shared, [2, 0], [2, 0], [2, 0], [4, 0], [4, at]), label)
    parts.push(packed([4, 0x04034b50], ...shared), label, body)
    at += 30 + label.length + body.byteLength
  }
  const length = entries.reduce((sum, entry) => sum + entry.byteLength, 0)
  const end = packed([4, 0x06054b50], [2, 0], [2, 0], [2, files.length], [2, files.length], [4, length], [4, at], [2, 0])
  return new Blob([...parts, ...entries, end], { type: "application/zip" })
}
