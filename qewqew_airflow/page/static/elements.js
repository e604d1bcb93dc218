// Elements, tables, and numbers for people.
// Whatever comes from the server is put into the page as text (textContent, attributes), never as markup.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = ["svg", "g", "line", "path", "text", "rect", "polyline", "polygon", "circle", "title"];

export const $ = id => document.getElementById(id);

// h("tr.detail", {attributes; "do" and "payload" say what a click does}, children…): strings become text.
export function h(name, attributes = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const made = SVG_TAGS.includes(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
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

// Make the children of an element equal to these, and keep those that are there: focus, scrolling and what is open stay.
export function update(parent, children) {
  const kept = new Map([...parent.children].filter(child => child.dataset.key).map(child => [child.dataset.key, child]));
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
    for (const { name } of [...same.attributes]) if (!wanted.hasAttribute(name) && name !== "open") same.removeAttribute(name);
    for (const { name, value } of wanted.attributes) if (same.getAttribute(name) !== value) same.setAttribute(name, value);
    same.payload = wanted.payload;
    if (!("own" in same.dataset)) update(same, [...wanted.childNodes]); // else somebody else draws what is in it
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

// A table of columns [text, classes, title] and rows {key, cells, classes}. Where there is no room for one, page.css makes a
// card of each row, with data-label before each value; the roles are written out because that takes them from the elements.
export function table(caption, columns, rows, classes = "") {
  const head = columns.map(([text, cls, title]) => h(`th${cls ?? ""}`, { scope: "col", role: "columnheader", title }, text));
  return h(`table${classes}`, { key: caption, role: "table", "aria-label": caption },
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, rows.map(row => h(`tr${row.classes ?? ""}`, { key: row.key, role: "row" },
      row.cells.map((cell, place) => {
        cell.setAttribute("role", "cell");
        if (cell.colSpan > 1) return cell;
        if (columns[place]?.[0]) cell.setAttribute("data-label", columns[place][0]);
        cell.classList.add(...(columns[place]?.[1] ?? "").split(".").filter(Boolean));
        return cell;
      })))));
}

// Numbers, the exact ones in the title

let behind = 0; // what this clock has to be moved by to be the server's, in milliseconds
export const setClock = serverNow => { behind = serverNow - Date.now(); };
export const now = () => Date.now() + behind;

export const plural = (count, word, many = word + "s") => `${count.toLocaleString("en")} ${count === 1 ? word : many}`;

export function short(count) {
  if (count < 100000) return count.toLocaleString("en");
  const unit = count < 1e6 ? [1e3, "k"] : count < 1e9 ? [1e6, "M"] : [1e9, "G"];
  return `${(count / unit[0]).toFixed(count < 1e6 ? 0 : 1)} ${unit[1]}`;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0, number = bytes;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 2 * 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

export const secondsSince = moment => Math.max(0, (now() - Date.parse(moment)) / 1000);
export const secondsUntil = moment => Math.max(0, (Date.parse(moment) - now()) / 1000);
export const age = moment => moment ? duration(secondsSince(moment)) : "–";
export function clock(moment) { // the day only if it is not today
  const date = new Date(moment), time = { hour: "numeric", minute: "2-digit" };
  return date.toDateString() === new Date().toDateString() ? date.toLocaleTimeString([], time)
    : date.toLocaleString([], { month: "short", day: "numeric", ...time });
}

export const numberCell = (count, what) =>
  h(`td.number${count ? "" : ".zero"}`, { title: what && plural(count, ...what) }, short(count));
export const sizeCell = (bytes, disk) => h(`td.number${bytes ? "" : ".zero"}`, {
  title: plural(bytes, "byte") + (disk === undefined ? "" : `, ${plural(disk, "byte")} on disk`),
}, size(bytes));
export const ageCell = moment =>
  h(`td.number${moment ? "" : ".zero"}`, { title: moment && new Date(moment).toLocaleString() }, age(moment));
export const kindCell = (count, kind) =>
  h(`td.number${count ? "" : ".zero"}`, { title: plural(count, `${kind} batch`, `${kind} batches`) },
    count ? h(`span.badge.${kind}`, {}, short(count)) : "0");

// The row of something that cannot be read
export const brokenRow = row => ({ key: row.name, classes: ".broken", cells: [h("td", {}, row.name), h("td.reason", { colspan: 8 }, row.error)] });

export const sum = (rows, name) => rows.reduce((total, row) => total + (row[name] ?? 0), 0);

// The page of a queue or topic. Of several things of that name, "kind" tells.
export const pageOf = (connection, kind, name) => `?${new URLSearchParams({ connection, [kind]: name })}`;

export const peekButton = (connection, payload, what) => connection.peek && h("button.act", {
  type: "button", do: "peek", payload: { connection: connection.id, ...payload }, "aria-label": `Peek at ${what}`,
}, "Peek");
