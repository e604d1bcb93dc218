// The dialogs: looking into records, and confirming what is done to a batch, or to all of one cause.

import { $, h, plural, size, sum, update } from "./elements.js";
import { ask } from "./server.js";

const PEEKED = 20; // records

// Looking into records

const recordsUrl = ({ connection, place, batch, start }) => {
  const query = new URLSearchParams({ ...place, number: PEEKED });
  if (batch) query.set("batch", batch.id);
  if (start !== undefined) query.set("start", start);
  return `connections/${encodeURIComponent(connection)}/records?${query}`;
};

export async function peek(payload) {
  const { topic, batch, title, start, place } = payload;
  const unchanged = place.topic ? "No reader is moved." : "Nothing is taken.";
  $("records-title").textContent = batch ? `Batch ${batch.id}` : title;
  $("records-what").textContent = unchanged;
  const all = topic && { topic: topic.name };
  const choice = !topic ? [] : [["Oldest", all], ["Newest", all, Math.max(0, topic.next - PEEKED)],
    ...topic.readers.filter(reader => !reader.error).map(reader => [`Next for ${reader.name}`, { ...all, reader: reader.name }])];
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

// Acting on batches

const ACTS = {
  return: ["Return", "The next lease gets the batch first, whole, as one more attempt. If that fails too, it is dead again."],
  "put-back": ["Put back", "The records go back to the front, and will come in new batches with new ids. Output that an attempt may have " +
    "written under this batch's id stays and is not replaced: put back only what wrote nothing."],
  retry: ["Retry", "The batch waits after its failure. It becomes due now: the next lease gets it first, whole, as one more attempt."],
  drop: ["Drop", "The records are deleted permanently. Nothing brings them back."],
};
const ALL = {
  return: "The next leases get each of them first, whole, as one more attempt. What fails again is dead again. A batch that has changed since it was shown is left alone.",
  drop: "Their records are deleted permanently. Nothing brings them back. A batch that has changed since it was shown is left alone.",
};
const RETURN_LEASED = "The next lease gets the batch first, whole, as one more attempt; after too many attempts it is dead instead. ";
const OWNERS = {
  gone: "Airflow says that nobody works on it any more. If its Spark driver runs elsewhere (cluster mode), make sure that this has ended.",
  overdue: "Airflow does not know who leased it: first make sure that nobody works on it any more.",
};
const DONE = { return: "Returned", "put-back": "Put back", drop: "Dropped", retry: "Due now" };
const AT_ONCE = 50; // batches of a request
let pending; // what is to be done when it is confirmed

export function confirmAct(act, payload) {
  const { batch, place } = payload, [verb, text] = batch.state === "leased" ? ["Return", RETURN_LEASED + OWNERS[batch.owner.life]] : ACTS[act];
  pending = { act, doIt: doOne, ...payload };
  confirm(verb, plural(batch.records, "record"),
    `${batch.state === "leased" ? "Leased batch" : "Batch"} ${batch.id} of ${whereIs(place)}. ${text}`);
}

export function confirmAll(act, payload) {
  const { batches, place, told } = payload, count = plural(batches.length, "batch", "batches");
  pending = { act, doIt: doAll, ...payload };
  confirm(ACTS[act][0], `all ${count} with ${plural(sum(batches, "records"), "record")}`,
    `Of ${whereIs(place)}, dead of: ${told.length > 200 ? `${told.slice(0, 200)} …` : told}\n${ALL[act]}`);
}

const whereIs = place => place.queue ? `queue ${place.queue}` : `topic ${place.topic}, reader ${place.reader}`;

function confirm(verb, what, text) {
  $("confirm-title").textContent = `${verb} ${what}?`;
  $("confirm-text").textContent = text;
  $("confirm-error").textContent = "";
  $("confirm-do").textContent = pending.act === "drop" ? "Drop permanently" : verb;
  $("confirm-do").className = pending.act === "drop" ? "danger main" : "main";
  $("confirm-do").disabled = false;
  $("confirm").showModal();
}

export async function actNow(refresh) {
  $("confirm-do").disabled = true;
  $("confirm-error").textContent = "";
  try {
    const done = await pending.doIt(pending);
    $("confirm").close();
    toast(done);
  } catch (error) {
    $("confirm-error").textContent = error.message;
    $("confirm-do").disabled = false;
  }
  refresh();
}

const post = (connection, act, body) => ask(`connections/${encodeURIComponent(connection)}/${act}`, {
  method: "POST", headers: { "Content-Type": "application/json", "X-QewQew": "1" }, body: JSON.stringify(body),
});
const asShown = ({ id, attempt, made }) => ({ batch: id, attempt, made });

async function doOne({ act, connection, place, batch }) {
  await post(connection, act, { ...place, ...asShown(batch), state: batch.state });
  return `${DONE[act]}: batch ${batch.id}`;
}

// What has been done is not asked for again: after an error, the button goes on with the rest.
async function doAll(all) {
  const { act, connection, place } = all, failed = [];
  all.done ??= 0;
  all.changed ??= 0;
  const told = () => `${DONE[act]}: ${plural(all.done, "batch", "batches")}.` + (all.changed ? ` Changed meanwhile, so left alone: ${all.changed}.` : "");
  while (all.batches.length) {
    const answer = await post(connection, `all/${act}`, { ...place, batches: all.batches.slice(0, AT_ONCE).map(asShown) })
      .catch(error => { throw new Error(all.done ? `${told()} The rest: ${error.message}` : error.message); });
    all.batches = all.batches.slice(AT_ONCE);
    all.done += answer.done;
    all.changed += answer.changed;
    failed.push(...answer.failed);
  }
  if (failed.length) throw new Error(`${told()} ${failed.length} failed, the first with ${failed[0]}`);
  return told();
}

function toast(text) {
  $("toast").textContent = text;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { $("toast").textContent = ""; }, 6000);
}

