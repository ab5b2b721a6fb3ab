/** Brings what was just opened into view; an attachment. */
export const intoView = (node: Element) => node.scrollIntoView({ block: "nearest" });
