// One worker of a group. The numbers in brackets are the steps of "A worker" in wire-protocol.md.
import { Client, clock } from "./client.js";
import { decodeFrame } from "./frame.js";
import { MAX_RANGES, PeerError, bye, credit, pong, reasonOf, settle } from "./messages.js";

const SILENCE_S = 3;

/** An event that this worker holds until its lease is over. Call `ack` or `nack` once; `extend` as often as needed. */
export class Delivery {
  #settle;
  constructor(event, attempt, settle) {
    Object.assign(this, { event, attempt, settled: false });
    this.#settle = settle;
  }

  /** Its effect is recorded. */
  ack() {
    this.#once("acks", [this.event.offset]);
  }

  /** Not processed: it comes again, not before `delayS` seconds. */
  nack(delayS = 0) {
    this.#once("nacks", [this.event.offset, delayS]);
  }

  /** The handler needs more time: renew the lease. */
  extend() {
    this.#settle("extend", [this.event.offset], this.event);
  }

  #once(kind, entry) {
    if (this.settled) throw new Error(`${this.event.id} was settled before`);
    this.settled = true;
    this.#settle(kind, entry, this.event);
  }
}

export class Worker extends Client {
  #prefetch;
  #leaseS;
  #affinity;
  #leases = true;
  #batches = []; // {until, epoch, entries: [{event, attempt}]}
  #pending = { acks: [], nacks: [], extend: [], unbegun: [] };
  #begun = new Set();
  #said = []; // the last acknowledged ranges
  #settles = 0;
  #settlesBefore = 0;
  #withheld = new Map(); // key → number of the Settle with its nack; Infinity until it is sent
  #silentAt = Infinity;
  #flushing = false;

  /**
   * @param {string} address tcp://host:port or ipc://path
   * @param {object} options `group`; `topics`, `start`: "oldest" or "live" for a new group; `prefetch`, `leaseS`,
   *   `maxDeliver`, `keyAffinity`; `onLoss`; `curve` as in Subscriber
   */
  constructor(
    address,
    { group, topics = [], start = "oldest", prefetch = 512, leaseS = 30, maxDeliver = 5, keyAffinity = false, ...options },
  ) {
    if (!group) throw new TypeError("a worker needs a group");
    super(address, { ...options, group, start, policy: [leaseS, maxDeliver, keyAffinity, topics] });
    this.#prefetch = prefetch;
    this.#leaseS = leaseS;
    this.#affinity = keyAffinity;
  }

  /** One delivery, or null after `timeoutMs`, or when closed. */
  async next(timeoutMs) {
    const deadline = timeoutMs === undefined ? undefined : clock() + timeoutMs / 1000;
    for (;;) {
      if (this.closed) return null;
      const delivery = this.#begin();
      if (delivery !== null) return delivery;
      if (this.error) throw this.error;
      const left = deadline === undefined ? undefined : Math.max(0, (deadline - clock()) * 1000);
      if (left === 0 || !(await this.sleep(left))) return null;
    }
  }

  /** `for await (const delivery of worker)`. */
  async *[Symbol.asyncIterator]() {
    for (let delivery = await this.next(); delivery !== null; delivery = await this.next()) yield delivery;
  }

  #begin() {
    while (this.#batches.length) {
      const batch = this.#batches[0];
      if (clock() > batch.until) this.#giveBack(batch.entries.splice(0)); // [2]
      const entry = batch.entries.shift();
      if (!batch.entries.length) this.#batches.shift();
      if (entry === undefined) continue;
      if (this.#withheld.has(entry.event.key)) {
        this.#giveBack([entry]); // [6]
        continue;
      }
      const { epoch } = batch;
      this.#begun.add(entry.event.offset);
      return new Delivery(entry.event, entry.attempt, (kind, what, event) => {
        if (kind !== "extend") this.#begun.delete(event.offset);
        if (epoch !== this.epoch) return; // [5]: void
        if (kind === "nacks" && this.#affinity && event.key) this.#withheld.set(event.key, Infinity);
        this.#pending[kind].push(what);
        this.#flushSoon();
      });
    }
    return null;
  }

