// Charts by uPlot. Each is an image with a sentence for people who cannot see it, a legend
// with the values under the pointer, and a table of its data.

import { element, setText, svg } from "./dom.js";

const MAX_TABLE_ROWS = 200;
const FONT = "12px system-ui, sans-serif";
// Distances between the numbers of an axis that counts steps: 1, 2, 5, 10, 20, ...
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]);

const STEPS = { name: "step", write: (value) => value };

// A figure that `show` fills repeatedly. Its table exists only while it is open.
export class Chart {
  #figure;
  #plot = element("div", { class: "plot", role: "img" });
  #legend = element("ul", { class: "legend" });
  #details = element("details");
  #caption;
  #drawing = null; // what `show` received
  #uplot = null;
  #width = 0; // of the last drawing

  constructor(figure) {
    this.#figure = figure;
    this.#details.append(element("summary"));
    this.#name(figure.querySelector("figcaption").textContent);
    this.#details.addEventListener("toggle", () => this.#fillTable());
    figure.append(this.#plot, this.#legend, this.#details);
    new ResizeObserver(() => {
      if (this.#plot.clientWidth !== this.#width) this.#draw();
    }).observe(this.#plot);
    // A canvas keeps its colours: draw it again in those of the other scheme.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  // `drawing` comes from a function below. `legend` is [{name, style, values}], where `values` has
  // one entry for each x; `summary` replaces the image for screen readers; `table` is a function.
  show({ drawing, legend, format, summary, table, caption = this.#caption }) {
    if (caption !== this.#caption) this.#name(caption);
    this.#drawing = { drawing, legend, format, table };
    this.#plot.setAttribute("aria-label", `${this.#caption}: ${summary}`);
    this.#legend.replaceChildren(...legend.map(legendEntry));
    this.#draw();
    this.#fillTable();
  }

  #name(caption) {
    this.#caption = caption;
    setText(this.#figure.querySelector("figcaption"), caption);
    setText(this.#details.querySelector("summary"), `Data of “${caption}”`);
  }

  #draw() {
    if (!this.#drawing || !this.#plot.clientWidth) return;
    const { drawing, format } = this.#drawing;
    const { clientWidth: width, clientHeight: height } = this.#plot;
    this.#uplot?.destroy();
    this.#width = width;
    const options = {
      width,
      height,
      padding: [10, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false, range: drawing.xRange }, y: { range: drawing.yRange } },
      axes: axes(drawing, format),
      series: [{}, ...drawing.series],
      hooks: { setCursor: [({ cursor }) => this.#showValues(cursor.idx)] },
    };
    this.#uplot = new uPlot(options, drawing.data, this.#plot);
  }

  #showValues(index) {
    const { legend, format } = this.#drawing;
    this.#legend.querySelectorAll(".under-pointer").forEach((node, place) => {
      const value = legend[place].values[index];
      node.textContent = value === null || value === undefined ? "" : `: ${format(value)}`;
    });
  }

  #fillTable() {
    this.#details.querySelector(".scroll")?.remove();
    if (!this.#details.open || !this.#drawing) return;
    const { head, rows } = this.#drawing.table();
    const shown = rows.slice(-MAX_TABLE_ROWS);
    const left = rows.length - shown.length;
    const caption = left > 0 ? `${this.#caption}, the last ${shown.length} rows` : this.#caption;
    this.#details.append(
      element(
        "div",
        { class: "scroll", role: "region", "aria-label": `Data of ${this.#caption}`, tabindex: 0 },
        dataTable(caption, head, shown),
      ),
    );
  }
}

// `isText`: the cells are words, not numbers.
export function dataTable(caption, head, rows, { isText = false } = {}) {
  const cellClass = isText ? null : "number";
  const body = rows.map(([first, ...others]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, first),
      ...others.map((cell) => element("td", { class: cellClass }, cell)),
    ),
  );
  const titles = head.map((name, place) =>
    element("th", { scope: "col", class: place ? cellClass : null }, name),
  );
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...titles)),
    element("tbody", {}, ...body),
  );
}

