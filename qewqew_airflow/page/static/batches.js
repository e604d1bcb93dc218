// The batches of a queue or topic: the dead ones by what they are dead of, and a table of the others.

import { age, clock, duration, h, now, numberCell, plural, secondsUntil, short, sum, table } from "./elements.js";

const BATCH_COLUMNS = [["State", ".w-state"], ["Batch", ".name"], ["Records", ".number.w-small"], ["Attempt", ".number.w-tiny"],
  ["Result", ".w-result"], ["Time", ".w-time"], ["", ".w-acts.acts"]];
const DEAD_COLUMNS = BATCH_COLUMNS.filter(([text]) => !["State", "Result"].includes(text));

// What is wrong comes first: a row for each cause of dead batches, that of the most batches first

export function deadPart(route, connection, { batches }) {
  const dead = (batches ?? []).filter(({ state }) => state === "dead");
  if (!dead.length) return [];
  const groups = [...byCause(dead)].sort(([, left], [, right]) => right.length - left.length);
  return [h("section.problems", { key: "dead", "aria-label": "Dead batches" },
    h("h2", {}, plural(dead.length, "dead batch", "dead batches"), groups.length > 1 && ` of ${groups.length} causes`),
    groups.map(([key, some]) => causePart(route, connection, key, some)))];
}

// The server says the cause of each, and hides that and the key of what the user may not see.
export const byCause = dead => Map.groupBy(dead, ({ reader, key, cause }) => JSON.stringify([reader, key === null, cause]));

function causePart(route, connection, key, batches) {
  const [{ reader, cause, reason }] = batches, hidden = batches[0].key === null, several = batches.length > 1;
  const told = hidden ? "of a DAG that you may not see" : batches.every(batch => batch.reason === reason) ? reason : cause;
  const times = batches.map(({ since }) => since).sort(), ages = new Set([age(times[0]), age(times.at(-1))]);
  const payload = { connection: route.connection, place: placeOf(route, reader), batches, told };
  const all = (act, text, danger) => h(`button.act${danger ? ".danger" : ""}`, { type: "button", do: act, payload,
    "aria-label": `${text} ${batches.length} dead batches: ${told}` }, text);
  const rows = table(`Dead batches: ${told}`, DEAD_COLUMNS, batches.map(batch => batchRow(route, connection, batch, told)), ".batches");
  return h("article", { key },
    h("div.facts.large", {}, h("span.badge.dead", {}, `${short(batches.length)} dead`), h("span", {}, plural(sum(batches, "records"), "record")),
      reader && h("span", {}, `reader ${reader}`),
      h("span", { title: `since ${[...new Set([times[0], times.at(-1)])].map(clock).join(" to ")}` }, `${[...ages].join(" to ")} ago`),
      connection?.act && !hidden && several && h("span.all", {}, all("returnAll", "Return all"), all("dropAll", "Drop all", true))),
    h(`p${hidden ? ".quiet" : ".reason"}`, {}, told),
    several ? h("details", {}, h("summary", {}, `Show ${batches.length} batches`), rows) : rows);
}

const placeOf = (route, reader) => ({ [route.kind]: route.name, ...(reader ? { reader } : {}) });

// The others

export function batchesPart(route, connection, { batches, more, error }) {
  const parts = [h("h2", { key: "batches title" }, "Batches")], others = (batches ?? []).filter(({ state }) => state !== "dead");
  if (error) parts.push(h("p.error", { key: "batches error", role: "alert" }, error));
  else if (!batches) parts.push(h("p.empty", { key: "batches" }, "Reading the batches …"));
  else if (!others.length) {
    parts.push(h("p.empty", { key: "batches" }, batches.length ? "No other batch is remembered."
      : "No batch is remembered. A batch is made when a task leases records."));
  } else parts.push(table(`Batches of ${route.name}`, BATCH_COLUMNS, others.map(batch => batchRow(route, connection, batch)), ".batches"));
  if (more) parts.push(h("p.quiet", { key: "more" }, "There are more batches: qewqew batches and qewqew dead list show all."));
  return parts;
}

export const isSought = (route, batch) => batch.id === route.batch || (route.key && route.key === batch.key);

// Leased, and its owner will not come back, or has had it for longer than any work takes: see owners.py
const isStuck = batch => batch.state === "leased" && ["gone", "overdue"].includes(batch.owner?.life);

// told: of a dead batch, the reason that is shown above it
function batchRow(route, connection, batch, told) {
  const payload = { connection: route.connection, place: placeOf(route, batch.reader), batch };
  const button = (act, text, danger) =>
    h(`button.act${danger ? ".danger" : ""}`, { type: "button", do: act, payload, "aria-label": `${text} batch ${batch.id}` }, text);
  const stuck = isStuck(batch);
  const acts = [connection?.peek && batch.state !== "gone" && button("peekBatch", "Peek"),
    connection?.act && (batch.state === "dead" || stuck) && button("return", "Return"), connection?.act && batch.due && button("retry", "Retry now"),
    connection?.act && batch.state === "dead" && [button("put-back", "Put back"), button("drop", "Drop", true)]];
  const [state, title] = { acked: ["done", "acknowledged; its records are kept for a while"],
    gone: ["done", "acknowledged; its records are no longer kept"] }[batch.state] ?? [batch.state];
  const cells = [
    h("td", {}, h(`span.badge.${batch.state}`, { title }, state), stuck && h("span.badge.dead", { title: batch.owner.why }, "stuck"),
      batch.due && h("div.quiet.small", { title: "It failed: the next lease may have it then." }, `due in ${duration(secondsUntil(batch.due))}`)),
    h("td", {}, owner(batch), batch.reader && h("div.quiet.small", {}, `reader ${batch.reader}`), h("code.small", {}, batch.id),
      stagers(batch), batch.reason && batch.reason !== told && h("div.reason", {}, batch.reason), told !== undefined && result(batch),
      stuck && h("div.reason", {}, batch.owner.life === "gone" ? `Nobody works on it: ${batch.owner.why}.`
        : `Leased for a long time: ${batch.owner.why}. Does it still work on the batch?`)),
    h("td", { title: `${plural(batch.records, "record")}, ${plural(batch.bytes, "byte")}` }, short(batch.records)),
    numberCell(batch.attempt, ["lease"]), h("td", {}, result(batch)), h("td", {}, times(batch)), h("td", {}, acts)];
  return { key: `${batch.reader ?? ""} ${batch.id}`, classes: isSought(route, batch) ? ".sought" : "",
    cells: told === undefined ? cells : cells.filter((_, place) => DEAD_COLUMNS.includes(BATCH_COLUMNS[place])) };
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
