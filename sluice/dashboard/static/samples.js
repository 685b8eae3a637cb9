// The sample browser: filters, the list, and one group that is open.

import { ask } from "./api.js";
import { byId, element, marked, setText } from "./dom.js";
import { groupBody, groupTitle, versions } from "./group_view.js";
import { count, fixed, short } from "./number_text.js";

const OUTCOMES = [
  "trained",
  "all right",
  "all wrong",
  "uniform",
  "stale",
  "failed",
  "surplus",
  "validation",
];
const MAX_SCORES = 16;
const INVALID = 400;

let listed = []; // groups of the list, as far as it was loaded
let next = null; // where the list continues
let submitted = new URLSearchParams(); // the filter of the list
let needle = ""; // the text that the list was searched for
let waiting = 0; // requests without an answer yet
let isRefused = false; // the server refused the filter
let asked = 0; // counts requests: an answer to an older one is dropped
let opened = null; // position of the open group in the list

export function startSamples(onError) {
  const guarded = (work) => (...given) => work(...given).catch(onError);
  byId("outcomes").append(...OUTCOMES.map(checkbox));
  byId("sample-filter").addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(find)();
  });
  byId("sample-filter").addEventListener("reset", () => setTimeout(guarded(find), 0));
  byId("outcomes").addEventListener("change", guarded(find));
  byId("sample-more").addEventListener("click", guarded(more));
  byId("sample-table").addEventListener("click", guarded(async (event) => {
    const button = event.target.closest("button.open");
    if (button) await open(Number(button.dataset.place));
  }));
  byId("group-close").addEventListener("click", close);
  byId("group-newer").addEventListener("click", guarded(() => open(opened - 1)));
  byId("group-older").addEventListener("click", guarded(() => open(opened + 1)));
  byId("group").addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
}

// Ask again for a list that is empty. Any other list stays as it is, because somebody may be
// reading it; so does a search, or a filter that was refused.
export async function renewEmptyList() {
  const isAtItsEnd = next === null && waiting === 0 && !isRefused;
  if (listed.length || !isAtItsEnd || submitted.get("text") || !byId("group").hidden) return;
  await load("");
}

async function find() {
  close();
  submitted = formValues();
  isRefused = false;
  listed = [];
  next = null;
  await load("");
}

async function more() {
  const first = listed.length;
  await load(next);
  byId("sample-table").querySelector(`button[data-place="${first}"]`)?.focus();
}

function formValues() {
  const values = new URLSearchParams();
  const form = new FormData(byId("sample-filter"));
  for (const name of ["text", "first_step", "last_step", "least_score", "most_score"]) {
    if (form.get(name)) values.set(name, form.get(name));
  }
  if (form.getAll("outcome").length) values.set("outcome", form.getAll("outcome").join(","));
  return values;
}

async function load(after) {
  const query = new URLSearchParams(submitted);
  if (after) query.set("after", after);
  asked += 1;
  const mine = asked;
  const page = await answerOf(query, mine);
  if (mine !== asked) return;
  needle = query.get("text") ?? "";
  listed.push(...page.groups);
  next = page.next;
  show(page);
}

async function answerOf(query, mine) {
  waiting += 1;
  try {
    return await ask(`/api/samples?${query}`);
  } catch (error) {
    if (error.status === INVALID && mine === asked) {
      isRefused = true;
      setText(byId("sample-count"), error.message);
    }
    throw error;
  } finally {
    waiting -= 1;
  }
}

function show(page) {
  byId("sample-table").tBodies[0].replaceChildren(...listed.map(row));
  byId("sample-more").hidden = next === null;
  setText(byId("sample-more"), needle ? "Search further" : "More groups");
  setText(byId("sample-count"), countText(page));
  for (const box of byId("outcomes").querySelectorAll("input")) {
    setText(byId(`${box.id}-count`), `(${count(page.counts[box.value] ?? 0)})`);
  }
}

function countText(page) {
  const total = Object.values(page.counts).reduce((a, b) => a + b, 0);
  if (total === 0) return "There is no group yet.";
  const shown = `${count(listed.length)} group${listed.length === 1 ? "" : "s"} shown`;
  if (!needle) return `${shown} of ${count(page.num_matching)} that match.`;
  const rest = next === null ? "" : " so far; search further for more";
  return `${shown} with “${needle}”${rest}.`;
}

function checkbox(outcome) {
  const id = `outcome-${outcome.replace(" ", "-")}`;
  return element(
    "span",
    {},
    element("input", { type: "checkbox", name: "outcome", id, value: outcome }),
    element("label", { for: id }, ` ${outcome} `, element("span", { id: `${id}-count` }, "")),
  );
}

function row(group, place) {
  const scores = group.scores.slice(0, MAX_SCORES).map((score) => short(score));
  if (group.scores.length > MAX_SCORES) scores.push("…");
  const button = element(
    "button",
    { type: "button", class: "open", "data-place": place },
    marked(group.excerpt.replaceAll("\n", " ") || "(empty prompt)", needle),
  );
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, button),
    element("td", { class: "number" }, group.step),
    element("td", {}, group.outcome),
    element("td", { class: "number" }, fixed(group.mean_score, 2)),
    element("td", { class: "scores" }, scores.join(" ") || "-"),
    element("td", { class: "number" }, versions(group.versions)),
  );
}

async function open(place) {
  const group = await ask(`/api/samples/${listed[place].id}`);
  opened = place;
  setText(byId("group-title"), groupTitle(group));
  byId("group-body").replaceChildren(...groupBody(group, needle));
  byId("group-newer").disabled = place === 0;
  byId("group-older").disabled = place === listed.length - 1;
  byId("group").hidden = false;
  byId("group").focus();
}

function close() {
  if (byId("group").hidden) return;
  byId("group").hidden = true;
  byId("sample-table").querySelector(`button[data-place="${opened}"]`)?.focus();
}
