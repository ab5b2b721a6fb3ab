/** What a view asked for, as code that does the same. */
import type { Edit, Heard, Who, WorldsAsked } from "./api";

/** A text as a Python literal; JSON's are. */
const quoted = (text: string) => JSON.stringify(text);

const heard = (one: Heard) =>
  typeof one === "string" ? quoted(one)
  : "text" in one ? `Observation(${quoted(one.text)}, prompt=${quoted(one.prompt ?? "")})`
  : `Choice(${quoted(one.prompt)}, [${one.options.map(quoted).join(", ")}], ${quoted(one.chosen)})`;

/** An individual in Python. */
function individual(who: Who): string {
  if (typeof who === "string") return `Individual.load(${quoted(`${who}.safetensors`)})`;
  const name = who.name ? `, name=${quoted(who.name)}` : "";
  if (who.seed != null) return `Individual.from_seed(${who.seed}, model.config.causal_size${name})`;
  if (who.mix) return `mix(${individual(who.mix[0])}, ${individual(who.mix[1])}, ${who.share ?? 0.5})`;
  const likelihood = who.likelihood ? `, likelihood=${quoted(who.likelihood)}` : "";
  return `model.abduct([${who.observations!.map(heard).join(", ")}]${likelihood}${name})`;
}

function intervention(edit: Edit): string {
  const places = <T>(given: Record<string, T> | undefined, tell: (one: T) => string) =>
    Object.entries(given ?? {}).map(([place, one]) => `${place}: ${tell(one)}`).join(", ");
  const [tokens, values] = [places(edit.tokens, quoted), places(edit.values, String)];
  const set = [
    ...(edit.prompt === undefined ? [] : [`prompt=${quoted(edit.prompt)}`]),
    ...(tokens ? [`tokens={${tokens}}`] : []),
    ...(values ? [`values={${values}}`] : []),
  ];
  return `Intervention(${set.join(", ")})`;
}

/** With the library, on the folder of the model. */
export function python(model: string, asked: WorldsAsked): string {
  const known = asked.individual === undefined ? "" : individual(asked.individual);
  const names = ["Choice", "Individual"].filter((name) => known.includes(`${name}(`) || known.includes(`${name}.`));
  const further = [
    ...(known ? ["individual=who"] : []),
    `noise=${quoted(asked.noise ?? "abduct")}`,
    `seed=${asked.seed}`,
    ...(asked.max_tokens === undefined ? [] : [`max_new_tokens=${asked.max_tokens}`]),
    ...(asked.temperature === undefined ? [] : [`temperature=${asked.temperature}`]),
  ];
  return `from causalqwen import ${["CausalQwenForCausalLM", ...names, "Intervention", "Observation"].join(", ")}
${known.includes("mix(") ? "from causalqwen.decoding import mix\n" : ""}
model = CausalQwenForCausalLM.from_pretrained(${quoted(model)})  # its folder
observed = Observation(${quoted(asked.text ?? "")}, prompt=${quoted(asked.prompt)})
edits = [
${(asked.interventions ?? [{}]).map((edit) => `    ${intervention(edit)},\n`).join("")}]
${known ? `who = ${known}\n` : ""}worlds = model.counterfactual_samples(observed, edits, ${further.join(", ")})
for (world,) in worlds:
    print(repr(world.text))
`;
}

/** Over HTTP, for a POSIX shell. */
export function curl(url: string, body: object): string {
  const told = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${url} -H 'Content-Type: application/json' -d '${told}'\n`;
}
