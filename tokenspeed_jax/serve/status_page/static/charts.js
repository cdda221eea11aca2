// Line charts of the last minutes: one or two series, a few grid lines, a cursor for pointer and arrow keys.

import { element } from "./dom.js";

export const SPAN_SECONDS = 300;

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { left: 0, right: 0, top: 6, bottom: 18 };
const BRIDGED_SECONDS = 15; // a gap no longer than this is drawn as a line
const RECENT_SECONDS = 15; // what is older is not shown as the value of now

function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The least of 1, 2, 4, 6, 8 x 10^n that is no smaller: its half is a short number too.
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const factor = [1, 2, 4, 6, 8, 10].find((step) => step * power >= value * 0.9999);
  return factor * power;
}

export class Chart {
  // series: [{ name, column }]; `format` writes a value, `least` is the smallest top of the scale, `most` the largest.
  constructor(figure, { series, format, least, most = Infinity }) {
    this.series = series;
    this.format = format;
    this.least = least;
    this.most = most;
    this.caption = figure.querySelector("figcaption");
    this.plot = figure.querySelector(".plot");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "img");
    this.title = this.caption.textContent;
    this.outputs = series.map(() => element("b", {}, "–"));
    figure.querySelector(".values").replaceChildren(
      ...series.map(({ name }, index) => element("span", { class: "value" }, element("i"), this.outputs[index], name)),
    );
    this.cursor = null; // seconds before now
    this.data = { at: [] };
    this.now = 0;
    new ResizeObserver(() => this.draw()).observe(this.plot);
    this.listen();
  }

  listen() {
    this.plot.addEventListener("pointermove", (event) => {
      const box = this.plot.getBoundingClientRect();
      this.point(SPAN_SECONDS * (1 - (event.clientX - box.left) / box.width));
    });
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: 1, ArrowRight: -1, PageUp: 30, PageDown: -30 }[event.key];
      if (step !== undefined) this.point((this.cursor ?? 0) + step);
      else if (event.key === "Escape") this.point(null);
      else return;
      event.preventDefault();
    });
  }

  point(cursor) {
    this.cursor = cursor === null ? null : Math.min(Math.max(cursor, 0), SPAN_SECONDS);
    this.draw();
  }

  show(data, now) {
    this.data = data;
    this.now = now;
    this.draw();
  }

  draw() {
    const { width, height } = this.plot.getBoundingClientRect();
    if (width === 0) return;
    const bottom = height - MARGIN.bottom;
    const top = this.top();
    const x = (at) => width - ((this.now - at) / SPAN_SECONDS) * width;
    const y = (value) => bottom - (Math.min(value, top) / top) * (bottom - MARGIN.top);
    const [parts, texts] = this.frame(width, bottom, top);
    this.series.forEach(({ column }, index) => parts.push(...this.lines(column, index, x, y, bottom)));
    const shown = this.nearest();
    if (this.cursor !== null && shown >= 0) {
      const place = x(this.data.at[shown]);
      parts.push(svg("line", { class: "cursor", x1: place, x2: place, y1: MARGIN.top, y2: bottom }));
    }
    this.plot.replaceChildren(svg("svg", { "aria-hidden": "true" }));
    this.plot.firstChild.append(...parts, ...texts);
    this.write(shown);
  }

  top() {
    let largest = 0;
    for (const { column } of this.series) {
      for (const value of this.data[column] ?? []) if (value !== null && value > largest) largest = value;
    }
    return Math.min(niceCeiling(Math.max(largest, this.least)), this.most);
  }

  // The grid, and what is written over the lines.
  frame(width, bottom, top) {
    const grid = [];
    const texts = [];
    for (const share of [0, 0.5, 1]) {
      const height = bottom - share * (bottom - MARGIN.top);
      grid.push(svg("line", { class: "grid", x1: 0, x2: width, y1: height, y2: height }));
      if (share > 0) texts.push(svg("text", { x: 0, y: height + 11 }, this.format(share * top)));
    }
    const labels = [[0, "start", "5 min ago"], [width, "end", "now"]];
    for (const [x, anchor, text] of labels) {
      texts.push(svg("text", { x, y: bottom + 14, "text-anchor": anchor }, text));
    }
    return [grid, texts];
  }

  lines(column, index, x, y, bottom) {
    const { at } = this.data;
    const values = this.data[column] ?? [];
    let line = "";
    let area = "";
    let begin = null;
    let last = null;
    const close = () => {
      if (begin !== null) area += `L${x(last)} ${bottom}L${x(begin)} ${bottom}Z`;
    };
    for (let sample = 0; sample < at.length; sample += 1) {
      if (values[sample] === null) continue;
      const place = `${x(at[sample]).toFixed(1)} ${y(values[sample]).toFixed(1)}`;
      if (last === null || at[sample] - last > BRIDGED_SECONDS) {
        close();
        begin = at[sample];
        line += `M${place}h0`; // a point alone is a dot: the line's caps are round
        area += `M${place}`;
      } else {
        line += `L${place}`;
        area += `L${place}`;
      }
      last = at[sample];
    }
    close();
    const parts = [svg("path", { class: index === 0 ? "line" : "line second", d: line })];
    return index === 0 ? [svg("path", { class: "area", d: area }), ...parts] : parts;
  }

  // The sample under the cursor, or the last one; -1 without any.
  nearest() {
    const { at } = this.data;
    const wanted = this.now - (this.cursor ?? 0);
    let best = at.length - 1;
    while (best > 0 && Math.abs(at[best - 1] - wanted) <= Math.abs(at[best] - wanted)) best -= 1;
    return best;
  }

  write(shown) {
    const values = this.series.map(({ column }) => {
      const all = this.data[column] ?? [];
      for (let sample = shown; sample >= 0; sample -= 1) {
        if (this.data.at[shown] - this.data.at[sample] > RECENT_SECONDS) break;
        if (all[sample] !== null) return all[sample];
        if (this.cursor !== null) break;
      }
      return null;
    });
    const texts = values.map((value) => this.format(value));
    texts.forEach((text, index) => { this.outputs[index].textContent = text; });
    const when = this.cursor === null || shown < 0 ? "" : `${Math.round(this.now - this.data.at[shown])} s ago`;
    this.caption.dataset.when = when;
    const described = this.series.map(({ name }, index) => `${name} ${texts[index]}`).join(", ");
    this.plot.setAttribute("aria-label", `${this.title}, the last 5 minutes; ${when || "now"}: ${described}`);
  }
}
