// Static files into the package, under names that stay: a build that changes nothing gives the files that are committed.
import { readFileSync } from "node:fs";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig, type Plugin } from "vite";

/** The licences of what is built in. */
function licences(...packages: string[]): Plugin {
  return {
    name: "licences",
    generateBundle() {
      const told = packages.map((name) => {
        const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf-8"));
        const file = ["LICENSE.md", "LICENSE", "license"].find((one) => exists(`node_modules/${name}/${one}`));
        return `${name} ${version} (${license})\n\n${file ? readFileSync(`node_modules/${name}/${file}`, "utf-8").trim() : ""}\n`;
      });
      this.emitFile({ type: "asset", fileName: "licences.txt", source: told.join("\n") });
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

export default defineConfig({
  base: "./",
  plugins: [svelte(), licences("svelte", "clsx", "esm-env")],
  build: {
    outDir: "../src/causalqwen/serving/explorer",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: false,
    target: "es2022",
    rolldownOptions: {
      output: { entryFileNames: "explorer.js", assetFileNames: "explorer[extname]", codeSplitting: false },
    },
  },
});
