export interface Change {
  kind: "same" | "gone" | "new";
  text: string;
}

/** `after` aligned with `before`, word by word: pieces that are not gone make up `after`, those that are not new `before`. */
export function changes(before: string, after: string): Change[] {
  const words = (text: string) => text.match(/\s*\S+|\s+$/g) ?? [];
  const [old, fresh] = [words(before), words(after)];
  // longest[i][j]: words that old[i..] and fresh[j..] have in common, in their order
  const width = fresh.length + 1;
  const longest = new Uint32Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i -= 1)
    for (let j = fresh.length - 1; j >= 0; j -= 1)
      longest[i * width + j] =
        old[i] === fresh[j]
          ? longest[(i + 1) * width + j + 1]! + 1
          : Math.max(longest[(i + 1) * width + j]!, longest[i * width + j + 1]!);
  const told: Change[] = [];
  const add = (kind: Change["kind"], text: string) => {
    const last = told.at(-1);
    if (last?.kind === kind) last.text += text;
    else told.push({ kind, text });
  };
  let [i, j] = [0, 0];
  while (i < old.length || j < fresh.length) {
    if (i < old.length && j < fresh.length && old[i] === fresh[j]) {
      add("same", fresh[j]!);
      i += 1;
      j += 1;
    } else if (i < old.length && (j === fresh.length || longest[(i + 1) * width + j]! >= longest[i * width + j + 1]!)) {
      add("gone", old[i]!);
      i += 1;
    } else {
      add("new", fresh[j]!);
      j += 1;
    }
  }
  return told;
}
