// Figures as text. `null` is a figure that nobody has.

export const NONE = "–";

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const digits = (count) => new Intl.NumberFormat("en-US", { maximumFractionDigits: count });
const [one, two] = [digits(1), digits(2)];
const compactForm = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => (value === null ? NONE : whole.format(value));

export const compact = (value) => (value === null ? NONE : value < 1e4 ? whole.format(value) : compactForm.format(value));

export const percent = (share) => (share === null ? NONE : `${(share < 0.1 ? one : whole).format(share * 100)} %`);

export function seconds(value) {
  if (value === null) return NONE;
  if (value < 0.01) return `${two.format(value * 1000)} ms`;
  if (value < 1) return `${(value < 0.1 ? one : whole).format(value * 1000)} ms`;
  if (value < 60) return `${(value < 10 ? two : one).format(value)} s`;
  return duration(value);
}

export function duration(value) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([length]) => value >= length);
  if (first < 0) return "0 s";
  let left = Math.floor(value);
  const texts = [];
  for (const [length, name] of parts.slice(first, first + 2)) {
    const times = Math.floor(left / length);
    left -= times * length;
    if (times > 0) texts.push(`${times} ${name}`);
  }
  return texts.join(" ");
}

export function bytes(value) {
  if (value === null) return NONE;
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${(unit === 0 || value >= 100 ? whole : value >= 10 ? one : two).format(value)} ${units[unit]}`;
}