  #giveBack(entries) {
    for (const { event } of entries) this.#pending.unbegun.push([event.offset]);
    if (entries.length) this.#flushSoon();
  }

  // ---- settling -------------------------------------------------------------------------------------

  /** [3] At the end of this turn of the loop, together with what else is settled in it. */
  #flushSoon() {
    if (this.#flushing) return;
    this.#flushing = true;
    setImmediate(() => {
      this.#flushing = false;
      if (!this.closed) this.#flush();
    });
  }

  #flush() {
    if (!this.joined) return; // after the next WELCOME
    const { acks, nacks, extend, unbegun } = this.#pending;
    this.#pending = { acks: [], nacks: [], extend: [], unbegun: [] };
    const lists = {
      acks: ranges(acks),
      nacks: nacks.map(([offset, delayS]) => [offset, offset, delayS]),
      extend: ranges(extend),
      unbegun: ranges(unbegun),
    };
    this.#said = [...this.#said, ...lists.acks].slice(-MAX_RANGES);
    const longest = Math.max(...Object.values(lists).map((list) => list.length));
    for (let at = 0; at < longest; at += MAX_RANGES) {
      const part = Object.fromEntries(Object.entries(lists).map(([kind, list]) => [kind, list.slice(at, at + MAX_RANGES)]));
      this.send(settle(this.epoch, part, ++this.#settles));
    }
    for (const [key, number] of this.#withheld) if (number === Infinity) this.#withheld.set(key, this.#settles);
  }

  /** Settle what was decided, give back the rest, send BYE. */
  async close() {
    if (this.closed) return;
    const words = [];
    if (this.joined) {
      this.send(credit(0)); // [8]
      if (this.#leases) this.#pending.nacks.push(...[...this.#begun].map((offset) => [offset, 0]));
      this.#flush();
      words.push(bye(this.#settles - this.#settlesBefore));
    }
    await this.closeControl(...words);
  }

  // ---- the control socket ---------------------------------------------------------------------------

  heardControl(now) {
    this.#silentAt = now + SILENCE_S;
  }

  handleDeadline(now) {
    if (now >= this.#silentAt) this.rejoin(); // [4]
  }

  receiveReply(message, now) {
    if (message.kind === "welcome") this.#welcome(message);
    else if (message.kind === "deliver") this.#deliver(message, now);
    else if (message.kind === "gone" && message.epoch === this.epoch) {
      for (const [first, last] of message.ranges) this.lose(first, last, reasonOf(message.reason));
    }
  }

  #welcome(welcome) {
    if (!this.joined || welcome.instance !== this.instance) {
      this.becomeJoined();
      this.#settlesBefore = this.#settles;
      if (welcome.instance !== this.instance) this.#another(welcome);
      this.source = welcome.source;
      this.#leases = welcome.replay;
      this.#flush();
    }
    this.send(credit(this.#prefetch)); // [1]
  }

  /** [5] */
  #another(welcome) {
    const waiting = this.#batches.splice(0).flatMap((batch) => batch.entries);
    this.#withheld.clear();
    const sameEpoch = welcome.epoch === this.epoch;
    this.instance = welcome.instance;
    this.epoch = welcome.epoch;
    if (sameEpoch) {
      if (this.#said.length) this.send(settle(this.epoch, { acks: this.#said }, ++this.#settles));
      this.#giveBack(waiting);
    } else {
      this.#pending = { acks: [], nacks: [], extend: [], unbegun: [] };
      this.#begun.clear();
      this.#said = [];
    }
  }

  #deliver(deliver, now) {
    if (deliver.epoch !== this.epoch || !this.joined) return;
    const entries = this.#open(deliver);
    for (const [key, number] of this.#withheld) if (number <= deliver.after) this.#letGo(key);
    if (!this.#leases) this.send(pong()); // [7]
    const until = this.#leases ? now + this.#leaseS : Infinity;
    this.#batches.push({ until, epoch: this.epoch, entries });
    this.wake();
  }

  /** [2] The events that are meant. Throws PeerError. */
  #open({ frames, ranges: wanted }) {
    const events = new Map();
    for (const raw of frames) {
      const frame = decodeFrame(raw);
      if (frame.source !== this.source) throw new PeerError(`a frame of ${frame.source}`);
      for (const event of frame.events) events.set(event.offset, event);
    }
    const entries = [];
    let end = -1;
    for (const [first, last, attempt] of wanted) {
      if (first <= end || last < first || entries.length + last - first >= this.#prefetch) {
        throw new PeerError("ranges that overlap, or too many");
      }
      for (let offset = first; offset <= last; offset++) {
        const event = events.get(offset);
        if (event === undefined) throw new PeerError("ranges outside of the frames");
        entries.push({ event, attempt });
      }
      end = last;
    }
    return entries;
  }

  /** [6] The publisher has read the nack: what waited of this key goes back, and what comes is in order. */
  #letGo(key) {
    this.#withheld.delete(key);
    for (const batch of this.#batches) {
      this.#giveBack(batch.entries.filter(({ event }) => event.key === key));
      batch.entries = batch.entries.filter(({ event }) => event.key !== key);
    }
  }
}

/** Offsets as ranges. */
function ranges(entries) {
  const found = [];
  for (const [offset] of entries.sort(([a], [b]) => a - b)) {
    const last = found.at(-1);
    if (last !== undefined && offset <= last[1] + 1) last[1] = offset;
    else found.push([offset, offset]);
  }
  return found;
}
