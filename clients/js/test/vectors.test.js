// The vectors of docs/reference: what a second implementation must read and write.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { decodeBlock, decodeFrame } from "../src/frame.js";
import * as messages from "../src/messages.js";
import { topicFilter } from "../src/topics.js";

const reference = new URL("../../../docs/reference/", import.meta.url);

function vectors(page) {
  const text = readFileSync(new URL(page, reference), "utf8");
  const found = {};
  for (const [, name, hex] of text.matchAll(/```hex (\S+)\n([^`]*)```/g)) {
    found[name] = Buffer.from(hex.replace(/\s/g, ""), "hex");
  }
  return found;
}

const wire = vectors("wire-protocol.md");
const journal = vectors("journal-format.md");
const T = 1700000000000000n;

test("frames", () => {
  const [one] = decodeFrame(journal["frame-one"]).events;
  assert.deepEqual(one, {
    id: "src:7:100", source: "src", epoch: 7, offset: 100, topic: "a", seq: 5, time: T, data: Buffer.from("hello"),
    contentType: "", key: "", headers: {},
  });
  const three = decodeFrame(journal["frame-three"]);
  assert.deepEqual([three.first, three.next], [101, 104]);
  assert.deepEqual(three.events.map((e) => [e.topic, e.seq, e.time, e.data.toString("hex"), e.contentType, e.key]), [
    ["a", 6, T + 1n, "31", "", ""],
    ["b", 0, T + 2n, "", "text/plain", "k"],
    ["a", 7, T + 3n, "00ff", "", ""],
  ]);
  assert.deepEqual(decodeFrame(journal["frame-headers"]).events.map((e) => e.headers), [
    { traceparent: "00-ab-cd-01" },
    {},
  ]);
});

test("blocks of a state", () => {
  const { kind, blocks, state, next, gone } = messages.decode(wire["key-state"]);
  assert.deepEqual([kind, state, next, gone, blocks.length], ["keyState", 100, 100, [], 1]);
  assert.deepEqual(Buffer.from(blocks[0]), journal["state-block"]);
  const { events } = decodeBlock(blocks[0]);
  assert.deepEqual(events.map((e) => [e.id, e.topic, e.seq, e.key, e.data.toString()]), [
    ["src:7:40", "a", 3, "k", "x"],
    ["src:7:95", "b", 9, "k", "y"],
  ]);
  assert.throws(() => decodeBlock(Buffer.from("93c400c400c400", "hex")), messages.PeerError);
  assert.throws(() => decodeBlock(Buffer.from("c0", "hex")), messages.PeerError);
});

test("a changed byte of a frame is noticed", () => {
  for (let at = 0; at < journal["frame-one"].length; at++) {
    const raw = Buffer.from(journal["frame-one"]);
    raw[at] ^= 1;
    if (at !== 3) assert.throws(() => decodeFrame(raw), messages.PeerError, `byte ${at}`);
  }
});

test("requests are written as the page has them", () => {
  const written = {
    hello: messages.hello("c1", { policy: [30.5, 5, false, ["orders."]] }),
    "hello-worker": messages.hello("c2", { group: "g", policy: [5, 3, true, []] }),
    ready: messages.ready(7, 100),
    replay: messages.replay(1, 7, 100, 1 << 20),
    "replay-state": messages.replay(2, 7, 0, 1 << 20, 100),
    advance: messages.advance(7, 101),
    credit: messages.credit(512),
    settle: messages.settle(
      7, { acks: [[100, 102]], nacks: [[103, 103, 1.5]], extend: [[104, 104]], unbegun: [[105, 105]] }, 3,
    ),
    bye: messages.bye(3),
    pong: messages.pong(2n ** 61n + 1n),
  };
  for (const name of ["ready", "replay", "replay-state", "advance", "credit", "settle", "bye", "pong"]) {
    assert.equal(written[name].toString("hex"), wire[name].toString("hex"), name);
  }
  // A whole number of seconds may be an integer: only the encoding of the lease differs.
  const lease = /cb[0-9a-f]{16}|05(?=03c3)/;
  for (const name of ["hello", "hello-worker"]) {
    assert.equal(written[name].toString("hex").replace(lease, "S"), wire[name].toString("hex").replace(lease, "S"), name);
  }
});

test("answers are read as the page describes them", () => {
  const frame = new Uint8Array(journal["frame-one"]);
  const number = 2n ** 61n + 1n;
  const expected = {
    welcome: {
      kind: "welcome", version: 2, source: "src", instance: 2 ** 47, epoch: 7, begin: 0, oldest: 100, next: 104,
      live: "5557", beatS: 0.5, replay: true, at: -1, epochs: [], mirrors: [], mirrored: 0, copy: false, leaseS: 0,
      state: -1,
    },
    refused: { kind: "refused", text: "say hello first", again: true },
    chunk: { kind: "chunk", request: 1, epoch: 7, next: 101, tail: 104, gone: [[90, 100, "evicted"]], frames: [frame] },
    sent: { kind: "sent", epoch: 7, at: 104, seqs: { a: 8, b: 1 }, more: false },
    deliver: { kind: "deliver", epoch: 7, frames: [frame], ranges: [[100, 100, 2]], after: 3 },
    gone: { kind: "gone", epoch: 7, ranges: [[90, 99]], reason: "evicted" },
    ping: { kind: "ping", number },
    beat: { kind: "beat", instance: 2 ** 47, epoch: 7, next: 104 },
  };
  for (const [name, message] of Object.entries(expected)) {
    const read = messages.decode(wire[name]);
    if (read.frames) read.frames = read.frames.map((bytes) => new Uint8Array(bytes));
    assert.deepEqual(read, message, name);
  }
  assert.ok(messages.isBeat(wire.beat));
  assert.ok(!messages.isBeat(journal["frame-one"]));
});

test("what is not known is ignored, and newer fields too", () => {
  assert.equal(messages.decode(messages.encode([200, 1])), null);
  assert.equal(messages.decode(Buffer.from("garbage")), null);
  assert.equal(messages.decode(messages.encode([65, 2])), null);
  assert.deepEqual(messages.decode(messages.encode([71, 5, "newer"])), { kind: "ping", number: 5 });
});

test("topics", () => {
  const page = readFileSync(new URL("wire-protocol.md", reference), "utf8");
  const chapter = page.split("## Topics\n")[1].split("\n## ")[0];
  const rows = chapter.split("\n").filter((line) => line.startsWith("| `"));
  assert.equal(rows.length, 8);
  for (const row of rows) {
    const [, entry, , yes, no] = row.split("|").map((cell) => [...cell.matchAll(/`([^`]+)`/g)].map((found) => found[1]));
    for (const topic of yes) assert.ok(topicFilter(entry)(topic), `${entry} ${topic}`);
    for (const topic of no) assert.ok(!topicFilter(entry)(topic), `${entry} ${topic}`);
  }
});
