// Asking the server: everything is relative, so that it works behind a URL prefix too.

export async function ask(url, options) {
  const answer = await fetch(url, { credentials: "same-origin", ...options });
  const body = await answer.json().catch(() => ({}));
  if (answer.ok) return body;
  const detail = typeof body.detail === "string" ? body.detail : answer.statusText;
  throw new Error({ 401: "You are logged out: reload Airflow.", 403: `You may not do this (${detail}).` }[answer.status] ?? detail);
}

// Of a queue, or of a topic and maybe one of its readers: what = "batches", "samples" …
export const askPlace = (what, connection, place, more = {}) =>
  ask(`connections/${encodeURIComponent(connection)}/${what}?${new URLSearchParams({ ...place, ...more })}`);
