// All charts over steps.

import { Chart, lineChart, stackedColumns } from "./chart.js";
import { byId } from "./dom.js";
import { count, fixed, share, short } from "./number_text.js";

const KINDS = [
  ["kept", "kept (mixed)", "orange"],
  ["all_right", "all right", "green"],
  ["all_wrong", "all wrong", "blue"],
  ["stale", "stale", "purple"],
  ["failed", "failed", "red"],
  ["other", "uniform or surplus", "grey"],
];
const SHARES = [0, 1];
// By chart: its curves (key in the answer, name, style), and how the table and the summary write
// their values.
const LINES = {
  accuracy: { curves: [["accuracy", "held-out accuracy", "blue"]], write: fixed, yRange: SHARES },
  reward: { curves: [["reward", "mean reward", "purple"]], write: fixed },
  staleness: {
    curves: [
      ["staleness_max", "oldest", "orange dashed"],
      ["staleness_mean", "mean", "blue"],
    ],
    write: fixed,
  },
  tokens: {
    curves: [
      ["generated_tokens", "generated", "orange dashed"],
      ["trained_tokens", "trained", "blue"],
    ],
    write: count,
  },
  speed: { curves: [["tokens_per_s", "tokens/s", "blue"]], write: count },
  idle: {
    curves: [
      ["trainer_idle", "trainer", "blue"],
      ["rollout_idle", "rollout", "orange dashed"],
    ],
    write: share,
    yRange: SHARES,
  },
  seconds: { curves: [["step_s", "seconds per step", "green"]], write: fixed },
};

const charts = new Map();

function chart(name) {
  if (!charts.has(name)) charts.set(name, new Chart(byId(`chart-${name}`)));
  return charts.get(name);
}

export function showCurves(answer) {
  for (const [name, line] of Object.entries(LINES)) showLines(name, line, answer.curves);
  showComposition(answer.composition);
}

// Empty charts, which reserve the space of those to come.
export function showNoCurves() {
  const nothing = { x: [], y: [] };
  const keys = Object.values(LINES).flatMap(({ curves }) => curves.map(([key]) => key));
  showCurves({
    curves: Object.fromEntries(keys.map((key) => [key, nothing])),
    composition: { from: [], to: [], ...Object.fromEntries(KINDS.map(([kind]) => [kind, []])) },
  });
}

function showLines(name, { curves, write, yRange }, values) {
  const lines = curves.map(([key, title, style]) => ({ name: title, style, ...values[key] }));
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

function firstAndLast({ x, y }, write) {
  const places = x.map((_, place) => place).filter((place) => y[place] !== null);
  if (!places.length) return "no value yet";
  const [first, last] = [places[0], places[places.length - 1]];
  return `${write(y[first])} at step ${x[first]}, ${write(y[last])} at step ${x[last]}`;
}

function showComposition(composition) {
  const columns = composition.from.map((from, place) => {
    const to = composition.to[place];
    const parts = KINDS.map(([kind]) => composition[kind][place] / (to - from + 1));
    return { from, to, parts };
  });
  const titles = KINDS.map(([, title]) => title);
  chart("composition").show({
    drawing: stackedColumns(columns, KINDS.map(([, , style]) => style)),
    format: short,
    legend: KINDS.map(([, name, style], place) => ({
      name,
      style: `area ${style}`,
      values: columns.map(({ parts }) => parts[place]),
    })),
    summary: groupsOf(columns[columns.length - 1], titles),
    table: () => ({
      head: ["Steps", ...titles],
      rows: columns.map(({ from, to, parts }) => [
        from === to ? from : `${from} to ${to}`,
        ...parts.map((part) => short(part)),
      ]),
    }),
  });
}

function groupsOf(column, titles) {
  if (!column) return "no step yet";
  const parts = titles.map((title, place) => `${short(column.parts[place])} ${title}`);
  return `groups of step ${column.to}: ${parts.join(", ")}`;
}
