import type { Changes } from "./api";

/** A part of the text that was, as it stands in a world: kept, or gone with something else in its place. */
export interface Cell {
  same: string;
  gone: string;
  fresh: string;
}

/** Worlds side by side: rows of parts that are in common or differ, a cell for each world. */
export function align(worlds: Changes[]): Cell[][] {
  /** Of a world: what it puts where, and which stretches of the old text it drops. */
  const read = worlds.map((changes) => {
    const dropped: [number, number][] = [];
    const put = new Map<number, string>();
    let at = 0;
    let place = 0; // where a new text goes: the start of what it stands for
    for (const [kind, text] of changes) {
      if (kind === "new") put.set(place, (put.get(place) ?? "") + text);
      else {
        if (kind === "gone") dropped.push([at, at + text.length]);
        place = kind === "gone" ? at : at + text.length;
        at += text.length;
      }
    }
    return { dropped, put, length: at };
  });
  const old = (worlds[0] ?? []).filter(([kind]) => kind !== "new").map(([, text]) => text).join("");
  const cuts = new Set([0, old.length]);
  for (const { dropped, put } of read) for (const at of [...dropped.flat(), ...put.keys()]) cuts.add(at);
  const places = [...cuts].sort((a, b) => a - b);
  const rows: Cell[][] = [];
  places.forEach((from, index) => {
    const to = places[index + 1] ?? from;
    const inserted = read.map(({ put, dropped }) => (put.has(from) && !dropped.some(([start]) => start === from) ? put.get(from)! : ""));
    if (inserted.some(Boolean)) rows.push(inserted.map((fresh) => ({ same: "", gone: "", fresh })));
    if (to === from) return;
    rows.push(
      read.map(({ put, dropped }) => {
        const isGone = dropped.some(([start, end]) => start <= from && to <= end);
        const starts = dropped.some(([start]) => start === from);
        return isGone
          ? { same: "", gone: old.slice(from, to), fresh: starts ? (put.get(from) ?? "") : "" }
          : { same: old.slice(from, to), gone: "", fresh: "" };
      }),
    );
  });
  return rows;
}
