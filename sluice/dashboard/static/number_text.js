// Numbers as people read them.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? "-" : grouped.format(value);
}

export function fixed(value, digits = 3) {
  return value === null || value === undefined ? "-" : value.toFixed(digits);
}

export function share(value) {
  return value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`;
}

export function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e6) return `${trimmed(value / 1e6)}M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)}k`;
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(".0", "");
  return trimmed(value);
}

export function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// A setting, a log line or a name, with escapes in place of characters that hide or reorder text.
export function visible(text) {
  return text.replaceAll(/(?!\t)[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu, (character) => {
    return `\\u{${character.codePointAt(0).toString(16)}}`;
  });
}

function trimmed(value) {
  return String(Number(value.toPrecision(3)));
}
