// One group: its prompt, and all of its responses with their grades.

import { element, marked } from "./dom.js";
import { count, fixed } from "./number_text.js";

export function groupTitle(group) {
  return `Group of step ${group.step}: ${group.outcome}`;
}

export function groupBody(group, needle) {
  const num = group.responses.length;
  return [
    facts(group),
    element("h4", {}, "Prompt"),
    element("pre", { id: "group-prompt" }, marked(group.prompt, needle)),
    element("h4", {}, num ? `${num} response${num === 1 ? "" : "s"}` : "No response was graded"),
    element("ol", { class: "responses" }, ...group.responses.map((one) => response(one, needle))),
  ];
}

function facts(group) {
  const pairs = [
    ["Ground truth", group.ground_truth || "-"],
    ["Mean score", fixed(group.mean_score)],
    [group.is_trained ? "Trained in step" : "Sampled for step", group.step],
    ["Versions", versions(group.versions)],
    ["Data source", group.data_source || "-"],
    ...(group.environment ? [["Environment", group.environment]] : []),
    ["Prompt's name", group.prompt_id || "-"],
    ["Replicas", group.replicas.join(", ") || "-"],
    ["Ended", group.ended_at ? new Date(group.ended_at * 1000).toLocaleString("en-GB") : "-"],
  ];
  return element(
    "dl",
    {},
    ...pairs.map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    ),
  );
}

function response(one, needle) {
  const details = [];
  if (one.reward !== null && one.reward !== one.score) details.push(`reward ${fixed(one.reward)}`);
  if (one.tokens) details.push(`${count(one.tokens)} tokens`);
  if (one.versions) details.push(`version ${versions(one.versions)}`);
  if (one.turns.length) details.push(...played(one.turns));
  // The last turn's end is none of an episode that failed.
  const end = one.turns.length ? one.episode_end : one.finish;
  if (end) details.push(`ended by ${end}`);
  for (const [name, value] of Object.entries(one.metrics)) details.push(`${name} ${fixed(value)}`);
  const grade = one.failure
    ? element("span", { class: "failure" }, `no score: ${one.failure}`)
    : element("span", { class: "score" }, `score ${fixed(one.score)}`);
  return element(
    "li",
    {},
    element("p", { class: "head" }, grade, details.length ? ` · ${details.join(" · ")}` : ""),
    ...(one.turns.length
      ? one.turns.flatMap((each, number) => turn(each, number, needle))
      : [element("pre", { class: "response" }, marked(one.text, needle))]),
  );
}

// Return what an episode's turns amount to.
function played(turns) {
  const roots = turns.filter((one) => one.parent === null).length;
  const seconds = {};
  for (const [part, spent] of turns.flatMap((one) => Object.entries(one.seconds))) {
    seconds[part] = (seconds[part] ?? 0) + spent;
  }
  return [
    `${turns.length} turn${turns.length === 1 ? "" : "s"}`,
    ...(roots > 1 ? [`${roots} roots`] : []),
    ...times(seconds),
  ];
}

function times(seconds) {
  return Object.entries(seconds).map(([part, spent]) => `${part} ${fixed(spent)} s`);
}

function turn(one, number, needle) {
  const details = [`${count(one.tokens)} tokens`];
  if (one.read_tokens) details.push(`${count(one.read_tokens)} read`);
  if (one.is_new_root) details.push("new root");
  else if (one.parent !== null && one.parent !== number - 1) details.push(`after turn ${one.parent}`);
  if (one.reward !== null) details.push(`reward ${fixed(one.reward)}`);
  details.push(...times(one.seconds));
  return [
    element("p", { class: "head turn" }, `turn ${number} · ${details.join(" · ")}`),
    ...(one.read ? [element("pre", { class: "read", tabindex: 0 }, marked(one.read, needle))] : []),
    element("pre", { class: "response" }, marked(one.text, needle)),
  ];
}

export function versions(pair) {
  if (!pair) return "-";
  return pair[0] === pair[1] ? String(pair[0]) : `${pair[0]} to ${pair[1]}`;
}
