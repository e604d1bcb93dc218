// The list of all queues and topics, and before it what is wrong.

import { byCause } from "./batches.js";
import { $, ageCell, age, brokenRow, duration, h, kindCell, numberCell, pageOf, peekButton, plural, secondsSince, short, sizeCell, sum, table,
  update } from "./elements.js";

const HOUR = 3600, MOST_PROBLEMS = 50;
const COUNT = ".number.w-count", SMALL = ".number.w-small", LINE = ".w-line", AGE = ".number.w-age", SIZE = ".number.w-count.spare";
const QUEUE_COLUMNS = [["Queue", ".name"], ["Records", COUNT, "that wait to be leased or taken"], ["Size", SIZE], ["Oldest", AGE],
  ["Last hour", LINE, "records that waited"], ["In flight", SMALL, "leased batches"],
  ["Returned", SMALL, "batches that wait for the next lease"], ["Dead", SMALL, "batches that failed too often"], ["", ".w-peek.acts"]];
const TOPIC_COLUMNS = [["Topic", ".name"], ["Messages", COUNT], ["Size", SIZE], ["Oldest", AGE],
  ["Last hour", LINE, "lag of the reader that is farthest behind"], ["Readers", SMALL],
  ["Lag", SMALL, "of the reader that is farthest behind"], ["Dead", SMALL, "batches that failed too often"], ["", ".w-peek.acts"]];
const ORDERS = {
  name: (left, right) => left.name.localeCompare(right.name),
  records: (left, right) => (right.waiting ?? 0) - (left.waiting ?? 0),
  oldest: (left, right) => (left.oldest ?? "~").localeCompare(right.oldest ?? "~"),
  size: (left, right) => (right.bytes ?? 0) - (left.bytes ?? 0),
};

export function renderList(state) {
  const rows = state.connections.flatMap(connection => [...connection.queues, ...connection.topics]);
  const count = name => state.connections.reduce((total, connection) => total + connection[name].length, 0);
  const dead = sum(rows, "dead") + rows.reduce((total, row) => total + sum(row.readers ?? [], "dead"), 0);
  $("summary").textContent = state.connections.length
    ? [plural(count("queues"), "queue"), plural(count("topics"), "topic"), plural(dead, "dead batch", "dead batches")].join(" · ") : "";
  const working = state.connections.filter(connection => !connection.error);
  const sections = working.map(connection => section(connection, state)).filter(Boolean);
  $("tools").hidden = !working.length;
  const parts = [problems(state), ...sections];
  if (!state.connections.length) {
    parts.push(h("p.empty", { key: "none" }, "There is no connection of type QewQew that you may see. Add one under Admin → ",
      "Connections: its host is the directory of the queues. Connections in a secrets backend cannot be listed, and are not shown here."));
  } else if (working.length && !sections.length) {
    parts.push(h("p.empty", { key: "none" }, "No queue or topic has this in its name."));
  }
  update($("main"), parts.filter(Boolean));
}

// What is wrong: a line for each queue, topic or connection, the worst first

function problems(state) {
  const lines = state.connections.flatMap(connection => connection.error
    ? [{ worst: 2, key: connection.id, badges: [["broken", "dead"]], name: `Connection ${connection.id}`,
      texts: [`Nothing of it can be shown on the API server's host. ${connection.error}`] }]
    : [...connection.queues.map(row => problemOf(state, connection, "queue", row)),
      ...connection.topics.map(row => problemOf(state, connection, "topic", row))].filter(Boolean));
  if (!lines.length) return null;
  lines.sort((left, right) => left.worst - right.worst);
  return h("section.problems", { key: "problems", "aria-label": "What is wrong" },
    h("h2", {}, `${plural(lines.length, "thing")} to look at`),
    lines.slice(0, MOST_PROBLEMS).map(({ key, badges, name, texts, href, cause }) => h("details", { key },
      h("summary", {}, h("span.what", {}, name), badges.map(([text, kind]) => h(`span.badge.${kind}`, {}, text)), cause && h("span.reason", {}, cause)),
      texts.map(text => h("p", {}, text)), href && h("p", {}, h("a", { href }, `Open ${name}`)))),
    lines.length > MOST_PROBLEMS && h("p.quiet", { key: "more" }, `${plural(lines.length - MOST_PROBLEMS, "more")}: see the list.`));
}

function problemOf(state, connection, kind, row) {
  const key = `${connection.id} ${kind} ${row.name}`, href = pageOf(connection.id, kind, row.name);
  if (row.error) return { worst: 3, key, badges: [["broken", "dead"]], name: row.name, texts: [row.error] };
  const parts = [row, ...(row.readers ?? [])], dead = sum(parts, "dead"), stuck = sum(parts, "stuck");
  const late = kind === "queue" && state.lateAfter > 0 && row.oldest && secondsSince(row.oldest) > state.lateAfter;
  const broken = (row.readers ?? []).filter(reader => reader.error);
  if (!dead && !stuck && !late && !broken.length) return null;
  const badges = [], texts = [];
  let cause;
  if (dead) {
    badges.push([`${short(dead)} dead`, "dead"]);
    cause = causeOf(parts.flatMap(({ batches }) => batches ?? []).filter(({ state }) => state === "dead"));
    texts.push(`${plural(dead, "batch", "batches")} failed too often. Decide what to do: return, put back or drop.`);
  }
  if (stuck) {
    badges.push([`${short(stuck)} stuck`, "dead"]);
    texts.push(`${plural(stuck, "batch", "batches")} leased by those who will not come back: you can return what nobody works on.`);
  }
  if (late) {
    badges.push([`late: ${age(row.oldest)}`, "returned"]);
    texts.push(`The oldest record has been waiting for ${age(row.oldest)}, longer than ${duration(state.lateAfter)}.`);
  }
  if (broken.length) {
    badges.push([`${short(broken.length)} broken`, "dead"]);
    texts.push(...broken.map(reader => `Reader ${reader.name}: ${reader.error}`));
  }
  return { worst: dead ? 0 : stuck ? 1 : broken.length ? 3 : 4, key, badges, name: row.name, texts, href, cause };
}

