/** The power of ten of a value's first digit. */
const sizeOf = (value: number) => Math.floor(Math.log10(Math.abs(value) || 1));

/** A number as people read it: to a multiple of 10^place, or to some significant digits and never coarser than 1. */
export function figure(value: number | null | undefined, place?: number, significant = 4): string {
  if (value === null || value === undefined) return "∞";
  if (!Number.isFinite(value)) return String(value);
  const size = sizeOf(value);
  if (size < -5 || size > 14) return Number(value.toPrecision(significant)).toExponential().replaceAll("-", "−");
  const last = place ?? Math.min(size + 1 - significant, 0);
  const digits = Math.min(Math.max(-last, 0), 17);
  const rounded = last > 0 ? Math.round(value / 10 ** last) * 10 ** last : Number(value.toFixed(digits));
  const shown = { minimumFractionDigits: place === undefined ? 0 : digits, maximumFractionDigits: digits, useGrouping: Math.abs(rounded) >= 1e4 };
  return (rounded || 0).toLocaleString("en", shown).replace("-", "−");
}

/** A value as it is, but for the last bits of its float. */
export const exact = (value: number) => figure(value, undefined, 12);

export function percent(share: number): string {
  const of = 100 * share;
  if (of === 0) return "0%";
  if (of > 0 && of < 0.01) return "<0.01%";
  return `${of >= 10 ? of.toFixed(0) : of >= 1 ? of.toFixed(1) : of.toFixed(2)}%`;
}

type Ends = [number | null, number | null];

/** The power of ten to which a median and its interval are written, as `NumberPrediction.format` has it. */
export function placeOf(median: number, [low, high]: Ends): number | undefined {
  const width = low === null || high === null ? 0 : high - low;
  return width > 0 ? Math.min(Math.floor(Math.log10(width * 0.1)), median ? sizeOf(median) : Infinity) : undefined;
}

export function interval(median: number, ends: Ends): string {
  const place = placeOf(median, ends);
  return `${ends[0] === null ? "−∞" : figure(ends[0], place)} – ${figure(ends[1], place)}`;
}

/** Whether a number is expected where it is predicted; so where the server does not say. */
export const announced = (one: { announced?: boolean }) => one.announced !== false;

/** An axis for rows of numbers: it holds their medians, values and intervals, but for those that would squeeze all others. */
export function axisOf(all: { median: number; ends: Ends; value: number | null; announced?: boolean }[]): [number, number] {
  const middle = (them: number[]) => them.sort((a, b) => a - b)[Math.floor(them.length / 2)] ?? 0;
  const rows = all.some(announced) ? all.filter(announced) : all;
  const centre = middle(rows.map((row) => row.median));
  const widths = rows.map(({ ends }) => (ends[1] ?? Infinity) - (ends[0] ?? -Infinity)).filter(Number.isFinite);
  const reach = 5 * Math.max(middle(rows.map((row) => Math.abs(row.median - centre))), middle(widths));
  const places = rows.flatMap((row) => [row.median, row.value ?? centre, ...row.ends.map((end) => end ?? centre)]);
  const kept = places.filter((at) => Math.abs(at - centre) <= reach);
  return [Math.min(...kept), Math.max(...kept)];
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

/** The least of 1, 2 and 5 times a power of ten that is no smaller. */
function roundStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((one) => one >= least)!;
}

/** Evenly spaced round numbers from low to high, about `count`. */
export function ticks(low: number, high: number, count = 5): number[] {
  const rough = (high - low) / count;
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const step = roundStep(rough);
  const places = [];
  for (let at = Math.ceil(low / step); at * step <= high; at += 1) places.push(Number((at * step).toPrecision(12)));
  return places;
}

/** Round bins that hold 95 of a hundred values, about `count`, and bins of what lies beyond them: their names, and the bin of a value. */
export function binsOf(values: number[], count: number): { names: string[]; bin: (value: number) => number } {
  const sorted = [...values].sort((a, b) => a - b);
  const [low, high] = [sorted[Math.floor(0.025 * (sorted.length - 1))]!, sorted[Math.ceil(0.975 * (sorted.length - 1))]!];
  const whole = values.every(Number.isInteger);
  const step = Math.max(roundStep((high - low) / count || Math.abs(low) / 10 || 1), whole ? 1 : 0);
  const [from, to] = [Math.floor(low / step), Math.floor(high / step)];
  const [first, last] = [from - Number(sorted[0]! < from * step), to + Number(sorted.at(-1)! >= (to + 1) * step)];
  const names = Array.from({ length: last - first + 1 }, (_, bin) => {
    const [start, end] = [exact((first + bin) * step), exact((first + bin + 1) * step - Number(whole))];
    return first + bin < from ? `< ${exact(from * step)}` : first + bin > to ? `≥ ${start}` : start === end ? start : `${start} – ${end}`;
  });
  return { names, bin: (value) => Math.min(Math.max(Math.floor(value / step), first), last) - first };
}

/** A seed that nobody chose. */
export function anySeed(): number {
  return crypto.getRandomValues(new Uint32Array(1))[0]! >>> 1;
}
