// One chart over time: lines on a canvas, with a legend in text that shows the newest figures, or those under the pointer.
import { html, useEffect, useRef, useState } from "../../../vendor/htm-preact.js"
import uPlot from "../../../vendor/uPlot.esm.js"
import { figure } from "../../format.js"

const HEIGHT = 190, SHORT = 600 // pixels; seconds of which the axis tells each

const two = number => String(number).padStart(2, "0")
function clock(chart, times) {
  const close = chart.scales.x.max - chart.scales.x.min < SHORT
  return times.map(seconds => {
    const at = new Date(1000 * seconds)
    return `${two(at.getHours())}:${two(at.getMinutes())}${close ? ":" + two(at.getSeconds()) : ""}`
  })
}
export const COLOURS = 6

// `series`: [{label, values, colour (1 to 6), dashed}]; `at`: their times; `shown`: a figure as text; `top`: of the axis where all is 0.
export function Chart({ title, at, series, shown = figure, top = 1, children }) {
  const place = useRef(null), swatches = useRef([]), plot = useRef(null), [under, setUnder] = useState(null)
  const drawn = `${series.map(one => one.label).join("|")}`
  const colour = number => getComputedStyle(swatches.current[number] ?? document.body).color
  const text = () => getComputedStyle(place.current).color, line = () => getComputedStyle(place.current).borderTopColor

  useEffect(() => {
    const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui" }
    const made = new uPlot({
      width: place.current.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { drag: { x: false, y: false }, y: false },
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : top] } },
      axes: [{ ...axis, space: 80, size: 32, values: clock }, { ...axis, size: 76, values: (_, values) => values.map(shown) }],
      series: [{}, ...series.map((one, number) => ({ stroke: () => colour(number), width: one.dashed ? 1.5 : 2, dash: one.dashed ? [6, 5] : undefined, points: { show: false }, spanGaps: !!one.dashed }))],
      hooks: { setCursor: [chart => setUnder(chart.cursor.idx ?? null)] },
    }, [at, ...series.map(one => one.values)], place.current)
    plot.current = made
    const resized = new ResizeObserver(() => made.setSize({ width: place.current.clientWidth, height: HEIGHT }))
    const repaint = () => made.redraw(false)
    const theme = new MutationObserver(repaint), system = matchMedia("(prefers-color-scheme: dark)")
    resized.observe(place.current)
    theme.observe(document.documentElement, { attributes: true })
    system.addEventListener("change", repaint)
    return () => { resized.disconnect(); theme.disconnect(); system.removeEventListener("change", repaint); made.destroy() }
  }, [drawn])
  useEffect(() => plot.current.setData([at, ...series.map(one => one.values)]), [at.at(-1), at.length, drawn])

  const where = under ?? at.length - 1
  const told = series.map(one => `${one.label} ${shown(one.values.at(-1))}`).join(", ")
  return html`<figure class="card chart"><figcaption><h2>${title}</h2>
      <ul class="lines">${series.map((one, number) => html`<li key=${one.label}>
        <span class=${`swatch line-${one.colour}${one.dashed ? " dashed" : ""}`} ref=${element => { swatches.current[number] = element }}></span>
        ${one.label} <strong>${shown(one.values[where])}</strong></li>`)}</ul></figcaption>
    <div class="plot" role="img" aria-label=${`${title}. Newest: ${told}. The figures are in the table below the charts.`} ref=${place}></div>
    ${children}</figure>`
}
