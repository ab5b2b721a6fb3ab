/** What a static page draws with: the JSON of each `script[data-draw]` becomes the properties of the component that is named. */
import { type Component, mount } from "svelte";
import PeopleMap from "./components/PeopleMap.svelte";
import Told from "./components/Told.svelte";
import Values from "./components/Values.svelte";
import { session } from "./lib/session.svelte";
import "./app.css";

const components: Record<string, Component<any>> = { PeopleMap, Told, Values };

session.language = "en"; // as the pages themselves
for (const told of document.querySelectorAll<HTMLScriptElement>("script[data-draw]"))
  mount(components[told.dataset.draw!]!, { target: told.parentElement!, anchor: told, props: JSON.parse(told.textContent!) });
