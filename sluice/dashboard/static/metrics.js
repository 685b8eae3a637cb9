// Any metric of the runs, and the runs side by side: against steps, tokens or wall-clock time.

import { ask } from "./api.js";
import { Chart, dataTable, lineChart } from "./chart.js";
import { RUN_STYLES } from "./colours.js";
import { firstAndLast } from "./curves.js";
import { byId, element, setText, whenChanged } from "./dom.js";
import { count, duration, share, short, visible } from "./number_text.js";
import { setting } from "./settings.js";

const FIRST_METRIC = "critic/rewards/mean";
const AXES = {
  step: { name: "step", write: short },
  tokens: { name: "generated tokens", write: short },
  seconds: { name: "wall-clock time", write: duration },
};
// By chart: the metric.
const OF_RUNS = {
  "runs-reward": "critic/rewards/mean",
  "runs-length": "response_length/mean",
  "runs-entropy": "actor/entropy",
};
const AT = { step: (at) => `step ${at}`, tokens: (at) => `${short(at)} tokens`, seconds: duration };
const KINDS = { count, share, seconds: duration, number: short };

const charts = new Map();
let known = new Map(); // metrics by name
let chosen = FIRST_METRIC;

export function startMetrics(onError) {
  const input = byId("metric");
  input.value = chosen;
  byId("metric-form").addEventListener("submit", (event) => event.preventDefault());
  byId("axis").addEventListener("change", () => followMetrics().catch(onError));
  // Lists what is there, not only names like the chosen one.
  input.addEventListener("focus", () => input.select());
  input.addEventListener("input", () => {
    const name = input.value.trim();
    setText(byId("metric-note"), known.has(name) ? meaning(name) : `${matching(name)} metrics match.`);
    if (!known.has(name) || name === chosen) return;
    chosen = name;
    followMetrics().catch(onError);
  });
}

export async function followMetrics() {
  const { metrics } = await ask("/api/metrics", { isPolled: true });
  known = new Map(metrics.map((metric) => [metric.name, metric]));
  showNames(metrics.map(({ name }) => name));
  if (document.activeElement !== byId("metric")) setText(byId("metric-note"), meaning(chosen));
  const side = await ask("/api/runs", { isPolled: true });
  await showMetric("metric", chosen, side.runs, chosen);
  const isSeveral = side.runs.length > 1;
  for (const node of document.querySelectorAll(".several-only")) node.hidden = !isSeveral;
  if (!isSeveral) return;
  show("runs-accuracy", side.runs, side.runs.map(({ accuracy }) => accuracy));
  for (const [name, metric] of Object.entries(OF_RUNS)) await showMetric(name, metric, side.runs);
  showTables(side);
}

const showNames = whenChanged((names) => {
  byId("metric-names").replaceChildren(...names.map((name) => element("option", { value: name })));
});

function matching(part) {
  return [...known.keys()].filter((name) => name.includes(part)).length;
}

// Their texts come from the table of metrics, in Markdown.
function meaning(name) {
  const metric = known.get(name);
  if (!metric) return known.size ? "" : "Metrics come with the first step.";
  const text = metric.meaning.replaceAll(/\[([^\]]*)\]\([^)]*\)/g, "$1").replaceAll("`", "");
  const unit = metric.unit ? ` (${metric.unit})` : "";
  return text ? `${name}${unit}: ${text}` : `${name}${unit}`;
}

async function showMetric(place, name, runs, caption) {
  const answer = await ask(`/api/metric?${new URLSearchParams({ name })}`, { isPolled: true });
  if (answer) show(place, runs, answer.runs, caption && visible(caption));
}

// `points` are {x: [step], y} of each run.
function show(place, runs, points, caption) {
  const axis = byId("axis").value;
  const lines = runs.map(({ name, axes }, number) => ({
    name: visible(name),
    style: RUN_STYLES[number % RUN_STYLES.length],
    x: points[number].x.map((step) => along(axes, axis, step)),
    y: points[number].y,
  }));
  showChanged(place, lines, axis, caption);
}

function showChanged(place, lines, axis, caption) {
  const text = JSON.stringify([lines, axis, caption]);
  if (!charts.has(place)) charts.set(place, { chart: new Chart(byId(`chart-${place}`)), text: "" });
  const held = charts.get(place);
  if (held.text === text) return;
  held.text = text;
  const xAxis = AXES[axis];
  const drawing = lineChart(lines, undefined, xAxis);
  const [xs, ...byRun] = drawing.data;
  held.chart.show({
    caption,
    drawing,
    format: short,
    legend: lines.map(({ name, style }, number) => ({
      name,
      style: `curve ${style}`,
      values: byRun[number],
    })),
    summary: lines.map((line) => `${line.name}: ${firstAndLast(line, short, xAxis)}`).join("; "),
    table: () => ({
      head: [xAxis.name, ...lines.map(({ name }) => name)],
      rows: xs.map((x, row) => [xAxis.write(x), ...byRun.map((column) => short(column[row]))]),
    }),
  });
}

// Where a step ends on another axis. The server thins the axes: between two of its steps, linearly.
function along(axes, axis, step) {
  const { step: steps, [axis]: values } = axes;
  if (axis === "step") return step;
  const after = steps.findIndex((one) => one >= step);
  if (after < 0) return values[values.length - 1] ?? 0;
  const [from, begin] = after ? [steps[after - 1], values[after - 1]] : [0, 0];
  return begin + ((values[after] - begin) * (step - from)) / (steps[after] - from || 1);
}

const showTables = whenChanged(({ runs, figures, progress, differences }) => {
  const names = runs.map(({ name }) => visible(name));
  const rows = figures.map(({ name, kind, values }) => [name, ...values.map(KINDS[kind])]);
  const equal = progress.map(({ by, at, accuracy, reward }) => [
    AT[by](at),
    ...accuracy.map(short),
    ...reward.map(short),
  ]);
  const differing = differences.map(({ key, values }) => [
    setting(key),
    ...values.map((value) => setting(value ?? "-")),
  ]);
  const head = [...names.map((n) => `${n}: accuracy`), ...names.map((n) => `${n}: reward`)];
  byId("runs-tables").replaceChildren(
    scrolled(dataTable("Figures; means are over the last 10 steps", ["", ...names], rows)),
    scrolled(dataTable("At equal steps, tokens and time", ["After", ...head], equal)),
    scrolled(
      dataTable(
        differing.length ? "Where the configurations differ" : "The configurations are the same",
        ["Key", ...names],
        differing,
        { isText: true },
      ),
      "scroll wide",
    ),
  );
});

function scrolled(table, style = "scroll") {
  const name = table.caption.textContent;
  return element("div", { class: style, role: "region", "aria-label": name, tabindex: 0 }, table);
}
