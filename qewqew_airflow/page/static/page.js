// The page: asks for the state every few seconds while it can be seen, and changes what differs.
// Whatever comes from the server is put into the page as text (textContent, attributes), never as markup.
"use strict";

const REFRESH = 5000, HISTORY = 60000, HOUR = 3600, PEEKED = 20; // milliseconds; seconds; records
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

let connections = [], histories = {}, behind = 0; // behind: what this clock has to be moved by to be the server's
const expanded = new Set(); // keys of the rows that show their details

// Elements

// h("tr.detail", {attributes; "do" and "payload" say what a click does}, children…): strings become text.
function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = ["svg", "polyline", "polygon", "circle", "title"].includes(tag)
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  if (classes.length) made.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "payload") made.payload = value;
    else if (key === "do") made.dataset.do = value;
    else if (key === "key") made.dataset.key = value;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(9).filter(child => child !== null && child !== undefined && child !== false));
  return made;
}

// Make the children of an element equal to these, and keep those that are there: focus and scrolling stay.
function update(parent, children) {
  const kept = new Map([...parent.children].filter(one => one.dataset.key).map(one => [one.dataset.key, one]));
  children.forEach((wanted, place) => {
    const present = parent.childNodes[place];
    const same = wanted.dataset?.key ? kept.get(wanted.dataset.key) : present?.dataset?.key ? undefined : present;
    if (!same || same.nodeName !== wanted.nodeName) {
      parent.insertBefore(wanted, present ?? null);
      return;
    }
    if (same !== present) parent.insertBefore(same, present ?? null);
    if (same.nodeType === Node.TEXT_NODE) {
      if (same.data !== wanted.data) same.data = wanted.data;
      return;
    }
    for (const { name } of [...same.attributes]) if (!wanted.hasAttribute(name)) same.removeAttribute(name);
    for (const { name, value } of wanted.attributes) if (same.getAttribute(name) !== value) same.setAttribute(name, value);
    same.payload = wanted.payload;
    update(same, [...wanted.childNodes]);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

// Numbers for people, the exact ones in the title

const plural = (count, one, many = one + "s") => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

function short(count) {
  if (count < 100000) return count.toLocaleString("en");
  const unit = count < 1e6 ? [1e3, "k"] : count < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return `${(count / unit[0]).toFixed(count < 1e6 ? 0 : 1)} ${unit[1]}`;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, number = bytes;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

function age(moment) {
  if (!moment) return "–";
  const seconds = Math.max(0, (Date.now() + behind - Date.parse(moment)) / 1000);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 2 * 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

const numberCell = (count, what) =>
  h(`td.number${count ? "" : ".zero"}`, { title: what && plural(count, ...what) }, short(count));
const sizeCell = (bytes, disk) => h(`td.number${bytes ? "" : ".zero"}`, {
  title: plural(bytes, "byte") + (disk === undefined ? "" : `, ${plural(disk, "byte")} on disk`),
}, size(bytes));
const ageCell = moment => h(`td.number${moment ? "" : ".zero"}`, { title: moment && new Date(moment).toLocaleString() }, age(moment));
const kindCell = (count, kind) =>
  h(`td.number${count ? "" : ".zero"}`, { title: plural(count, `${kind} batch`, `${kind} batches`) },
    count ? h(`span.badge.${kind}`, {}, short(count)) : "0");

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

// What is listed

function table(caption, columns, rows, inner = false) {
  const head = columns.map(([text, classes, title]) => h(`th${classes ?? ""}`, { scope: "col", title }, text));
  return h("div.scroll", { key: caption, role: "region", "aria-label": caption, tabindex: 0 },
    h(inner ? "table.inner" : "table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
}

const COUNT = ".number.w-count", SMALL = ".number.w-small", LINE = ".w-line", AGE = ".number.w-age", PEEK = ".w-peek";
const QUEUE_COLUMNS = [["Queue"], ["Records", COUNT, "that wait to be leased or taken"], ["Size", COUNT], ["Oldest", AGE],
  ["Last hour", LINE, "records that waited"], ["In flight", SMALL, "leased batches"],
  ["Returned", SMALL, "batches that wait for the next lease"], ["Dead", SMALL, "batches that failed too often"], ["", PEEK]];
const TOPIC_COLUMNS = [["Topic"], ["Messages", COUNT], ["Size", COUNT], ["Oldest", AGE],
  ["Last hour", LINE, "lag of the reader that is farthest behind"], ["Readers", SMALL],
  ["Lag", SMALL, "of the reader that is farthest behind"], ["Dead", SMALL, "batches that failed too often"], ["", PEEK]];

const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);

function nameCell(key, name) {
  return h("td", {}, h("button.name", { type: "button", "aria-expanded": String(expanded.has(key)), do: "toggle", payload: key }, name));
}

function broken(row, key, columns) {
  return h("tr", { key }, h("td", {}, row.name), h("td", { colspan: columns - 1 }, h("span.reason", {}, row.error)));
}

const peekCell = (connection, payload, what) => h("td.number", {}, connection.peek &&
  h("button.act", { type: "button", do: "peek", payload: { connection: connection.id, ...payload }, "aria-label": `Peek at ${what}` }, "Peek"));

function queueRows(connection, row) {
  const key = `${connection.id} queue ${row.name}`, place = { queue: row.name };
  if (row.error) return [broken(row, key, QUEUE_COLUMNS.length)];
  const shown = h("tr", { key }, nameCell(key, row.name), numberCell(row.waiting, ["record"]), sizeCell(row.bytes, row.on_disk),
    ageCell(row.oldest), h("td", {}, line(histories[connection.id]?.[`queue ${row.name}`], row.waiting)),
    kindCell(row.leased, "leased"), kindCell(row.returned, "returned"), kindCell(row.dead, "dead"),
    peekCell(connection, { place, title: row.name }, `the queue ${row.name}`));
  if (!expanded.has(key)) return [shown];
  return [shown, h("tr.detail", { key: `${key} detail` }, h("td", { colspan: QUEUE_COLUMNS.length }, row.batches.length
    ? batchTable(connection, `Batches of ${row.name}`, row.batches.map(batch => ({ batch, place })), row)
    : h("p.quiet", {}, "No batch is in flight, returned or dead. A batch is made when a task leases records.")))];
}

function topicRows(connection, row) {
  const key = `${connection.id} topic ${row.name}`;
  if (row.error) return [broken(row, key, TOPIC_COLUMNS.length)];
  const shown = h("tr", { key }, nameCell(key, row.name), numberCell(row.messages, ["message"]), sizeCell(row.bytes, row.on_disk),
    ageCell(row.oldest), h("td", {}, line(histories[connection.id]?.[`topic ${row.name}`], row.waiting)),
    numberCell(row.readers.length, ["reader"]), numberCell(row.waiting, ["message"]), kindCell(sum(row.readers, "dead"), "dead"),
    peekCell(connection, { place: { topic: row.name }, title: row.name, topic: row }, `the topic ${row.name}`));
  if (!expanded.has(key)) return [shown];
  const batches = row.readers.flatMap(reader =>
    reader.batches.map(batch => ({ batch, place: { topic: row.name, reader: reader.name } })));
  return [shown, h("tr.detail", { key: `${key} detail` }, h("td", { colspan: TOPIC_COLUMNS.length }, row.readers.length
    ? [readerTable(connection, row), batches.length ? batchTable(connection, `Batches of ${row.name}`, batches, row) : null]
    : h("p.quiet", {}, "Nobody reads this topic yet. A reader is made by the first task or sensor that names it.")))];
}

function readerTable(connection, row) {
  const columns = [["Reader"], ["Filter"], ["Lag", COUNT, "messages that it has not committed"],
    ["Delivered", COUNT, "messages that are with a consumer, and not committed"],
    ["Lost", SMALL, "messages that were removed before it got them"], ["In flight", SMALL, "leased batches"],
    ["Returned", SMALL], ["Dead", SMALL], ["", PEEK]];
  return table(`Readers of ${row.name}`, columns, row.readers.map(reader => h("tr", { key: reader.name },
    h("td", {}, reader.name), h("td", {}, reader.filter ? h("code", {}, reader.filter) : h("span.zero", {}, "all")),
    numberCell(reader.lag, ["message"]), numberCell(reader.in_flight, ["message"]), numberCell(reader.lost, ["message"]),
    kindCell(reader.leased, "leased"), kindCell(reader.returned, "returned"), kindCell(reader.dead, "dead"),
    peekCell(connection, { place: { topic: row.name, reader: reader.name }, title: row.name, topic: row },
      `what the reader ${reader.name} gets next`))), true);
}

function batchTable(connection, caption, rows, counts) {
  const columns = [["Batch", ".w-count"], ["Owner"], ["Records", SMALL], ["Size", SMALL],
    ["Attempt", SMALL, "how often it was leased"], ["Since", COUNT, "when it came into this state"], ["", ".w-acts"]];
  const total = counts.readers ? ["leased", "returned", "dead"].reduce((all, kind) => all + sum(counts.readers, kind), 0)
    : counts.leased + counts.returned + counts.dead;
  return [table(caption, columns, rows.map(({ batch, place }) => batchRow(connection, batch, place)), true),
    total > rows.length && h("p.quiet", {}, `${plural(total - rows.length, "more batch", "more batches")}: qewqew batches lists all.`)];
}

function batchRow(connection, batch, place) {
  const payload = { connection: connection.id, place, batch };
  const button = (act, text, danger) =>
    h(`button.act${danger ? ".danger" : ""}`, { type: "button", do: act, payload, "aria-label": `${text} batch ${batch.id}` }, text);
  return h("tr", { key: `${place.reader ?? ""} ${batch.id}` },
    h("td", { title: batch.id }, h(`span.badge.${batch.state}`, {}, batch.state)),
    h("td", {}, owner(batch), place.reader && h("div.quiet.small", {}, `reader ${place.reader}`),
      batch.reason && h("div.reason", {}, batch.reason),
      batch.expires && h("div.quiet.small", { title: batch.expires }, `lease ends ${new Date(batch.expires).toLocaleTimeString()}`)),
    numberCell(batch.records, ["record"]), sizeCell(batch.bytes), numberCell(batch.attempt, ["lease"]), ageCell(batch.since),
    h("td", {}, h("div.acts", {}, connection.peek && button("peekBatch", "Peek"), connection.act && batch.state === "dead" &&
      [button("return", "Return"), button("put-back", "Put back"), button("drop", "Drop", true)])));
}

// The lease key of our operators names a task instance: a link to Airflow's page of it.
function owner({ key, task }) {
  if (key === null) return h("span.zero", {}, "of a DAG that you may not see");
  if (!task) return h("code", {}, key);
  const part = encodeURIComponent;
  const href = `../dags/${part(task.dag)}/runs/${part(task.run)}/tasks/${part(task.task)}` +
    (task.index < 0 ? "" : `/mapped/${task.index}`);
  return [h("a", { href, target: "_top", do: "leave", title: key }, `${task.dag} / ${task.task}${task.index < 0 ? "" : ` [${task.index}]`}`),
    h("div.quiet.small", {}, task.run)];
}

function section(connection) {
  const { id, directory, error, queues, topics, complete } = connection;
  const parts = [h("div.bar", { key: "bar" }, h("h2", {}, id), directory && h("code.directory", {}, directory))];
  if (error) parts.push(h("p.error", { key: "error", role: "alert" }, `Nothing of this connection can be shown on the API server's host. ${error}`));
  else if (!queues.length && !topics.length) {
    parts.push(h("p.empty", { key: "empty" }, "No queue or topic holds anything here. Stage records in a task with ",
      h("code", {}, "QewQewStageOperator"), ", or put some with ", h("code", {}, "qewqew put"), "; an empty closed queue leaves no files."));
  }
  if (queues.length) parts.push(table(`Queues of ${id}`, QUEUE_COLUMNS, queues.flatMap(row => queueRows(connection, row))));
  if (topics.length) parts.push(table(`Topics of ${id}`, TOPIC_COLUMNS, topics.flatMap(row => topicRows(connection, row))));
  if (!complete) parts.push(h("p.quiet", { key: "cut" }, "There are more than 1,000 queues and topics: these are the first. qewqew ls lists all."));
  return h("section.connection", { key: id, "aria-label": `Connection ${id}` }, parts);
}

function render() {
  const rows = connections.flatMap(one => [...one.queues, ...one.topics]);
  const dead = sum(rows, "dead") + rows.reduce((total, row) => total + sum(row.readers ?? [], "dead"), 0);
  const count = name => connections.reduce((total, one) => total + one[name].length, 0);
  $("summary").textContent = connections.length
    ? [plural(count("queues"), "queue"), plural(count("topics"), "topic"), plural(dead, "dead batch", "dead batches")].join(" · ") : "";
  update($("connections"), connections.length ? connections.map(section) : [h("p.empty", { key: "none" },
    "There is no connection of type QewQew that you may see. Add one under Admin → Connections: its host is the directory of the queues. ",
    "Connections in a secrets backend cannot be listed, and are not shown here.")]);
}

// The link of a task names its queue or topic: its details are shown.
const link = new URLSearchParams(location.search);
let sought = ["queue", "topic"].map(kind => `${link.get("connection")} ${kind} ${link.get("name")}`);
sought.forEach(key => expanded.add(key));

function seek() {
  sought.map(key => document.querySelector(`tr[data-key="${CSS.escape(key)}"]`)).find(Boolean)?.scrollIntoView({ block: "center" });
  sought = [];
}

// Asking the server

async function ask(url, options) {
  const answer = await fetch(url, { credentials: "same-origin", ...options });
  const body = await answer.json().catch(() => ({}));
  if (answer.ok) return body;
  const detail = typeof body.detail === "string" ? body.detail : answer.statusText;
  throw new Error({ 401: "You are logged out: reload Airflow.", 403: `You may not do this (${detail}).` }[answer.status] ?? detail);
}

let timer, asked = 0, historyAt = -Infinity;

async function refresh() {
  clearTimeout(timer);
  if (document.visibilityState !== "visible") return;
  const mine = ++asked;
  try {
    const withHistory = performance.now() - historyAt > HISTORY;
    const [state, history] = await Promise.all([ask("data/state"), withHistory ? ask("data/history") : histories]);
    if (mine !== asked) return;
    if (withHistory) historyAt = performance.now();
    behind = state.now - Date.now();
    [connections, histories] = [state.connections, history];
    render();
    seek();
    $("status").className = "";
    $("status").textContent = `Updated ${new Date().toLocaleTimeString()}`;
  } catch (error) {
    if (mine !== asked) return;
    $("status").className = "stale";
    $("status").textContent = connections.length ? `Not up to date: ${error.message}` : "";
    if (!connections.length) update($("connections"), [h("p.error", { role: "alert", key: "failed" }, error.message)]);
  }
  timer = setTimeout(refresh, REFRESH);
}

// Looking into records

const recordsUrl = ({ connection, place, batch, start }) => {
  const query = new URLSearchParams({ ...place, number: PEEKED });
  if (batch) query.set("batch", batch.id);
  if (start !== undefined) query.set("start", start);
  return `connections/${encodeURIComponent(connection)}/records?${query}`;
};

async function peek(payload) {
  const { topic, batch, title, start, place } = payload;
  const unchanged = place.topic ? "No reader is moved." : "Nothing is taken.";
  $("records-title").textContent = batch ? `Batch ${batch.id}` : title;
  $("records-what").textContent = unchanged;
  const all = topic && { topic: topic.name };
  const choice = !topic ? [] : [["Oldest", all], ["Newest", all, Math.max(0, topic.next - PEEKED)],
    ...topic.readers.map(reader => [`Next for ${reader.name}`, { ...all, reader: reader.name }])];
  update($("records-choice"), choice.map(([text, from, number]) => h("button", {
    type: "button", do: "peek", payload: { ...payload, place: from, start: number },
    "aria-pressed": String(from.reader === place.reader && number === start),
  }, text)));
  if (!$("records").open) $("records").showModal();
  update($("records-list"), [h("li.quiet", {}, "Reading …")]);
  try {
    const { records, more } = await ask(recordsUrl(payload));
    update($("records-list"), records.length ? records.map(recordItem) : [h("li.quiet", {}, "There is nothing here now.")]);
    if (records.length) {
      const count = plural(records.length, place.topic ? "message" : "record");
      $("records-what").textContent = `${count}; ${more ? "more follow" : "no more follow"}. ${unchanged}`;
    }
  } catch (error) {
    update($("records-list"), [h("li.reason", {}, error.message)]);
  }
}

function recordItem({ number, bytes, kind, text, cut, tag, id, time }) {
  const label = { json: "JSON", text: "text", hex: "binary" }[kind];
  return h("li", {}, h("div.facts", {}, h("b", {}, `#${number}`), h("span", { title: plural(bytes, "byte") }, size(bytes)), h("span", {}, label),
    tag && h("span", {}, `tag ${tag}`), id && h("span", {}, `id ${id}`), time && h("span", {}, new Date(time).toLocaleString()),
    cut && h("span", {}, "cut")), bytes ? h(`pre.${kind}`, {}, text) : h("div.quiet", {}, "empty"));
}

// Acting on dead batches

const ACTS = {
  return: ["Return", "The next lease gets the batch first, whole, as one more attempt. If that fails too, it is dead again."],
  "put-back": ["Put back", "The records go back to the front, and will come in new batches with new ids. Output that an attempt may have " +
    "written under this batch's id stays and is not replaced: put back only what wrote nothing."],
  drop: ["Drop", "The records are deleted for ever. Nothing brings them back."],
};
let pending; // what is to be done when it is confirmed

function confirmAct(act, payload) {
  const [verb, text] = ACTS[act], { batch, place } = payload;
  pending = { act, ...payload };
  $("confirm-title").textContent = `${verb} ${plural(batch.records, "record")}?`;
  const where = place.queue ? `queue ${place.queue}` : `topic ${place.topic}, reader ${place.reader}`;
  $("confirm-text").textContent = `Batch ${batch.id} of ${where}. ${text}`;
  $("confirm-error").textContent = "";
  $("confirm-do").textContent = act === "drop" ? "Drop for ever" : verb;
  $("confirm-do").className = act === "drop" ? "danger main" : "main";
  $("confirm-do").disabled = false;
  $("confirm").showModal();
}

async function actNow() {
  const { act, connection, place, batch } = pending;
  $("confirm-do").disabled = true;
  $("confirm-error").textContent = "";
  try {
    await ask(`connections/${encodeURIComponent(connection)}/${act}`, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-QewQew": "1" },
      body: JSON.stringify({ ...place, batch: batch.id, attempt: batch.attempt, made: batch.made }),
    });
    $("confirm").close();
    toast(`${{ return: "Returned", "put-back": "Put back", drop: "Dropped" }[act]}: batch ${batch.id}`);
  } catch (error) {
    $("confirm-error").textContent = error.message;
    $("confirm-do").disabled = false;
  }
  refresh();
}

function toast(text) {
  $("toast").textContent = text;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { $("toast").textContent = ""; }, 6000);
}

// Clicks

const DO = {
  toggle: key => { expanded.delete(key) || expanded.add(key); render(); },
  peek,
  peekBatch: peek,
  return: payload => confirmAct("return", payload),
  "put-back": payload => confirmAct("put-back", payload),
  drop: payload => confirmAct("drop", payload),
};

document.addEventListener("click", event => {
  const target = event.target.closest("[data-do], [data-close], #confirm-do");
  if (!target) return;
  if (target.id === "confirm-do") actNow();
  else if ("close" in target.dataset) target.closest("dialog").close();
  else if (target.dataset.do === "leave") leave(event, target);
  else DO[target.dataset.do](target.payload);
});

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
    const theme = ["dark", "light"].find(one => root.classList.contains(one));
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
