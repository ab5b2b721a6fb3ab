// Static files into the package, under names that stay: a build that changes nothing gives the files that are committed.
// `vite build` makes the explorer's page, `vite build --mode still` what static pages draw with, which is written into each.
import { readFileSync } from "node:fs";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig, type Plugin } from "vite";

/** The licences of what is built in: a file of their own, or a comment before the code. */
function licences(isComment: boolean, ...packages: string[]): Plugin {
  return {
    name: "licences",
    generateBundle(_, bundle) {
      const told = packages.map((name) => {
        const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf-8"));
        const file = ["LICENSE.md", "LICENSE", "license"].find((one) => exists(`node_modules/${name}/${one}`));
        return `${name} ${version} (${license})\n\n${file ? readFileSync(`node_modules/${name}/${file}`, "utf-8").trim() : ""}\n`;
      });
      if (!isComment) this.emitFile({ type: "asset", fileName: "licences.txt", source: told.join("\n") });
      else for (const one of Object.values(bundle)) if (one.type === "chunk") one.code = `/*!\n${told.join("\n")}*/\n${one.code}`;
    },
  };
}

function exists(path: string): boolean {
  try {
    readFileSync(path);
    return true;
  } catch {
    return false;
  }
}

export default defineConfig(({ mode }) => {
  const isStill = mode === "still";
  return {
    base: "./",
    plugins: [svelte(), licences(isStill, "svelte", "clsx", "esm-env")],
    publicDir: isStill ? false : "public",
    build: {
      outDir: isStill ? "../src/causalqwen/evaluation/drawing" : "../src/causalqwen/serving/explorer",
      emptyOutDir: true,
      assetsInlineLimit: 0,
      modulePreload: false,
      target: "es2022",
      ...(isStill && { lib: { entry: "src/still.ts", formats: ["iife"], name: "drawing", fileName: () => "drawing.js", cssFileName: "drawing" } }),
      rolldownOptions: isStill ? {} : {
        output: { entryFileNames: "explorer.js", assetFileNames: "explorer[extname]", codeSplitting: false },
      },
    },
  };
});
