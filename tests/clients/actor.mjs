// Processes of the JavaScript client that the tests start, stop and kill.
//
//   subscriber ADDRESS OPTIONS WITNESS    a line `offset` for each event, before it counts as processed
//   worker ADDRESS OPTIONS WITNESS        a line `offset attempt` for each delivery, before it is acknowledged
//   print ADDRESS OPTIONS COUNT           so many events as lines of JSON
//   table ADDRESS OPTIONS KEY             the last value of every key, as a line of JSON each time that this key comes
//   flaky ADDRESS OPTIONS WITNESS         a worker that gives back every event whose attempt is 1
//
// OPTIONS is JSON. Each prints `ready` when it has joined, and a line of JSON with its counters when it ends.
import { openSync, writeSync } from "node:fs";
import { Subscriber, Worker } from "../../clients/js/src/index.js";

const [role, address, options, argument] = process.argv.slice(2);
const losses = [];
const settings = { ...JSON.parse(options), onLoss: (lost) => losses.push(lost) };
if (settings.start?.time !== undefined) settings.start = new Date(settings.start.time);
const table = new Map();
let begun = 0;
settings.onSnapshot = (snapshot) => {
  if (snapshot.complete) return;
  begun++;
  table.clear();
};
const say = (value) => writeSync(1, `${typeof value === "string" ? value : JSON.stringify(value)}\n`);

const client = ["subscriber", "print", "table"].includes(role) ? new Subscriber(address, settings) : new Worker(address, settings);
process.on("SIGTERM", () => client.close());
const joined = setInterval(() => {
  if (!client.joined || client.attached === false) return;
  clearInterval(joined);
  say("ready");
}, 5);

async function print(count) {
  for (let i = 0; i < count; i++) {
    const event = await client.next(60_000);
    if (event === null) break;
    say({ ...event, time: Number(event.time), data: event.data.toString("hex") });
  }
  await client.next(0); // the last one is processed as well
}

async function keep(last) {
  for await (const event of client) {
    const name = `${event.topic} ${event.key}`;
    if (event.data.length) table.set(name, event.data.toString());
    else table.delete(name);
    if (event.key === last) say({ table: Object.fromEntries(table), begun });
  }
}

async function witness(path) {
  const out = openSync(path, "a");
  for await (const given of client) {
    if (role === "subscriber") {
      writeSync(out, `${given.offset}\n`);
      continue;
    }
    writeSync(out, `${given.event.offset} ${given.attempt} ${given.event.key}\n`);
    if (role === "flaky" && given.attempt === 1) given.nack();
    else given.ack();
  }
}

try {
  if (role === "print") await print(Number(argument));
  else await (role === "table" ? keep(argument) : witness(argument));
} catch (error) {
  say({ error: error.message });
}
clearInterval(joined);
await client.close();
say({ counters: client.counters, losses });
