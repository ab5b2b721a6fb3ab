import { ApiError, type Card, model, type Portrait, type Who } from "./api";
import { type Language, type Texts, texts } from "./texts";

/** A choice that this browser remembers, where it may. */
function remembered(key: string): string | null {
  try {
    return localStorage.getItem(key);
  } catch {
    return null;
  }
}

function remember(key: string, value: string): void {
  try {
    localStorage.setItem(key, value);
  } catch {
    // a browser that keeps nothing forgets it with the page
  }
}

/** Somebody on the page: how they come about, and what the server tells of them. */
export interface Person {
  who: Who;
  told: Portrait;
}

/** What all views share: the language, the look, and the model. Nothing of a text is kept outside of its tab. */
class Session {
  language = $state<Language>("en");
  theme = $state<"light" | "dark">("light");
  card = $state<Card>()!;
  people = $state.raw<Person[]>([]);
  /** A text that was written, on its way to be asked about. */
  observed = $state.raw<{ prompt: string; text: string } | null>(null);

  constructor() {
    const known = remembered("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");
    this.language = known === "zh" ? "zh" : "en";
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.theme = (remembered("theme") ?? (dark ? "dark" : "light")) === "dark" ? "dark" : "light";
  }

  get texts(): Texts {
    return texts[this.language];
  }

  /** Ask the server what it is; after somebody was saved, too. */
  async ask(): Promise<void> {
    this.card = await model();
  }

  turnLanguage(): void {
    this.language = this.language === "en" ? "zh" : "en";
    remember("language", this.language);
  }

  turnTheme(): void {
    this.theme = this.theme === "dark" ? "light" : "dark";
    remember("theme", this.theme);
  }

  /** An error as people read it. */
  tell(error: unknown): string {
    if (error instanceof ApiError && error.status === 0) return this.texts.unreachable;
    return `${this.texts.wrong} ${error instanceof Error ? error.message : String(error)}`;
  }
}

export const session = new Session();
