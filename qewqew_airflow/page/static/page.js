// The page: asks for the state every few seconds while it can be seen, and changes what differs.
"use strict";

import { isSought } from "./batches.js";
import { actNow, confirmAct, confirmAll, peek } from "./dialogs.js";
import { $, h, setClock, update } from "./elements.js";
import { renderList } from "./list.js";
import { followPointer } from "./plot.js";
import { renderQueue } from "./queue.js";
import { ask, askPlace } from "./server.js";

const REFRESH = 5000, SAMPLES = 60000; // milliseconds
const state = {
  connections: [], histories: {}, lateAfter: 0, // of all queues
  queue: { batches: null, more: false, samples: [], hours: 24, error: null }, // of the one that has a page
};

// What is shown: the list, or with ?connection=…&queue=… (or topic=…) one queue; batch=ID or key=KEY is the batch that is sought.
// The link of a task opens Airflow's page around this one, and names the queue there.
function find() {
  if (!location.search && window.parent !== window) {
    try {
      const around = new URLSearchParams(window.parent.location.search);
      if (around.has("connection")) location.replace(`?${around}`);
    } catch { /* of another origin */ }
  }
  const asked = new URLSearchParams(location.search);
  const kind = ["queue", "topic"].find(name => asked.has(name));
  if (!asked.has("connection") || !kind) return null;
  return { connection: asked.get("connection"), kind, name: asked.get(kind), batch: asked.get("batch"), key: asked.get("key") };
}
const route = find();
let seeking = Boolean(route && (route.batch || route.key));

function render() {
  if (!route) {
    renderList(state);
    return;
  }
  const isNew = !$("plot");
  renderQueue(route, state);
  if (isNew && $("plot")) {
    followPointer($("plot"));
    renderQueue(route, state); // now there is a width to draw in
  }
  if (seeking && state.queue.batches?.some(batch => isSought(route, batch))) {
    seeking = false;
    const sought = document.querySelector("tr.sought"), folded = sought?.closest("details");
    if (folded) folded.open = true;
    sought?.scrollIntoView({ block: "center" });
  }
}

let timer, asked = 0, samplesAt = -Infinity;

async function refresh() {
  clearTimeout(timer);
  if (document.visibilityState !== "visible") return;
  const mine = ++asked;
  try {
    const sampling = performance.now() - samplesAt > SAMPLES;
    const [found] = await Promise.all([ask("data/state"), sampling && readSamples()]);
    if (mine !== asked) return;
    if (sampling) samplesAt = performance.now();
    setClock(found.now);
    [state.connections, state.lateAfter] = [found.connections, found.late_after];
    if (route) await readBatches();
    if (mine !== asked) return;
    render();
    $("status").className = "";
    $("status").textContent = `Updated ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    if (mine !== asked) return;
    $("status").className = "stale";
    $("status").textContent = state.connections.length ? `Not up to date: ${error.message}` : "";
    if (!state.connections.length) update($("main"), [h("p.error", { role: "alert", key: "failed" }, error.message)]);
  }
  timer = setTimeout(refresh, REFRESH);
}

// Without the samples, the rest is shown all the same.
async function readSamples() {
  try {
    if (route) state.queue.samples = (await askPlace("samples", route.connection, { [route.kind]: route.name }, { hours: state.queue.hours })).samples;
    else state.histories = await ask("data/history");
  } catch (error) {
    console.warn(error);
  }
}

async function readBatches() {
  const connection = state.connections.find(({ id, also }) => id === route.connection || also.includes(route.connection));
  const readers = connection?.topics.find(({ name }) => name === route.name)?.readers.filter(reader => !reader.error) ?? [];
  const places = route.kind === "queue" ? [{ queue: route.name }] : readers.map(({ name }) => ({ topic: route.name, reader: name }));
  try {
    const found = await Promise.all(places.map(async place => {
      const { batches, more } = await askPlace("batches", route.connection, place);
      return { batches: batches.map(batch => ({ ...batch, reader: place.reader })), more };
    }));
    Object.assign(state.queue, { batches: found.flatMap(({ batches }) => batches), more: found.some(({ more }) => more), error: null });
  } catch (error) {
    state.queue.error = error.message;
  }
}

// Clicks

const DO = {
  peek,
  peekBatch: peek,
  return: payload => confirmAct("return", payload),
  "put-back": payload => confirmAct("put-back", payload),
  drop: payload => confirmAct("drop", payload),
  retry: payload => confirmAct("retry", payload),
  returnAll: payload => confirmAll("return", payload),
  dropAll: payload => confirmAll("drop", payload),
  range: async hours => { state.queue.hours = hours; await readSamples(); render(); },
};

document.addEventListener("click", event => {
  const target = event.target.closest("[data-do], [data-close], #confirm-do");
  if (!target) return;
  if (target.id === "confirm-do") actNow(refresh);
  else if ("close" in target.dataset) target.closest("dialog").close();
  else if (target.dataset.do === "leave") leave(event, target);
  else DO[target.dataset.do](target.payload);
});
for (const name of ["search", "order"]) $(name).addEventListener("input", render);

// Airflow's iframe may not change the page around it (sandbox); that page itself, of the same origin, may follow a link.
function leave(event, link) {
  if (window.parent === window) return;
  const outside = window.parent.document;
  const copy = outside.createElement("a");
  copy.href = link.href;
  copy.target = event.ctrlKey || event.metaKey || event.shiftKey ? "_blank" : "_self";
  event.preventDefault();
  outside.body.append(copy);
  copy.click();
  copy.remove();
}

// The theme of Airflow's UI, if this is shown in it
try {
  const root = window.parent.document.documentElement;
  const follow = () => {
    const theme = ["dark", "light"].find(name => root.classList.contains(name));
    if (theme) document.documentElement.dataset.theme = theme;
    const ground = window.parent.getComputedStyle(root).backgroundColor;
    if (theme && ground !== "rgba(0, 0, 0, 0)") document.documentElement.style.setProperty("--ground", ground);
  };
  if (window.parent !== window) {
    new MutationObserver(follow).observe(root, { attributes: true, attributeFilter: ["class"] });
    follow();
  }
} catch { /* of another origin: the system's theme counts */ }

document.addEventListener("visibilitychange", refresh);
refresh();