export function swatch(style) {
  const mark = style.includes("curve")
    ? svg("line", { class: style, x1: 0, x2: 20, y1: 5, y2: 5 })
    : svg("rect", { class: style, width: 20, height: 10 });
  return svg("svg", { viewBox: "0 0 20 10", "aria-hidden": true }, mark);
}

function legendEntry({ name, style }) {
  return element("li", {}, swatch(style), name, element("span", { class: "under-pointer" }));
}

// Lines over steps. Each of `curves` is {style, x, y}; null in y leaves a gap.
export function lineChart(curves, yRange, xAxis = STEPS) {
  const xs = curves.flatMap((curve) => curve.x);
  const [from, to] = [lowest(xs, 0), highest(xs, 1)];
  return {
    // Curves may have different steps: what one of them lacks is undefined, which leaves no gap.
    data: uPlot.join(curves.map(({ x, y }) => [x, y])),
    series: curves.map(({ style }) => {
      const [name, dash] = style.split(" ");
      return { stroke: colour(name), width: 2, dash: dash && [6, 4], points: { size: 5 } };
    }),
    xRange: [from, to > from ? to : from + 1],
    yRange: yRange ?? ((_, low, high) => rangeWithZero(low, high)),
    xAxis,
  };
}

// Columns of parts on top of each other. `columns` are {from, to, parts: [number]}.
export function stackedColumns(columns, styles) {
  const xs = columns.map(({ from }) => from - 0.5);
  const end = columns.length ? columns[columns.length - 1].to + 0.5 : 1;
  // Sums of the first 1, 2, ... parts, each as an area down to zero: the largest comes
  // first, and the smaller ones cover its lower part. The last column is repeated as its own end.
  const sums = styles.map((_, place) => {
    const heights = columns.map(({ parts }) => parts.slice(0, place + 1).reduce((a, b) => a + b));
    return heights.length ? [...heights, heights[heights.length - 1]] : [0];
  });
  return {
    data: [[...xs, end], ...sums.reverse()],
    series: [...styles].reverse().map((style) => ({
      fill: colour(style),
      paths: uPlot.paths.stepped({ align: 1 }),
      points: { show: false },
    })),
    xRange: [columns.length ? xs[0] : 0, end],
    yRange: (_, low, high) => rangeWithZero(low, high),
    xAxis: STEPS,
  };
}

// One bar of shares that add up to 1 at most.
export function shareBar(parts) {
  const bar = svg("svg", {
    viewBox: "0 0 100 20",
    preserveAspectRatio: "none",
    "aria-hidden": true,
  });
  let left = 0;
  for (const { share, style } of parts) {
    bar.append(
      svg("rect", { class: `area ${style}`, x: left, width: 100 * share, height: 20, y: 0 }),
    );
    left += 100 * share;
  }
  return bar;
}

function axes({ xAxis }, format) {
  const common = {
    stroke: colour("soft"),
    font: FONT,
    ticks: { show: false },
    grid: { stroke: colour("grid"), width: 1 },
  };
  return [
    {
      ...common,
      grid: { show: false },
      border: { show: true, stroke: colour("line"), width: 1 },
      size: 24,
      label: xAxis.name,
      labelSize: 16,
      labelGap: 0,
      labelFont: FONT,
      incrs: WHOLE,
      values: (_, values) => values.map(xAxis.write),
    },
    { ...common, size: 54, space: 28, values: (_, values) => values.map(format) },
  ];
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function rangeWithZero(low, high) {
  const [from, to] = [Math.min(low ?? 0, 0), Math.max(high ?? 0, 0)];
  return to > from ? uPlot.rangeNum(from, to, 0.1, true) : [0, 1];
}

function lowest(values, none) {
  return values.length ? values.reduce((a, b) => Math.min(a, b)) : none;
}

function highest(values, none) {
  return values.length ? values.reduce((a, b) => Math.max(a, b)) : none;
}
