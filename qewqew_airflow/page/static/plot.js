// The plot of a queue: what waited, and what was put and drained each minute. Drawn again, at the width that there is, whenever
// the samples, the width or the place of the pointer change.

import { $, h, now, plural, short, update } from "./elements.js";

const LEFT = 56, RIGHT = 14, TOP = 22, PANEL = 150, BETWEEN = 44, BOTTOM = 26;
const HEIGHT = TOP + 2 * PANEL + BETWEEN + BOTTOM;
const MINUTE = 60000;
const TIME_STEPS = [5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880].map(minutes => minutes * MINUTE);

export const RANGES = [[1, "1 hour"], [6, "6 hours"], [24, "24 hours"], [48, "2 days"], [336, "14 days"]];
let drawn = null; // what the pointer looks up: { samples, hours, x, width }
let chosen = null; // number of the sample whose values are shown

// samples: [milliseconds since the epoch, depth, put, drained, in how many minutes], the oldest first
export function drawPlot(samples, hours, words) {
  const width = Math.max(240, $("plot").clientWidth), right = width - RIGHT;
  const end = now(), begin = end - hours * 60 * MINUTE;
  const shown = samples.filter(([at]) => at >= begin);
  const x = at => LEFT + (right - LEFT) * (at - begin) / (end - begin);
  const points = shown.map(([at, depth, put, drained, minutes]) =>
    ({ at, depth, put: minutes ? put / minutes : null, drained: minutes ? drained / minutes : null, minutes }));
  if (chosen !== null && chosen >= points.length) chosen = null;
  drawn = { points, hours, x, samples, words };
  const at = chosen === null ? null : x(points[chosen].at).toFixed(1);
  const below = TOP + PANEL + BETWEEN;
  const depth = panel(TOP, [["depth", points.map(({ depth }) => depth)]], words.depth);
  const rates = panel(below, [["put", points.map(({ put }) => put)], ["drained", points.map(({ drained }) => drained)]], words.rate);

  function panel(top, series, title) {
    const most = niceAbove(Math.max(1, ...series.flatMap(([, values]) => values.filter(value => value !== null))));
    const y = value => top + PANEL - PANEL * value / most;
    const grid = [0, 1, 2, 3, 4].map(part => part * most / 4);
    return [h("text.title", { x: 4, y: top - 9 }, title),
      grid.map(value => [h("line.grid", { x1: LEFT, x2: right, y1: y(value), y2: y(value) }),
        h("text.tick.y", { x: LEFT - 6, y: y(value) + 4 }, tickText(value))]),
      series.map(([kind, values]) => h(`path.${kind}`, { d: path(points, values, x, y) })),
      chosen === null ? null : series.map(([kind, values]) => values[chosen] === null ? null
        : h(`circle.${kind}`, { cx: at, cy: y(values[chosen]).toFixed(1), r: 3.5 }))];
  }

  const text = points.length
    ? `${words.depth} from ${short(Math.min(...points.map(({ depth }) => depth)))} to ${short(Math.max(...points.map(({ depth }) => depth)))}`
    : "no samples yet";
  update($("plot"), [h("svg.plot", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img", tabindex: 0,
    "aria-label": `Plot: ${text}. The arrow keys go from sample to sample.` },
  depth, rates, timeTicks(begin, end, x, right - LEFT, TOP + 2 * PANEL + BETWEEN),
  at === null ? null : h("line.cursor", { x1: at, x2: at, y1: TOP, y2: below + PANEL }))]);
  $("plot-values").textContent = chosen === null ? describeRange(points) : describe(points[chosen], words);
}

export const redrawPlot = () => { if (drawn && $("plot")) drawPlot(drawn.samples, drawn.hours, drawn.words); };

// A path through what is known: a pause where nobody looked, or nothing is known, is a gap
function path(points, values, x, y) {
  let text = "", before = null;
  points.forEach(({ at, minutes }, place) => {
    const value = values[place];
    const joined = before !== null && at - before < Math.max(6, 2.5 * minutes) * MINUTE;
    if (value !== null) text += `${joined ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}${joined ? "" : "h0.1"}`;
    before = value === null ? null : at;
  });
  return text;
}

function timeTicks(begin, end, x, width, bottom) {
  const step = TIME_STEPS.find(length => (end - begin) / length * 64 <= width) ?? TIME_STEPS.at(-1);
  const offset = new Date(begin).getTimezoneOffset() * MINUTE; // ticks at round local times
  const ticks = [];
  for (let at = Math.ceil((begin - offset) / step) * step + offset; at <= end; at += step) ticks.push(at);
  const format = step >= 1440 * MINUTE ? { month: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit", hour12: false };
  return ticks.filter(at => x(at) > LEFT + 12 && x(at) < LEFT + width - 12).map(at => [
    h("line.grid", { x1: x(at), x2: x(at), y1: bottom, y2: bottom + 4 }),
    h("text.tick.x", { x: x(at), y: bottom + 18 }, new Date(at).toLocaleString([], format))]);
}

function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 8, 10].map(factor => factor * power).find(nice => nice >= value);
}

const tickText = value => value >= 100000 ? short(value) : Number(value.toPrecision(3)).toLocaleString("en");
const perMinute = value => value === null ? "?" : tickText(value);

function describe({ at, depth, put, drained, minutes }, words) {
  const when = new Date(at).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  const rates = put === null ? "put and drained are not known" : `${perMinute(put)} put/min · ${perMinute(drained)} drained/min`;
  return `${when}: ${depth.toLocaleString("en")} ${words.waiting} · ${rates}${minutes > 1 ? ` (over ${minutes} min)` : ""}`;
}

function describeRange(points) {
  if (!points.length) return "There are no samples of this time. One is taken each minute while the API server runs.";
  const total = name => Math.round(points.reduce((sum, point) => sum + (point[name] ?? 0) * point.minutes, 0));
  return `${plural(points.length, "sample")}: ${total("put").toLocaleString("en")} put, ${total("drained").toLocaleString("en")} drained. Point at the plot for values.`;
}

// The pointer and the arrow keys choose a sample

export function followPointer(element) {
  const choose = number => { chosen = number; redrawPlot(); };
  element.addEventListener("pointermove", event => {
    if (!drawn?.points.length) return;
    const at = event.clientX - element.getBoundingClientRect().left;
    const distances = drawn.points.map(point => Math.abs(drawn.x(point.at) - at));
    choose(distances.indexOf(Math.min(...distances)));
  });
  element.addEventListener("pointerleave", () => choose(null));
  element.addEventListener("keydown", event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], last = (drawn?.points.length ?? 0) - 1;
    if (!step || last < 0) return;
    event.preventDefault();
    choose(chosen === null ? last : Math.min(last, Math.max(0, chosen + step)));
  });
  new ResizeObserver(redrawPlot).observe(element);
}
