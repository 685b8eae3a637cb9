// All charts over steps, and the histogram.

import { Chart, histogram, lineChart, stackedColumns } from "./chart.js";
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
const LINES = {
  accuracy: {
    curves: [["accuracy", "held-out accuracy", "blue"]],
    format: short,
    told: fixed,
    yFrom: 0,
    yTo: 1,
  },
  reward: { curves: [["reward", "mean reward", "purple"]], format: short, told: fixed },
  staleness: {
    curves: [
      ["staleness_max", "oldest", "orange dashed"],
      ["staleness_mean", "mean", "blue"],
    ],
    format: short,
    told: fixed,
  },
  speed: { curves: [["tokens_per_s", "tokens/s", "blue"]], format: short, told: count },
  idle: {
    curves: [
      ["trainer_idle", "trainer", "blue"],
      ["rollout_idle", "rollout", "orange dashed"],
    ],
    format: short,
    told: share,
    yFrom: 0,
    yTo: 1,
  },
  seconds: { curves: [["step_s", "seconds a step", "green"]], format: short, told: fixed },
};

const charts = new Map();

function chart(name) {
  if (!charts.has(name)) charts.set(name, new Chart(byId(`chart-${name}`)));
  return charts.get(name);
}

export function showCurves(answer) {
  for (const [name, line] of Object.entries(LINES)) showLine(name, line, answer.curves);
  showComposition(answer.composition);
  showHistogram(answer.staleness);
}

// Empty charts, which take the places of those to come.
export function showNoCurves() {
  const nothing = { x: [], y: [] };
  const keys = Object.values(LINES).flatMap(({ curves }) => curves.map(([key]) => key));
  showCurves({
    curves: Object.fromEntries(keys.map((key) => [key, nothing])),
    composition: { from: [], to: [], ...Object.fromEntries(KINDS.map(([kind]) => [kind, []])) },
    staleness: { versions: [], groups: [] },
  });
}

function showLine(name, { curves, format, told, yFrom, yTo }, values) {
  const drawn = curves.map(([key, title, style]) => ({ name: title, style, ...values[key] }));
  chart(name).show({
    axes: lineChart(drawn, { format, yFrom, yTo }),
    legend: drawn.map((curve) => ({ name: curve.name, style: `curve ${curve.style}` })),
    summary: drawn.map((curve) => `${curve.name}: ${spoken(curve, told)}`).join("; "),
    table: () => lineTable(drawn, told),
  });
}

function spoken({ x, y }, told) {
  const places = x.map((_, place) => place).filter((place) => y[place] !== null);
  if (!places.length) return "no value yet";
  const [first, last] = [places[0], places[places.length - 1]];
  return `${told(y[first])} at step ${x[first]}, ${told(y[last])} at step ${x[last]}`;
}

function lineTable(curves, told) {
  const byStep = new Map();
  curves.forEach(({ x, y }, column) => {
    x.forEach((step, place) => {
      if (!byStep.has(step)) byStep.set(step, curves.map(() => null));
      byStep.get(step)[column] = y[place];
    });
  });
  const rows = [...byStep].sort(([a], [b]) => a - b);
  return {
    head: ["Step", ...curves.map((curve) => curve.name)],
    rows: rows.map(([step, values]) => [step, ...values.map((value) => told(value))]),
  };
}

function showComposition(composition) {
  const columns = composition.from.map((from, place) => {
    const to = composition.to[place];
    const parts = KINDS.map(([kind]) => composition[kind][place] / (to - from + 1));
    return { from, to, parts };
  });
  const titles = KINDS.map(([, title]) => title);
  chart("composition").show({
    axes: stackedColumns(columns, KINDS.map(([, , style]) => style), short),
    legend: KINDS.map(([, name, style]) => ({ name, style: `area ${style}` })),
    summary: composedOf(columns[columns.length - 1], titles),
    table: () => ({
      head: ["Steps", ...titles],
      rows: columns.map(({ from, to, parts }) => [
        from === to ? from : `${from} to ${to}`,
        ...parts.map((part) => short(part)),
      ]),
    }),
  });
}

function composedOf(column, titles) {
  if (!column) return "no step yet";
  const parts = titles.map((title, place) => `${short(column.parts[place])} ${title}`);
  return `groups of step ${column.to}: ${parts.join(", ")}`;
}

function showHistogram({ versions, groups }) {
  const total = groups.reduce((a, b) => a + b, 0);
  const told = versions.map((version) => `${count(groups[version])} were ${version} behind`);
  chart("histogram").show({
    axes: histogram(versions, groups, short),
    legend: [{ name: `trained groups (${count(total)})`, style: "area blue" }],
    summary: told.join(", ") || "no trained group yet",
    table: () => ({
      head: ["Versions behind", "Groups", "Share"],
      rows: versions.map((version) => [
        version,
        count(groups[version]),
        share(groups[version] / total),
      ]),
    }),
  });
}
