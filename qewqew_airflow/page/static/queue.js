// The page of one queue or topic: what it holds, how it was, and its batches.

import { $, age, brokenRow, clock, duration, h, kindCell, now, numberCell, peekButton, plural, secondsUntil, short, size, table,
  update } from "./elements.js";
import { RANGES, drawPlot } from "./plot.js";

const READER_COLUMNS = [["Reader", ".name"], ["Filter", ".w-filter"], ["Lag", ".number.w-count", "messages that it has not committed"],
  ["Delivered", ".number.w-small", "messages that are with a consumer, and not committed"],
  ["Lost", ".number.w-small", "messages that were removed before it got them"],
  ["In flight", ".number.w-small", "leased batches"], ["Returned", ".number.w-small"], ["Dead", ".number.w-small"], ["", ".w-peek.acts"]];
const BATCH_COLUMNS = [["State", ".w-state"], ["Batch", ".name"], ["Records", ".number.w-small"], ["Attempt", ".number.w-tiny"],
  ["Result", ".w-result"], ["Time", ".w-time"], ["", ".w-acts.acts"]];
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
    update($("main"), [back, title, h("p.empty", { key: "error", role: "alert" }, problem), ...batchesPart(route, connection, state)]);
    return;
  }
  const peek = { place: { [route.kind]: route.name }, title: route.name, ...(route.kind === "topic" ? { topic: row } : {}) };
  update($("main"), [back, title,
    h("div.facts.large", { key: "facts" }, facts(route.kind, row), peekButton(connection, peek, `the ${route.kind} ${route.name}`)),
    ...(route.kind === "topic" ? [readers(connection, row)] : []),
    h("section", { key: "plot", "aria-label": "How it was" },
      h("div.title", {}, h("h2", {}, "How it was"), h("div.choice", {}, RANGES.map(([hours, text]) => h("button.act", {
        type: "button", do: "range", payload: hours, "aria-pressed": String(hours === state.queue.hours) }, text)))),
      h("p.values", { id: "plot-values", "data-own": true }),
      h("div", { id: "plot", key: "plot", "data-own": true }),
      h("p.legend", {}, h("span.depth", {}, route.kind === "queue" ? "waiting" : "lag"), h("span.put", {}, "put"), h("span.drained", {}, "drained"))),
    ...batchesPart(route, connection, state)]);
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

// Batches

function batchesPart(route, connection, state) {
  const { batches, more, error } = state.queue;
  const parts = [h("h2", { key: "batches title" }, "Batches")];
  if (error) parts.push(h("p.error", { key: "batches error", role: "alert" }, error));
  else if (!batches) parts.push(h("p.empty", { key: "batches" }, "Reading the batches …"));
  else if (!batches.length) {
    parts.push(h("p.empty", { key: "batches" }, "No batch is remembered. A batch is made when a task leases records."));
  } else parts.push(table(`Batches of ${route.name}`, BATCH_COLUMNS, batches.map(batch => batchRow(route, connection, batch)), ".batches"));
  if (more) parts.push(h("p.quiet", { key: "more" }, "There are more batches: qewqew batches lists all."));
  return parts;
}

export const isSought = (route, batch) => batch.id === route.batch || (route.key && route.key === batch.key);

function batchRow(route, connection, batch) {
  const place = { [route.kind]: route.name, ...(batch.reader ? { reader: batch.reader } : {}) };
  const payload = { connection: route.connection, place, batch };
  const button = (act, text, danger) =>
    h(`button.act${danger ? ".danger" : ""}`, { type: "button", do: act, payload, "aria-label": `${text} batch ${batch.id}` }, text);
  const stuck = batch.state === "leased" && batch.owner?.life === "gone";
  const acts = [connection?.peek && batch.state !== "gone" && button("peekBatch", "Peek"),
    connection?.act && (batch.state === "dead" || stuck) && button("return", "Return"), connection?.act && batch.due && button("retry", "Retry now"),
    connection?.act && batch.state === "dead" && [button("put-back", "Put back"), button("drop", "Drop", true)]];
  const [state, title] = { acked: ["done", "acknowledged; its records are kept for a while"],
    gone: ["done", "acknowledged; its records are no longer kept"] }[batch.state] ?? [batch.state];
  return { key: `${batch.reader ?? ""} ${batch.id}`, classes: isSought(route, batch) ? ".sought" : "", cells: [
    h("td", {}, h(`span.badge.${batch.state}`, { title }, state), stuck && h("span.badge.dead", { title: batch.owner.why }, "stuck"),
      batch.due && h("div.quiet.small", { title: "It failed: the next lease may have it then." }, `due in ${duration(secondsUntil(batch.due))}`)),
    h("td", {}, owner(batch), batch.reader && h("div.quiet.small", {}, `reader ${batch.reader}`), h("code.small", {}, batch.id),
      stagers(batch), batch.reason && h("div.reason", {}, batch.reason), stuck && h("div.reason", {}, `Nobody works on it: ${batch.owner.why}.`)),
    h("td", { title: `${plural(batch.records, "record")}, ${plural(batch.bytes, "byte")}` }, short(batch.records)),
    numberCell(batch.attempt, ["lease"]), h("td", {}, result(batch)), h("td", {}, times(batch)), h("td", {}, acts)] };
}

