/** What the server answers, as docs/serving.md has it. */
export interface Limits {
  max_rows: number;
  max_waiting: number;
  max_tokens: number;
  max_body: number;
  max_prompts: number;
  max_heard: number;
  timeout: number;
}

export interface Card {
  id: string;
  causal: {
    presets: string[];
    individuals: string[];
    chat: boolean;
    numbers: boolean;
    context: number | null;
    fingerprint: string;
    keeps: boolean;
    limits: Limits;
  };
}

export interface Alternative {
  token: number;
  name: string;
  text: string | null;
  softmax: number;
  ovr: number;
}

/** A token of a text: its characters, itself, and what else could have stood there. */
export interface Token {
  span: [number, number];
  chosen: Alternative;
  who: number;
  alternatives: Alternative[];
  decided: number;
}

export type Intervals = Record<string, [number | null, number | null]>;

export interface WrittenNumber {
  value: number;
  span: [number, number];
  median: number;
  intervals: Intervals;
  num_prob: number;
  announced?: boolean;
  curve?: Curve;
}

export interface Curve {
  value: number[];
  density: (number | null)[];
  cdf: number[];
}

export interface Prediction {
  index: number;
  median: number;
  intervals: Intervals;
  num_prob: number;
  announced?: boolean;
  value: number | null;
  pit?: number;
  crps?: number;
  curve?: Curve;
}

/** Whom a request means: a name that the server knows, or how they come about, by one of seed, observations and mix. */
export type Who = string | Described;

export interface Described {
  seed?: number | null;
  observations?: Heard[] | null;
  likelihood?: "softmax" | "ovr" | "values";
  mix?: [Who, Who] | null;
  share?: number;
  name?: string;
}

/** What somebody said, behind something or not, or which option they took. */
export type Heard = string | { text: string; prompt?: string } | { prompt: string; options: string[]; chosen: string };

export interface About {
  name: string;
  about: string;
  inferred: boolean;
  knows_values: boolean;
}

/** A word of a text, and what it told: nats by which this individual explains it better than nobody in particular. */
export interface Word {
  text: string;
  gain: number | null;
  value?: number;
  median?: number;
  interval?: [number, number];
  nobodys_median?: number;
}

export interface Favoured {
  text: string;
  nobodys: number;
  own: number;
}

export interface Portrait extends About {
  index: number;
  words?: Word[][];
  favoured?: Favoured[];
  avoided?: Favoured[];
}

/** Where individuals lie: points, and covariances of what each may be. */
export interface Plane {
  points: [number, number][];
  covariances: [[number, number], [number, number]][];
  share: number;
  known: boolean;
}

export interface Edit {
  prompt?: string;
  tokens?: Record<string, string>;
  values?: Record<string, number>;
}

export interface WorldsAsked {
  prompt: string;
  text?: string;
  interventions?: Edit[];
  individual?: Who;
  noise?: "abduct" | "redraw";
  max_tokens?: number;
  seed: number;
  temperature?: number;
}

export type Changes = ["same" | "gone" | "new", string][];

export interface World {
  intervention: number;
  prompt: string;
  text: string;
  tokens: string[];
  forced: number[];
  numbers: (Pick<WrittenNumber, "value" | "span"> & Partial<WrittenNumber>)[];
  changes: Changes;
  prompt_changes: Changes;
}

export interface Message {
  role: "user" | "assistant";
  content: string;
}

export interface Piece {
  text: string;
  finish: string | null;
  numbers: WrittenNumber[];
  tokens: Token[];
}

export interface CausalOptions {
  preset?: string;
  individual_mode?: string;
  noise_mode?: string;
  own_mode?: string;
  individual?: string;
  temperature?: number;
  alternatives?: number;
  points?: number;
}

/** How a text is asked for, whatever it stands behind. */
export interface TextOptions {
  max_tokens: number;
  seed: number;
  causal: CausalOptions;
}

