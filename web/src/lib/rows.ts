/** Rows of texts and, where they are known, true values. */
export interface Row {
  prompt: string;
  value: number | null;
}

/** Cells of CSV (RFC 4180), or of lines separated by another character. */
export function parseCsv(text: string, separator = ","): string[][] {
  const rows: string[][] = [];
  let row: string[] = [];
  let cell = "";
  let quoted = false;
  const endRow = () => {
    row.push(cell);
    if (row.length > 1 || row[0] !== "") rows.push(row);
    row = [];
    cell = "";
  };
  for (let at = text.charCodeAt(0) === 0xfeff ? 1 : 0; at < text.length; at += 1) {
    const one = text[at]!;
    if (quoted) {
      if (one !== '"') cell += one;
      else if (text[at + 1] === '"') cell += text[++at];
      else quoted = false;
    } else if (one === '"' && cell === "") quoted = true;
    else if (one === separator) {
      row.push(cell);
      cell = "";
    } else if (one === "\n" || one === "\r") {
      if (one === "\r" && text[at + 1] === "\n") at += 1;
      endRow();
    } else cell += one;
  }
  if (cell !== "" || row.length) endRow();
  return rows;
}

export function writeCsv(rows: (string | number | null | undefined)[][]): string {
  const cell = (one: string | number | null | undefined) => {
    const text = one === null || one === undefined ? "" : String(one);
    return /[",\r\n]/.test(text) || text !== text.trim() ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
}

/** A table with a heading, where a text is one: its first line names a column `prompt` or `text`. */
export function tableOf(text: string): { heading: string[]; cells: string[][] } | null {
  const first = text.replace(/^\ufeff/, "").split(/\r?\n/, 1)[0]!;
  const separator = first.includes("\t") ? "\t" : ",";
  const [heading, ...cells] = parseCsv(text, separator);
  const known = heading?.some((name) => /^(prompt|text)$/i.test(name.trim()));
  return heading && known ? { heading: heading.map((name) => name.trim()), cells } : null;
}

/** The number in a cell; null where there is none. */
export function numberIn(cell: string | undefined): number | null {
  const text = (cell ?? "").trim().replace("−", "-");
  const written = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(text); // 0x10 is a word
  return written && Number.isFinite(Number(text)) ? Number(text) : null;
}

/** The options that are named in a text, each once. */
export function optionsOf(told: string): string[] {
  return [...new Set(told.split(/[,，\n]/).map((word) => word.trim()).filter(Boolean))];
}
