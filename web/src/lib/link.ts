/** States of a view in the page's own address: behind `#view?`, as base64url of JSON, so that nothing is sent anywhere. */
export function viewOf(hash: string): string {
  return hash.slice(1).split("?", 1)[0]!;
}

export function linkTo(view: string, state: object): string {
  const bytes = new TextEncoder().encode(JSON.stringify(state));
  const text = btoa(Array.from(bytes, (one) => String.fromCharCode(one)).join(""));
  return `${location.origin}${location.pathname}#${view}?${text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

/** The state in an address; null where there is none, or none that can be read. */
export function stateOf<State>(hash: string): State | null {
  const told = hash.split("?")[1];
  if (!told) return null;
  try {
    const bytes = Uint8Array.from(atob(told.replaceAll("-", "+").replaceAll("_", "/")), (one) => one.charCodeAt(0));
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch {
    return null;
  }
}
