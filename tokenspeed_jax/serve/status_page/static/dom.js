// Elements are made by hand and text is only ever set as text: nothing that a model or a client wrote becomes markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function swatch(color, opacity = 1) {
  const made = element("span", { class: "swatch" });
  made.style.background = color;
  made.style.opacity = opacity;
  return made;
}

export const cell = (content, kind = "") => element("td", kind ? { class: kind } : {}, content);

export function terms(list, pairs) {
  list.replaceChildren(
    ...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))),
  );
}

const NUM_COLORS = 8;

// The color of a cache group, for styles.
export const groupColor = (index) => `var(--group-${index % NUM_COLORS})`;

// A color of the style sheet as it is now, for canvases.
export const resolved = (color) =>
  getComputedStyle(document.documentElement).getPropertyValue(color.slice("var(".length, -1)).trim();
