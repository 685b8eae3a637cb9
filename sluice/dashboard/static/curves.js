// All charts over steps.

import { Chart, lineChart, stackedColumns } from "./chart.js";
import { styleOf } from "./colours.js";
import { byId } from "./dom.js";
import { count, fixed, share, short } from "./number_text.js";

// Key in the answer, and name.
const KINDS = [
  ["kept", "kept"],
  ["all_right", "all right"],
  ["all_wrong", "all wrong"],
  ["stale", "stale"],
  ["failed", "failed"],
  ["other", "uniform or surplus"],
].map(([key, name]) => [key, name, styleOf(key)]);
const PHASES = [
  ["batch", "waiting for the batch", "grey"],
  ["logprobs", "logprobs and values", "mint"],
  ["update", "update", "green"],
  ["weights", "publishing weights", "ink"],
  ["checkpoint", "checkpoint", "brown"],
  ["other", "other", "silver"],
];
const SHARES = [0, 1];
// By chart: its curves (key in the answer, name, style), and how the table and the summary write
// their values.
const LINES = {
  accuracy: { curves: [["accuracy", "held-out accuracy", "ink"]], write: fixed, yRange: SHARES },
  reward: { curves: [["reward", "mean reward", "ink"]], write: fixed },
  length: {
    curves: [
      ["length_max", "longest", "grey dashed"],
      ["length_mean", "mean", "ink"],
    ],
    write: short,
  },
  entropy: { curves: [["entropy", "entropy", "ink"]], write: short },
  kl: {
    curves: [
      ["policy_kl", "of the step", "ink"],
      ["rollout_kl", "rollout to trainer", "grey dashed"],
      ["reference_kl", "to the reference", "purple"],
    ],
    write: short,
  },
  clip: {
    curves: [
      ["clip_fraction", "clipped", "ink"],
      ["clip_fraction_lower", "dual clip", "grey dashed"],
    ],
    write: short,
  },
  gradient: { curves: [["grad_norm", "gradient norm", "ink"]], write: short },
  lr: { curves: [["lr", "learning rate", "ink"]], write: short },
  weights: {
    curves: [
      ["weight_max", "largest", "orange dashed"],
      ["weight_mean", "mean", "ink"],
      ["weight_min", "smallest", "grey dashed"],
      ["weight_samples", "effective sample size", "purple"],
    ],
    write: fixed,
  },
  staleness: {
    curves: [
      ["staleness_max", "oldest", "orange dashed"],
      ["staleness_mean", "mean", "ink"],
    ],
    write: fixed,
  },
  tokens: {
    curves: [
      ["generated_tokens", "generated", "ink dashed"],
      ["trained_tokens", "trained", "green"],
    ],
    write: count,
  },
  speed: { curves: [["tokens_per_s", "tokens/s", "ink"]], write: count },
  idle: {
    curves: [
      ["trainer_idle", "trainer", "ink"],
      ["rollout_idle", "rollout", "grey dashed"],
    ],
    write: share,
    yRange: SHARES,
  },
};

const charts = new Map();

function chart(name) {
  if (!charts.has(name)) charts.set(name, new Chart(byId(`chart-${name}`)));
  return charts.get(name);
}

export function showCurves(answer) {
  for (const [name, line] of Object.entries(LINES)) showLines(name, line, answer.curves);
  showColumns("composition", KINDS, answer.composition, "groups");
  showColumns("timing", PHASES, answer.timing, "seconds");
}

// Empty charts, which reserve the space of those to come.
export function showNoCurves() {
  const nothing = { x: [], y: [] };
  const keys = Object.values(LINES).flatMap(({ curves }) => curves.map(([key]) => key));
  showCurves({
    curves: Object.fromEntries(keys.map((key) => [key, nothing])),
    composition: noColumns(KINDS),
    timing: noColumns(PHASES),
  });
}

function noColumns(kinds) {
  return { from: [], to: [], ...Object.fromEntries(kinds.map(([kind]) => [kind, []])) };
}

function showLines(name, { curves, write, yRange }, values) {
  const all = curves.map(([key, title, style]) => ({ name: title, style, ...values[key] }));
  // What this run does not measure takes no place in the legend.
  const measured = all.filter(({ y }) => y.some((value) => value !== null));
  const lines = measured.length ? measured : all.slice(0, 1);
  const drawing = lineChart(lines, yRange);
  const [steps, ...byCurve] = drawing.data;
  chart(name).show({
    drawing,
    format: short,
    legend: lines.map((line, place) => ({
      name: line.name,
      style: `curve ${line.style}`,
      values: byCurve[place],
    })),
    summary: lines.map((line) => `${line.name}: ${firstAndLast(line, write)}`).join("; "),
    table: () => ({
      head: ["Step", ...lines.map((line) => line.name)],
      rows: steps.map((step, row) => [step, ...byCurve.map((column) => write(column[row]))]),
    }),
  });
}

export function firstAndLast({ x, y }, write, axis = { name: "step", write: String }) {
  const places = x.map((_, place) => place).filter((place) => y[place] !== null);
  if (!places.length) return "no value yet";
  const [first, last] = [places[0], places[places.length - 1]];
  const at = (place) => `${write(y[place])} at ${axis.name} ${axis.write(x[place])}`;
  return `${at(first)}, ${at(last)}`;
}

// The mean of a step, by part, of each interval of steps.
function showColumns(name, kinds, answer, unit) {
  const present = kinds.filter(([kind]) => answer[kind].some((value) => value > 0));
  const shown = present.length ? present : kinds.slice(0, 1);
  const titles = shown.map(([, title]) => title);
  const columns = answer.from.map((from, place) => {
    const to = answer.to[place];
    const parts = shown.map(([kind]) => answer[kind][place] / (to - from + 1));
    return { from, to, parts };
  });
  chart(name).show({
    drawing: stackedColumns(columns, shown.map(([, , style]) => style)),
    format: short,
    legend: shown.map(([, title, style], place) => ({
      name: title,
      style: `area ${style}`,
      values: columns.map(({ parts }) => parts[place]),
    })),
    summary: partsOf(columns[columns.length - 1], titles, unit),
    table: () => ({
      head: ["Steps", ...titles],
      rows: columns.map(({ from, to, parts }) => [
        from === to ? from : `${from} to ${to}`,
        ...parts.map((part) => short(part)),
      ]),
    }),
  });
}

function partsOf(column, titles, unit) {
  if (!column) return "no step yet";
  const parts = titles.map((title, place) => `${short(column.parts[place])} ${title}`);
  return `${unit} of step ${column.to}: ${parts.join(", ")}`;
}
