/** What the server answers, as docs/serving.md has it. */
export interface Limits {
  max_rows: number;
  max_waiting: number;
  max_tokens: number;
  max_body: number;
  max_prompts: number;
  timeout: number;
}

export interface Card {
  id: string;
  causal: {
    presets: string[];
    individuals: string[];
    temperature: number;
    chat: boolean;
    numbers: boolean;
    context: number | null;
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
  value: number | null;
  pit?: number;
  crps?: number;
  curve?: Curve;
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
  individual?: string;
  temperature?: number;
  noise_temperature?: number;
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
  for await (const event of events(answer)) {
    if (event.error) throw new ApiError(503, event.error.message);
    for (const choice of event.choices ?? []) {
      if (!choice.causal) continue; // who speaks, at the beginning of a chat
      yield {
        text: choice.text ?? choice.delta?.content ?? "",
        finish: choice.finish_reason,
        numbers: choice.causal.numbers,
        tokens: choice.causal.tokens ?? [],
      };
    }
  }
}

/** The data of server-sent events. */
async function* events(answer: Response): AsyncGenerator<any> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
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