// Of the most batches, in short; nothing if the user may not see it
function causeOf(dead) {
  const [first, ...rest] = [...byCause(dead).values()].sort((left, right) => right.length - left.length);
  const cause = first?.[0].cause;
  return cause && `${cause.length > 120 ? `${cause.slice(0, 120)} …` : cause}${rest.length ? ` · ${plural(rest.length, "other cause")}` : ""}`;
}

// The queues and topics of a connection; nothing if the search leaves none

function section(connection, state) {
  const { id, also, directory, queues, topics, complete } = connection;
  const sought = $("search").value.trim().toLowerCase();
  const found = rows => rows.filter(row => `${id} ${also.join(" ")} ${row.name}`.toLowerCase().includes(sought))
    .sort(ORDERS[$("order").value]);
  const [chosenQueues, chosenTopics] = [found(queues), found(topics)];
  const empty = !queues.length && !topics.length;
  if (sought && !chosenQueues.length && !chosenTopics.length) return null;
  const samples = state.histories[id] ?? {};
  return h("section.connection", { key: `connection ${id}`, "aria-label": `Connection ${id}` },
    h("div.title", { key: "title" }, h("h2", {}, [id, ...also].join(", ")), directory && h("code.directory", {}, directory)),
    empty && h("p.empty", { key: "empty" }, "No queue or topic holds anything here. Stage records in a task with ",
      h("code", {}, "QewQewStageOperator"), ", or put some with ", h("code", {}, "qewqew put"), "; an empty closed queue leaves no files."),
    chosenQueues.length ? table(`Queues of ${id}`, QUEUE_COLUMNS, chosenQueues.map(row => queueRow(connection, row, samples))) : null,
    chosenTopics.length ? table(`Topics of ${id}`, TOPIC_COLUMNS, chosenTopics.map(row => topicRow(connection, row, samples))) : null,
    complete ? null : h("p.quiet", { key: "cut" }, "There are more than 1,000 queues and topics: these are the first. qewqew ls lists all."));
}

const nameCell = (connection, kind, name) => h("td", {}, h("a", { href: pageOf(connection.id, kind, name) }, name));
function queueRow(connection, row, samples) {
  if (row.error) return brokenRow(row);
  return { key: row.name, cells: [nameCell(connection, "queue", row.name), numberCell(row.waiting, ["record"]),
    sizeCell(row.bytes, row.on_disk), ageCell(row.oldest), h("td", {}, line(samples[`queue ${row.name}`], row.waiting)),
    kindCell(row.leased, "leased"), kindCell(row.returned, "returned"), kindCell(row.dead, "dead"),
    h("td", {}, peekButton(connection, { place: { queue: row.name }, title: row.name }, `the queue ${row.name}`))] };
}

function topicRow(connection, row, samples) {
  if (row.error) return brokenRow(row);
  return { key: row.name, cells: [nameCell(connection, "topic", row.name), numberCell(row.messages, ["message"]),
    sizeCell(row.bytes, row.on_disk), ageCell(row.oldest), h("td", {}, line(samples[`topic ${row.name}`], row.waiting)),
    numberCell(row.readers.length, ["reader"]), numberCell(row.waiting, ["message"]), kindCell(sum(row.readers, "dead"), "dead"),
    h("td", {}, peekButton(connection, { place: { topic: row.name }, title: row.name, topic: row }, `the topic ${row.name}`))] };
}

// What waited in the last hour, as a small line
function line(samples, current) {
  const points = [...(samples ?? []).filter(([ago]) => ago <= HOUR), [0, current]];
  const counts = points.map(([, count]) => count);
  const low = Math.min(...counts), high = Math.max(...counts);
  const x = ago => (150 * (1 - ago / HOUR) + 1).toFixed(1);
  const y = count => (26 - 24 * (high ? count / high : 0)).toFixed(1);
  const drawn = points.map(([ago, count]) => `${x(ago)},${y(count)}`).join(" ");
  const text = points.length === 1 ? `${short(current)} now; the first sample comes in a minute`
    : `${short(current)} now; ${short(low)} to ${short(high)} in the last ${points[0][0] > 3000 ? "hour" : `${Math.ceil(points[0][0] / 60)} min`}`;
  return h("svg.line", { viewBox: "0 0 152 28", role: "img", "aria-label": text },
    h("title", {}, text),
    h("polyline.base", { points: "0,27 152,27" }),
    h("polygon", { points: `${x(points[0][0])},27 ${drawn} ${x(0)},27` }),
    h("polyline", { points: drawn }),
    h("circle", { cx: x(0), cy: y(current), r: "1.8" }));
}
