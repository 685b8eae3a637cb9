// Charts: each is an image with a sentence for who cannot see it, a legend, and a table of its data.

import { Axes, roundRange, WIDTH } from "./axes.js";
import { element, svg } from "./dom.js";

const MOST_TABLE_ROWS = 200;

// A figure that is filled by `show` again and again; its table is made only while it is open.
export class Chart {
  #figure;
  #plot = element("div", { class: "plot" });
  #legend = element("ul", { class: "legend" });
  #details = element("details");
  #rows = () => ({ head: [], rows: [] });
  #caption;

  constructor(figure) {
    this.#figure = figure;
    this.#caption = figure.querySelector("figcaption").textContent;
    this.#details.append(element("summary", {}, `Data of “${this.#caption}”`));
    this.#details.addEventListener("toggle", () => this.#fillTable());
    figure.append(this.#plot, this.#legend, this.#details);
  }

  show({ axes, legend, summary, table }) {
    axes.node.setAttribute("aria-label", `${this.#caption}: ${summary}`);
    this.#plot.replaceChildren(axes.node);
    this.#legend.replaceChildren(...legend.map(({ name, style }) => legendEntry(name, style)));
    this.#rows = table;
    this.#fillTable();
  }

  #fillTable() {
    this.#details.querySelector(".scroll")?.remove();
    if (!this.#details.open) return;
    const { head, rows } = this.#rows();
    const shown = rows.slice(-MOST_TABLE_ROWS);
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

export function dataTable(caption, head, rows) {
  const body = rows.map(([first, ...others]) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, first),
      ...others.map((cell) => element("td", { class: "number" }, cell)),
    ),
  );
  const titles = head.map((name, place) =>
    element("th", { scope: "col", class: place ? "number" : null }, name),
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

function legendEntry(name, style) {
  return element("li", {}, swatch(style), name);
}

// Lines over steps. Each of `curves` is {name, style, x, y}; null in y leaves a gap.
export function lineChart(curves, { format, yFrom = null, yTo = null }) {
  const xs = curves.flatMap((curve) => curve.x);
  const ys = curves.flatMap((curve) => curve.y).filter((value) => value !== null);
  const [low, high] = roundRange(Math.min(0, extreme(ys, Math.min)), extreme(ys, Math.max));
  const axes = new Axes({
    xFrom: xs.length ? extreme(xs, Math.min) : 0,
    xTo: xs.length ? extreme(xs, Math.max) : 1,
    yFrom: yFrom ?? low,
    yTo: yTo ?? high,
    xName: "step",
    format,
  });
  for (const curve of curves) drawCurve(axes, curve);
  return axes;
}

function extreme(values, pick) {
  return values.length ? values.reduce((a, b) => pick(a, b)) : 0;
}

function drawCurve(axes, { style, x, y }) {
  let path = "";
  let isOpen = false;
  for (let place = 0; place < x.length; place += 1) {
    if (y[place] === null) {
      isOpen = false;
      continue;
    }
    const [px, py] = [axes.x(x[place]).toFixed(1), axes.y(y[place]).toFixed(1)];
    path += `${isOpen ? "L" : "M"}${px} ${py}`;
    isOpen = true;
    if (x.length <= 40) {
      axes.node.append(svg("circle", { class: `${style} curve-point`, cx: px, cy: py, r: 2.5 }));
    }
  }
  axes.node.append(svg("path", { class: `curve ${style}`, d: path }));
}

// Columns of parts on top of each other. `columns` are {from, to, parts: [number]}.
export function stackedColumns(columns, styles, format) {
  const totals = columns.map(({ parts }) => parts.reduce((a, b) => a + b, 0));
  const axes = new Axes({
    xFrom: columns.length ? columns[0].from - 0.5 : 0,
    xTo: columns.length ? columns[columns.length - 1].to + 0.5 : 1,
    yFrom: 0,
    yTo: roundRange(0, extreme(totals, Math.max))[1],
    xName: "step",
    format,
  });
  for (const { from, to, parts } of columns) {
    const [left, right] = [axes.x(from - 0.5), axes.x(to + 0.5)];
    let low = 0;
    parts.forEach((part, place) => {
      if (part > 0) axes.node.append(block(axes, styles[place], left, right, low, low + part));
      low += part;
    });
  }
  return axes;
}

function block(axes, style, left, right, low, high) {
  return svg("rect", {
    class: `area ${style}`,
    x: left.toFixed(2),
    width: Math.max(right - left, 0.5).toFixed(2),
    y: axes.y(high).toFixed(2),
    height: Math.max(axes.y(low) - axes.y(high), 0).toFixed(2),
  });
}

// One column a value, from 0 on.
export function histogram(values, heights, format) {
  const axes = new Axes({
    xFrom: -0.5,
    xTo: Math.max(values.length, 2) - 0.5,
    yFrom: 0,
    yTo: roundRange(0, extreme(heights, Math.max))[1],
    xName: "versions behind",
    format,
  });
  heights.forEach((height, value) => {
    axes.node.append(block(axes, "blue", axes.x(value - 0.4), axes.x(value + 0.4), 0, height));
  });
  return axes;
}

// One bar of shares that add up to 1 at most.
export function shareBar(parts) {
  const bar = svg("svg", {
    viewBox: `0 0 ${WIDTH} 20`,
    preserveAspectRatio: "none",
    "aria-hidden": true,
  });
  let left = 0;
  for (const { share, style } of parts) {
    const width = share * WIDTH;
    bar.append(svg("rect", { class: `area ${style}`, x: left, width, height: 20, y: 0 }));
    left += width;
  }
  return bar;
}

