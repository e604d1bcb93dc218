// The page of one queue or topic: what is wrong, what it holds, how it was, and its batches.

import { batchesPart, deadPart } from "./batches.js";
import { $, age, brokenRow, h, kindCell, numberCell, peekButton, plural, short, size, table, update } from "./elements.js";
import { RANGES, drawPlot } from "./plot.js";

const READER_COLUMNS = [["Reader", ".name"], ["Filter", ".w-filter"], ["Lag", ".number.w-count", "messages that it has not committed"],
  ["Delivered", ".number.w-small", "messages that are with a consumer, and not committed"],
  ["Lost", ".number.w-small", "messages that were removed before it got them"],
  ["In flight", ".number.w-small", "leased batches"], ["Returned", ".number.w-small"], ["Dead", ".number.w-small"], ["", ".w-peek.acts"]];
const QUEUE_WORDS = { depth: "Records that wait", rate: "Records per minute", waiting: "waiting" };
const TOPIC_WORDS = { depth: "Lag of the slowest reader, messages", rate: "Messages per minute", waiting: "behind" };

// route: { connection, kind: "queue" or "topic", name, batch, key }; state.queue: { batches, more, samples, hours, error }
export function renderQueue(route, state) {
  const connection = state.connections.find(({ id, also }) => id === route.connection || also.includes(route.connection));
  const row = connection?.[`${route.kind}s`].find(({ name }) => name === route.name);
  const back = h("p.back", { key: "back" }, h("a", { href: "?all" }, "← All queues"));
  const title = h("div.title", { key: "title" }, h("h2", {}, `${route.kind === "queue" ? "Queue" : "Topic"} ${route.name}`),
    h("span.quiet", {}, `connection ${route.connection}`), connection?.directory && h("code.directory", {}, connection.directory));
  $("summary").textContent = "";
  $("tools").hidden = true;
  if (!row || row.error || connection.error) {
    const problem = row?.error ?? connection?.error ?? (connection ? `There is no ${route.kind} of this name now; an empty closed queue leaves no files.`
      : "There is no such connection of type QewQew that you may see.");
    update($("main"), [back, title, h("p.empty", { key: "error", role: "alert" }, problem), ...deadPart(route, connection, state.queue),
      ...batchesPart(route, connection, state.queue)]);
    return;
  }
  const peek = { place: { [route.kind]: route.name }, title: route.name, ...(route.kind === "topic" ? { topic: row } : {}) };
  update($("main"), [back, title,
    h("div.facts.large", { key: "facts" }, facts(route.kind, row), peekButton(connection, peek, `the ${route.kind} ${route.name}`)),
    ...deadPart(route, connection, state.queue), ...(route.kind === "topic" ? [readers(connection, row)] : []),
    h("section", { key: "plot", "aria-label": "How it was" },
      h("div.title", {}, h("h2", {}, "How it was"), h("div.choice", {}, RANGES.map(([hours, text]) => h("button.act", {
        type: "button", do: "range", payload: hours, "aria-pressed": String(hours === state.queue.hours) }, text)))),
      h("p.values", { id: "plot-values", "data-own": true }),
      h("div", { id: "plot", key: "plot", "data-own": true }),
      h("p.legend", {}, h("span.depth", {}, route.kind === "queue" ? "waiting" : "lag"), h("span.put", {}, "put"), h("span.drained", {}, "drained"))),
    ...batchesPart(route, connection, state.queue)]);
  drawPlot(state.queue.samples, state.queue.hours, route.kind === "queue" ? QUEUE_WORDS : TOPIC_WORDS);
}

function facts(kind, row) {
  const fact = (text, value, title) => h("span", { title }, `${text} `, h("b", {}, value));
  const common = [fact("Size", size(row.bytes), `${plural(row.bytes, "byte")}, ${plural(row.on_disk, "byte")} on disk`), fact("Oldest", age(row.oldest))];
  return kind === "queue"
    ? [fact("Waiting", short(row.waiting), plural(row.waiting, "record")), ...common, fact("In flight", short(row.leased)),
      fact("Returned", short(row.returned)), fact("Dead", short(row.dead))]
    : [fact("Messages", short(row.messages), plural(row.messages, "message")), ...common, fact("Lag", short(row.waiting)),
      fact("Readers", short(row.readers.length))];
}

function readers(connection, row) {
  if (!row.readers.length) {
    return h("p.empty", { key: "readers" }, "Nobody reads this topic yet. A reader is made by the first task or sensor that names it.");
  }
  return table(`Readers of ${row.name}`, READER_COLUMNS, row.readers.map(reader => reader.error ? brokenRow(reader) : ({ key: reader.name, cells: [
    h("td", {}, reader.name), h("td", {}, reader.filter ? h("code", {}, reader.filter) : h("span.zero", {}, "all")),
    numberCell(reader.lag, ["message"]), numberCell(reader.in_flight, ["message"]), numberCell(reader.lost, ["message"]),
    kindCell(reader.leased, "leased"), kindCell(reader.returned, "returned"), kindCell(reader.dead, "dead"),
    h("td", {}, peekButton(connection, { place: { topic: row.name, reader: reader.name }, title: row.name, topic: row },
      `what the reader ${reader.name} gets next`))] })));
}
