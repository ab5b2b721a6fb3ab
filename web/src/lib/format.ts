/** A number as people read it: four significant digits. */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined) return "∞";
  if (!Number.isFinite(value)) return String(value);
  const rounded = Number(value.toPrecision(4));
  return (Object.is(rounded, -0) ? 0 : rounded).toString().replace("-", "−");
}

export function percent(share: number): string {
  const of = 100 * share;
  if (of > 0 && of < 0.01) return "<0.01%";
  return `${of >= 10 ? of.toFixed(0) : of >= 1 ? of.toFixed(1) : of.toFixed(2)}%`;
}

export function interval(ends: [number | null, number | null]): string {
  return `${ends[0] === null ? "−∞" : figure(ends[0])} – ${figure(ends[1])}`;
}

/** What cannot be seen in a text, made visible: marks of direction, control characters, parts of characters. */
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g;

export function seen(text: string): string {
  return text.replace(UNSEEN, (one) => `⟨${one.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

/** A short text whose spaces and line breaks are to be seen. */
export function shown(text: string): string {
  return seen(text).replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
}

/** Evenly spaced round numbers from low to high, about `count`. */
export function ticks(low: number, high: number, count = 5): number[] {
  const rough = (high - low) / count;
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((one) => one >= rough)!;
  const places = [];
  for (let at = Math.ceil(low / step); at * step <= high; at += 1) places.push(Number((at * step).toPrecision(12)));
  return places;
}

/** A seed that nobody chose. */
export function anySeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0]! >>> 1;
}