// The lease key of our operators names a task instance.
function owner({ key, task }) {
  if (key === null) return h("span.zero", {}, "of a DAG that you may not see");
  if (!task) return h("div.owner", {}, h("code", {}, key));
  return [taskLink(task, key), h("div.quiet.small", {}, task.run)];
}

// To Airflow's page of a task instance
function taskLink(task, title) {
  const part = encodeURIComponent;
  const href = `../dags/${part(task.dag)}/runs/${part(task.run)}/tasks/${part(task.task)}` +
    (task.index < 0 ? "" : `/mapped/${task.index}`);
  return h("a", { href, target: "_top", do: "leave", title }, `${task.dag} / ${task.task}${task.index < 0 ? "" : ` [${task.index}]`}`);
}

const NAMED = 3; // of the tasks that have staged into a batch, of fields without a name

function stagers({ staged_by: by }) {
  if (!by) return null;
  const named = by.tasks.slice(0, NAMED).map(task => h("div", {}, taskLink(task, `${plural(task.records, "record")} in run ${task.run}`)));
  const rest = by.tasks.slice(NAMED).map(task => `${task.dag} / ${task.task} [${task.index}], ${task.run}`).join("\n");
  return h("div.small", {}, h("span.quiet", {}, "staged by"), named,
    by.count > NAMED && h("span.quiet", { title: rest }, `and ${plural(by.count - NAMED, "more task")}`));
}

// What the task that worked on it said of it, as Airflow keeps it
function result({ result }) {
  if (!result) return null;
  const { good, bad, reasons, unnamed, outputs, quarantine, note } = result;
  const why = Object.entries(reasons ?? {}).map(([reason, count]) => `${reason}: ${Number(count).toLocaleString("en")}`).join(", ");
  const listed = Array.isArray(outputs) ? outputs : [];
  const fields = Object.keys(unnamed?.fields ?? {});
  return [good !== undefined && h("div", {}, `${plural(Number(good), "good record")}`),
    bad ? h("div.reason", {}, `${plural(Number(bad), "bad record")}${why ? ` (${why})` : ""}${quarantine ? ` in ${quarantine}` : ""}`) : null,
    unnamed?.records ? h("div.small", { title: fields.join("\n") }, `${plural(Number(unnamed.records), "record")} with fields without a name`,
      fields.length > 0 && h("span.quiet", {}, `: ${fields.slice(0, NAMED).join(", ")}${fields.length > NAMED ? " …" : ""}`)) : null,
    listed.map(output => h("div.small", {}, `→ ${output.table ?? output.path ?? output.format ?? "output"}`,
      output.snapshot && h("span.quiet", {}, `, snapshot ${output.snapshot}`), output.again && h("span.quiet", {}, ", was there already"))),
    note && h("div.quiet.small", {}, note)];
}

// From staged to done, as far as it is known and has come
function times(batch) {
  const staged = batch.result?.oldest, done = batch.state === "acked" ? batch.since : null;
  const begun = staged ?? batch.leased;
  const seconds = (done ? Date.parse(done) : now()) / 1000 - Date.parse(begun) / 1000;
  const over = batch.state !== "gone" && begun && h("div", { title: staged ? "from staged to done" : "since it was leased first" },
    `${duration(Math.max(0, seconds))}${done ? "" : " so far"}`);
  return [over, staged && h("div.quiet.small", {}, `staged ${clock(staged)}`), batch.leased && h("div.quiet.small", {}, `leased ${clock(batch.leased)}`),
    done ? h("div.quiet.small", {}, `done ${clock(done)}`) : null,
    batch.since && !done && batch.state !== "leased" ? h("div.quiet.small", {}, `${batch.state} ${clock(batch.since)}`) : null,
    batch.expires && h("div.quiet.small", {}, `lease ends ${clock(batch.expires)}`)];
}
