// Answers about the run: from the server that this page came from, or, in an exported page, from
// the page itself.

const TOKEN = "sluice-token";
const held = document.getElementById("run-answers");
const exported = held && JSON.parse(held.textContent);
const answers = new Map();

export const isExported = exported !== null;

export class RefusedError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

// Return the answer's object. With `isPolled` it is kept, and returned again while the server has
// no newer one.
export async function ask(path, { isPolled = false } = {}) {
  if (isExported) return exported[path];
  const known = answers.get(path);
  const headers = {};
  const token = sessionStorage.getItem(TOKEN);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (known) headers["If-None-Match"] = known.etag;
  const answer = await fetch(path, { headers, cache: "no-store", credentials: "omit" });
  if (answer.status === 304 && known) return known.body;
  const body = await answer.json();
  if (!answer.ok) throw new RefusedError(answer.status, body.error?.message ?? "no answer");
  if (isPolled) answers.set(path, { etag: answer.headers.get("ETag"), body });
  return body;
}
