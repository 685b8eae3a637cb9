// The frame of a chart: places for values, lines and numbers beside them.

import { svg } from "./dom.js";

export const WIDTH = 600;
export const HEIGHT = 220;
const LEFT = 54;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 40;

export class Axes {
  constructor({ xFrom, xTo, yFrom, yTo, xName, format }) {
    this.node = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    this.xFrom = xFrom;
    this.xTo = xTo > xFrom ? xTo : xFrom + 1;
    this.yFrom = yFrom;
    this.yTo = yTo > yFrom ? yTo : yFrom + 1;
    this.#frame(xName, format);
  }

  x(value) {
    return LEFT + ((value - this.xFrom) / (this.xTo - this.xFrom)) * (WIDTH - LEFT - RIGHT);
  }

  y(value) {
    const part = (value - this.yFrom) / (this.yTo - this.yFrom);
    return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM);
  }

  #frame(xName, format) {
    const [left, right] = [LEFT, WIDTH - RIGHT];
    for (const value of ticks(this.yFrom, this.yTo, 4)) {
      const y = this.y(value);
      this.node.append(
        svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, format(value)),
      );
    }
    const bottom = HEIGHT - BOTTOM;
    this.node.append(
      svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    );
    for (const value of ticks(this.xFrom, this.xTo, 6).filter(Number.isInteger)) {
      this.node.append(
        svg("text", { x: this.x(value), y: bottom + 18, "text-anchor": "middle" }, value),
      );
    }
    this.node.append(
      svg("text", { x: right, y: HEIGHT - 3, "text-anchor": "end" }, xName),
    );
  }
}

// The least stretch between round numbers that holds all values from one to the other.
export function roundRange(from, to) {
  const step = tickStep(from, to > from ? to : from + 1, 4);
  const [low, high] = [Math.floor(from / step + 1e-9), Math.ceil(to / step - 1e-9)];
  return [low * step, Math.max(high, low + 1) * step];
}

function tickStep(from, to, most) {
  const rough = (to - from) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
}

// Round numbers from one to the other, about `most` of them.
function ticks(from, to, most) {
  const step = tickStep(from, to, most);
  const found = [];
  for (let place = Math.ceil(from / step - 1e-9); place * step <= to + step * 1e-9; place += 1) {
    found.push(Number((place * step).toPrecision(12)));
  }
  return found;
}