/** An error that the server told, or that it could not be reached (status 0). */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function send(path: string, body: object | null, signal?: AbortSignal): Promise<Response> {
  let answer: Response;
  const posted = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  try {
    answer = await fetch(path, { signal, ...(body === null ? {} : posted) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, String(error));
  }
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw new ApiError(answer.status, told?.error?.message ?? answer.statusText);
}

export async function model(): Promise<Card> {
  const { data } = await (await send("v1/models", null)).json();
  return data[0];
}

export async function numbers(
  asked: {
    model: string;
    prompts: (string | Message[])[];
    values?: (number | null)[];
    levels?: number[];
    points?: number;
    individual?: string;
  },
  signal?: AbortSignal,
): Promise<Prediction[]> {
  return (await (await send("v1/numbers", asked, signal)).json()).data;
}

/** A text piece by piece, behind a prompt or in a chat; a chat whose last message is an assistant's goes on with it. */
export async function* write(
  model: string,
  behind: string | Message[],
  options: TextOptions,
  signal?: AbortSignal,
): AsyncGenerator<Piece> {
  const isChat = typeof behind !== "string";
  const where = isChat
    ? { messages: behind, continue_final_message: behind.at(-1)?.role === "assistant" }
    : { prompt: behind };
  const path = isChat ? "v1/chat/completions" : "v1/completions";
  const answer = await send(path, { model, ...where, ...options, stream: true }, signal);
  const starts = [0]; // the server counts characters; of a string here, one beyond U+FFFF takes two places
  const place = (at: number) => starts[Math.min(at, starts.length - 1)]!;
  const placed = <T extends { span: [number, number] }>(one: T): T => ({ ...one, span: [place(one.span[0]), place(one.span[1])] });
  for await (const event of events(answer)) {
    if (event.error) throw new ApiError(503, event.error.message);
    for (const choice of event.choices ?? []) {
      if (!choice.causal) continue; // who speaks, at the beginning of a chat
      const text: string = choice.text ?? choice.delta?.content ?? "";
      for (const one of text) starts.push(starts.at(-1)! + one.length);
      yield {
        text,
        finish: choice.finish_reason,
        numbers: choice.causal.numbers.map(placed),
        tokens: (choice.causal.tokens ?? []).map(placed),
      };
    }
  }
}

/** Work of some seconds, part by part. */
async function* parts<Part>(path: string, asked: object, signal?: AbortSignal): AsyncGenerator<Part> {
  for await (const event of events(await send(path, { ...asked, stream: true }, signal))) {
    if (event.error) throw new ApiError(503, event.error.message);
    yield event;
  }
}

/** Individuals, and where they lie among each other; `words` tells what each word of theirs told. */
export async function individuals(
  asked: { model: string; individuals: Who[]; words?: boolean; save?: string },
  signal?: AbortSignal,
): Promise<{ people: Portrait[]; plane: Plane | null }> {
  const people: Portrait[] = [];
  let plane: Plane | null = null;
  for await (const part of parts<{ data?: Portrait[]; plane?: Plane }>("v1/individuals", asked, signal)) {
    people.push(...(part.data ?? []));
    plane = part.plane ?? plane;
  }
  return { people, plane };
}

/** Worlds, in the order of what was changed; `progress` hears how far they are. */
export async function worlds(
  model: string,
  asked: WorldsAsked & { points?: number },
  progress: (share: number) => void,
  signal?: AbortSignal,
): Promise<{ who: About | null; worlds: World[] }> {
  const made: World[] = [];
  let who: About | null = null;
  for await (const part of parts<{ individual?: About; progress?: number; data?: World[] }>("v1/worlds", { model, ...asked }, signal)) {
    if (part.individual) who = part.individual;
    if (part.progress !== undefined) progress(part.progress);
    made.push(...(part.data ?? []));
  }
  return { who, worlds: made };
}

/** Who is asked: people drawn by seeds, or those who are told, by their names. */
export type Population = { drawn: { count: number; seed: number } } | { individuals: Record<string, Who> };

export interface Answer {
  person: string;
  answer: string | number;
}

/** One question to a population: a row for each answer; `progress` hears how far they are. */
export async function survey(
  model: string,
  population: Population,
  question: { prompt: string; options: (string | number)[] | null },
  draws: number,
  seed: number,
  progress: (share: number) => void,
  signal?: AbortSignal,
): Promise<Answer[]> {
  const asked = { model, ...population, questions: [{ ...question, name: "answer" }], draws, seed };
  const made: Answer[] = [];
  for await (const part of parts<{ data: Answer[]; progress: number }>("v1/population", asked, signal)) {
    made.push(...part.data);
    progress(part.progress);
  }
  return made;
}

/** The data of server-sent events. */
async function* events(answer: Response): AsyncGenerator<any> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw new ApiError(0, String(error));
      });
      if (done) throw new ApiError(0, "it broke off");
      held += value;
      const whole = held.split("\n\n");
      held = whole.pop()!;
      for (const one of whole) {
        const data = one.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
