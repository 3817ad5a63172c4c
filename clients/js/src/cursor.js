// The positions of a subscriber in a file: valid after a kill at any instant, and after a power cut.
import { closeSync, fsyncSync, openSync, readFileSync, renameSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";

/** `{source: {epoch, offset}}`; empty if there is no file. Throws if it cannot be read: never a silent new start. */
export function load(path) {
  let text;
  try {
    text = readFileSync(path, "utf8");
  } catch (error) {
    if (error.code === "ENOENT") return {};
    throw error;
  }
  try {
    const { format, positions } = JSON.parse(text);
    if (format !== 1 || typeof positions !== "object") throw new Error("another format");
    return positions;
  } catch (error) {
    throw new Error(`${path} is not a cursor, or is damaged (${error.message}); remove it to start over`);
  }
}

/** Replace the file. */
export function save(path, positions) {
  const temporary = `${path}.${process.pid}.tmp`;
  writeFileSync(temporary, JSON.stringify({ format: 1, positions }), { flush: true });
  renameSync(temporary, path);
  const directory = openSync(dirname(path), "r");
  try {
    fsyncSync(directory);
  } finally {
    closeSync(directory);
  }
}
