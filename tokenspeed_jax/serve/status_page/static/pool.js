// The pool as cells: full colour where requests hold blocks, pale where blocks are only cached, grey where it is free.

import { byId, cell, element, groupColor, resolved, swatch } from "./dom.js";
import { count } from "./format.js";

export const CACHED_OPACITY = 0.38;
const LARGEST_CELL = 32;

export class Pool {
  constructor() {
    this.canvas = byId("pool");
    this.readout = byId("pool-readout");
    this.picture = null;
    this.places = { size: 1, columns: 1 };
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => { this.readout.textContent = this.hint(); });
  }

  show(picture) {
    const before = this.picture;
    this.picture = picture;
    if (before === null) this.readout.textContent = this.hint();
    this.draw();
    this.writeLegend();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (this.picture === null || width === 0) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const cells = this.picture.cells.reduce((sum, [, length]) => sum + length, 0);
    const size = cellSize(cells, width, height);
    const columns = Math.floor(width / size);
    this.places = { size, columns };
    const gap = size > 5 ? 2 : size > 3 ? 1 : 0;
    const free = resolved("var(--free)");
    const colors = this.picture.groups.map((_, index) => resolved(groupColor(index)));
    let place = 0;
    for (const [use, length] of this.picture.cells) {
      pen.fillStyle = use === 0 ? free : colors[Math.abs(use) - 1];
      pen.globalAlpha = use < 0 ? CACHED_OPACITY : 1;
      for (const end = place + length; place < end; place += 1) {
        pen.beginPath();
        const [x, y] = [(place % columns) * size, Math.floor(place / columns) * size];
        pen.roundRect(x, y, size - gap, size - gap, size > 8 ? 2 : 0);
        pen.fill();
      }
    }
  }

  point(x, y) {
    if (this.picture === null) return;
    const { size, columns } = this.places;
    const column = Math.floor(x / size);
    const place = Math.floor(y / size) * columns + column;
    const use = column < columns ? useAt(this.picture.cells, place) : null;
    this.readout.textContent = use === null ? this.hint() : this.describe(place, use);
  }

  hint() {
    const each = this.picture?.parents_per_cell;
    if (!each) return " ";
    return each === 1 ? "A cell is one parent block." : `A cell stands for ${each} parent blocks and shows what most of them are.`;
  }

  describe(place, use) {
    const each = this.picture.parents_per_cell;
    const first = place * each + 1;
    const last = Math.min(first + each - 1, this.picture.parents);
    const what = use === 0 ? "free" : `${this.picture.groups[Math.abs(use) - 1].group_id}, ${use > 0 ? "in use" : "cached"}`;
    return first === last ? `Parent ${count(first)}: ${what}` : `Parents ${count(first)} to ${count(last)}: mostly ${what}`;
  }

  writeLegend() {
    if (this.picture === null) return;
    const { groups, free, parents } = this.picture;
    const rows = groups.map(({ group_id, in_use, cached }, index) => {
      const color = groupColor(index);
      return element(
        "tr", {},
        cell(element("span", {}, swatch(color), swatch(color, CACHED_OPACITY), group_id)),
        cell(count(in_use), "number"),
        cell(count(cached), "number"),
      );
    });
    byId("pool-groups").replaceChildren(...rows);
    byId("pool-aside").textContent = `${count(free)} of ${count(parents)} parents free`;
    const said = groups.map(({ group_id, in_use, cached }) => `${group_id} ${in_use} in use, ${cached} cached`);
    this.canvas.setAttribute("aria-label", `${parents} parent blocks: ${said.join("; ")}; ${free} free`);
  }
}

// The largest cell with which all fit.
function cellSize(cells, width, height) {
  let size = Math.min(LARGEST_CELL, Math.floor(Math.sqrt((width * height) / Math.max(cells, 1))));
  while (size > 1 && Math.ceil(cells / Math.floor(width / size)) * size > height) size -= 1;
  return Math.max(size, 1);
}

function useAt(cells, place) {
  for (const [use, length] of cells) {
    if (place < length) return use;
    place -= length;
  }
  return null;
}
