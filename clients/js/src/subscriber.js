// A subscriber of one publisher. The numbers in brackets are the steps of "A subscriber" in wire-protocol.md.
import * as zmq from "zeromq";
import { Client, clock } from "./client.js";
import { load, save } from "./cursor.js";
import { decodeBlock, decodeFrame } from "./frame.js";
import { topicFilter } from "./topics.js";
import { PeerError, advance, bye, decode, firstAfter, isBeat, ready, reasonOf, replay } from "./messages.js";

const ANSWER_S = 2;
const ALIVE_S = 10;
const CHUNK_BYTES = 1024 * 1024;
const LIVE_QUEUE = 64;
const MAX_LIVE_BYTES = 32 * 1024 * 1024;
// Events that wait for the application. Beyond it nothing more is read or asked for: the journal keeps it.
const MAX_READY = 20_000;

export class Subscriber extends Client {
  #wanted;
  #start;
  #durable;
  #cursor;
  #saved = {};
  #commitEveryS;
  #committedAt = clock();
  #dirty = false;
  #live = null;
  #liveAt = "";
  #ready = [];
  #at = 0; // the first of `ready` that was not handed out
  #processed = null; // position after the last event that the application is done with
  #current = null;
  #position = -1;
  #tail = -1;
  #copy = false; // what we read from is a mirror
  #restart = 0;
  #canReplay = true;
  #wasAway = false;
  #attached = false;
  #reported = -1;
  #aliveAt = 0;
  #silenceS = 1;
  #silentAt = 0;
  #request = 0;
  #asked = null; // {from, until, message} of the open REPLAY
  #onSnapshot;
  #stateEnd = -1; // of the snapshot that is arriving
  #unstarted = false; // nothing of it has come yet
  #void; // what we have had does not count: a snapshot is needed
  #owed = null; // a loss to be told when its place is reached

  /**
   * @param {string} address tcp://host:port or ipc://path
   * @param {object} options `topics`: patterns; `start`: "cursor" (default with one of the next two), "oldest", "live"
   *   (default), "snapshot" (the newest event of every key, then what follows), an offset or a Date; `onSnapshot`: called
   *   between events when a snapshot begins (forget what you hold) and when it is complete; `cursor`: a file; `durable`: a name that the publisher keeps; `commitEveryS`; `onLoss`;
   *   `curve`: {curveServerKey, curvePublicKey, curveSecretKey}
   */
  constructor(
    address,
    { topics = [], start, cursor, durable = "", commitEveryS = 1, onSnapshot = () => {}, ...options } = {},
  ) {
    if (start === "snapshot" && durable) throw new TypeError("a snapshot needs no durable name: use a cursor");
    const saved = cursor === undefined ? {} : load(cursor);
    const begin = start ?? (cursor !== undefined || durable ? "cursor" : "live");
    const wish = begin === "live" ? "live" : begin instanceof Date ? `@${begin.getTime()}000` : "oldest";
    super(address, { ...options, durable, start: wish, policy: [30, 5, false, topics] });
    this.#wanted = topicFilter(topics);
    this.#start = begin;
    this.#onSnapshot = onSnapshot;
    this.#void = begin === "snapshot";
    this.#durable = durable;
    this.#cursor = cursor;
    this.#saved = saved;
    this.#commitEveryS = commitEveryS;
  }

  /** Whether the live stream arrives. */
  get attached() {
    return this.#attached;
  }

  // ---- receiving ------------------------------------------------------------------------------------

  /** One event, or null after `timeoutMs`, or when closed. The one before counts as processed. */
  async next(timeoutMs) {
    this.#finish();
    const deadline = timeoutMs === undefined ? undefined : clock() + timeoutMs / 1000;
    for (;;) {
      while (this.#at >= this.#ready.length) {
        if (this.error) throw this.error;
        if (this.closed) return null;
        const left = deadline === undefined ? undefined : Math.max(0, (deadline - clock()) * 1000);
        if (left === 0 || !(await this.sleep(left))) return null;
      }
      const next = this.#ready[this.#at++];
      if (next.event) {
        this.#current = next;
        return next.event;
      }
      this.#processed = next.after;
      this.#dirty = true;
      this.#onSnapshot(next.snapshot);
    }
  }

  /** `for await (const event of subscriber)`: an event counts as processed when the next one is requested. */
  async *[Symbol.asyncIterator]() {
    for (let event = await this.next(); event !== null; event = await this.next()) yield event;
  }

  #finish() {
    if (this.#current !== null) {
      this.#processed = this.#current.after;
      this.#current = null;
      // All that came is processed, and so is what came of other topics.
      if (this.#at >= this.#ready.length) this.#processed = this.#here(this.#position);
      this.#dirty = true;
      this.tick(clock());
    }
    if (this.#at >= this.#ready.length || this.#at >= 1000) {
      this.#ready.splice(0, this.#at);
      this.#at = 0;
      if (this.#ready.length < MAX_READY / 2) this.#resume();
    }
  }

  newestOf(source) {
    return Math.max(super.newestOf(source), this.#saved[source]?.epoch ?? -1);
  }

  tick(now) {
    if (this.#dirty && now - this.#committedAt >= this.#commitEveryS) this.commit();
  }

  /** Save the position after the last event that was processed. */
  commit() {
    this.#committedAt = clock();
    if (!this.#dirty) return;
    const { source, epoch, offset } = this.#processed;
    if (this.#cursor !== undefined) {
      this.#saved = { ...this.#saved, [source]: { epoch, offset } };
      save(this.#cursor, this.#saved);
    }
    if (this.#durable && this.joined && epoch === this.epoch) this.send(advance(epoch, offset));
    this.#dirty = false;
  }

  /** Commit, send BYE. The event that was handed out last is not processed: it comes again. */
  async close() {
    if (this.closed) return;
    this.commit();
    const closing = this.closeControl(...(this.joined ? [bye()] : [])); // [11]
    this.#live?.close();
    this.#resume();
    await closing;
  }

  // ---- the control socket ---------------------------------------------------------------------------

  receiveReply(message, now) {
    if (message.kind === "welcome") this.#welcome(message, now);
    else if (message.kind === "chunk") this.#chunk(message, now);
    else if (message.kind === "keyState") this.#keyState(message, now);
  }

  handleDeadline(now) {
    if (now >= this.#silentAt && !this.#full) {
      this.#wasAway = true;
      this.rejoin(); // [7]
      return;
    }
    if (this.#asked !== null && now >= this.#asked.until) {
      this.#asked.until = now + ANSWER_S;
      this.send(this.#asked.message); // [3]
    }
    if (this.#attached && now >= this.#aliveAt) this.#report(now);
  }

  #welcome(welcome, now) {
    if (this.joined && welcome.instance === this.instance) {
      this.#attached = false; // [7]
      return;
    }
    if (this.#start === "snapshot" && welcome.state < 0) {
      this.fail(new PeerError(`${this.address} keeps no state of its keys: its journal was not made with compact="key"`));
      return;
    }
    const moved = welcome.instance !== this.instance || welcome.live !== this.#liveAt;
    if (moved) this.#connectLive(welcome.live);
    this.becomeJoined();
    this.#attached = false;
    this.#asked = null;
    this.#canReplay = welcome.replay;
    this.#silenceS = 3 * Math.min(3600, Math.max(0.01, welcome.beatS)) + 0.5;
    this.#silentAt = now + this.#silenceS;
    this.#aliveAt = now + ALIVE_S;
    this.instance = welcome.instance;
    const first = this.epoch < 0;
    if (first) this.#choose(welcome); // [2]
    else if (welcome.epoch !== this.epoch || welcome.source !== this.source) this.#newEpoch(welcome);
    if (this.#start === "snapshot" && (this.#void || (this.#stateEnd < 0 && this.#position < welcome.oldest))) {
      this.#beginSnapshot(welcome.state);
    }
    // [10] Without a journal only the live stream tells what is missing: what WELCOME counts may be on its way.
    if (this.#canReplay || this.#wasAway || first) this.#tail = Math.max(this.#tail, welcome.next);
    this.#restart = this.#start === "live" ? welcome.next : welcome.oldest;
    if (this.#wasAway && !this.#canReplay) this.#giveUp(this.#tail, "offline"); // [10]
    this.#wasAway = false;
    this.#copy = welcome.copy; // a mirror, which may well end before what we have had
    // A saved position beyond the end cannot be: the answer tells.
    if (this.#position > welcome.next && this.#canReplay && !this.#copy) this.#sendReplay(now);
    this.#ask(now);
    this.wake();
  }

  #choose(welcome) {
    const saved = this.#saved[welcome.source];
    let position = Math.min(welcome.oldest, welcome.begin);
    let epoch = welcome.epoch;
    if (this.#start === "live" || !welcome.replay) position = welcome.next;
    else if (this.#start === "cursor" && saved) ({ epoch, offset: position } = saved);
    else if (this.#start === "snapshot" && saved) {
      this.#void = saved.epoch !== epoch;
      position = saved.offset;
    }
    else if ((this.#start === "cursor" || this.#start instanceof Date) && welcome.at >= 0) position = welcome.at;
    else if (Number.isInteger(this.#start)) position = Math.min(this.#start, welcome.next);
    this.source = welcome.source;
    this.epoch = epoch;
    this.#position = position;
    this.#tail = position;
    if (epoch !== welcome.epoch) this.#newEpoch(welcome);
  }

  /** [8] */
  #newEpoch(welcome) {
    const { begin, epoch, source, next } = welcome;
    this.#void = this.#start === "snapshot";
    let position = begin;
    if (source === this.source) {
      const at = firstAfter(welcome.epochs, this.epoch, begin); // there may have been others in between
      const lost = { at, first: Math.max(this.#position, at), last: this.#tail - 1, epoch: this.epoch };
      position = Math.min(this.#position, at);
      this.#owed = lost.last >= lost.first ? lost : this.#owed;
    }
    Object.assign(this, { source, epoch });
    this.#position = position;
    this.#tail = next;
    this.#payOwed();
  }

  /** The loss at the end of an old epoch is told after what is left of that epoch. */
  #payOwed() {
    if (this.#owed === null || this.#position < this.#owed.at) return;
    const { first, last, epoch } = this.#owed;
    this.#owed = null;
    this.counters.lost += last - first + 1;
    this.onLoss({ source: this.source, epoch, first, last, reason: "producer_crash" });
  }

  // ---- the live socket ------------------------------------------------------------------------------

  #connectLive(hint) {
    let address;
    if (this.address.startsWith("tcp://")) {
      if (!/^[1-9][0-9]{0,4}$/.test(hint) || Number(hint) > 65535) throw new PeerError(`no live port: ${hint}`);
      address = this.address.replace(/:[0-9]+$/, `:${hint}`);
    } else {
      const path = this.address.slice("ipc://".length);
      const name = path.slice(path.lastIndexOf("/") + 1);
      const hinted = hint.slice(hint.lastIndexOf("/") + 1);
      if (!hinted.startsWith(name) || hinted === name) throw new PeerError(`no live socket beside ours: ${hint}`);
      address = `ipc://${path.slice(0, -name.length)}${hinted}`;
    }
    this.#live?.close();
    this.#live = this.socket(zmq.Subscriber, address, {
      receiveHighWaterMark: LIVE_QUEUE,
      maxMessageSize: MAX_LIVE_BYTES,
    });
    this.#live.subscribe();
    this.#liveAt = hint;
    this.#readLive(this.#live);
  }

  async #readLive(socket) {
    try {
      for await (const [data] of socket) {
        if (socket !== this.#live) return;
        if (this.joined) this.#receiveLive(data, clock());
        else if (this.epoch >= 0 && !this.#canReplay) this.#takeNext(data);
        while (this.#full && !this.closed) await this.#roomMade;
      }
    } catch (error) {
      if (!this.closed && socket === this.#live) this.fail(error);
    }
  }

  #receiveLive(data, now) {
    if (isBeat(data)) return this.#beat(decode(data), now);
    let frame;
    try {
      frame = decodeFrame(data);
    } catch (error) {
      this.counters.badMessages++;
      return;
    }
    if (frame.source !== this.source || frame.epoch !== this.epoch) return this.rejoin(); // [5]
    this.#silentAt = now + this.#silenceS;
    this.#tail = Math.max(this.#tail, frame.next);
    if (frame.first <= this.#position && this.#stateEnd < 0) this.#accept(frame); // a snapshot is completed first
    else this.#ask(now);
  }

  /** [10] While we greet a publisher without a journal again: nobody could send this event once more. */
  #takeNext(data) {
    let frame;
    try {
      frame = decodeFrame(data);
    } catch (error) {
      return; // a heartbeat; or damaged, and the live stream tells what is missing
    }
    if (frame.source === this.source && frame.epoch === this.epoch && frame.first === this.#position) this.#accept(frame);
  }

  /** [6] */
  #beat(beat, now) {
    if (beat === null) {
      this.counters.badMessages++;
      return;
    }
    if (beat.instance !== this.instance || beat.epoch !== this.epoch) return this.rejoin();
    this.#silentAt = now + this.#silenceS;
    if (!this.#attached || this.#position !== this.#reported) {
      this.#attached = true;
      this.#report(now);
      this.wake();
    }
    this.#tail = Math.max(this.#tail, beat.next);
    this.#ask(now);
  }

  #report(now) {
    this.#aliveAt = now + ALIVE_S;
    this.#reported = this.#position;
    this.send(ready(this.epoch, this.#position));
  }

  // ---- frames ---------------------------------------------------------------------------------------

  /** Take the events of a frame from the position on. */
  #accept(frame) {
    if (frame.next <= this.#position) return;
    for (const event of frame.events.slice(Math.max(0, this.#position - frame.first))) {
      if (!this.#wanted(event.topic)) continue;
      this.#ready.push({ event, after: this.#here(event.offset + 1) });
    }
    this.#position = frame.next;
    this.#payOwed();
    this.wake();
  }

  /** A position of the present epoch, whatever epoch the event before it is of. */
  #here(offset) {
    return { source: this.source, epoch: this.epoch, offset };
  }

  get #full() {
    return this.#ready.length - this.#at >= MAX_READY;
  }

  #roomMade = null;
  #makeRoom = () => {};

  /** There is room again: read live messages, and ask for what was missed. */
  #resume() {
    this.#makeRoom();
    this.#roomMade = new Promise((resolve) => (this.#makeRoom = resolve));
    if (this.joined && !this.closed) this.#ask(clock());
  }

  /** [3] */
  #ask(now) {
    if (this.#asked !== null || this.#position >= this.#tail || !this.joined || this.#full) return;
    if (this.#canReplay) this.#sendReplay(now);
    else this.#giveUp(this.#tail, "overflow_sender"); // [10]
  }

  #sendReplay(now) {
    const message = replay(++this.#request, this.epoch, this.#position, CHUNK_BYTES, this.#stateEnd);
    this.#asked = { from: this.#position, until: now + ANSWER_S, message };
    this.send(message);
  }

  /** [4] */
  #chunk(chunk, now) {
    if (this.#asked === null || chunk.request !== this.#request || chunk.epoch !== this.epoch) return;
    const { from } = this.#asked;
    this.#asked = null;
    this.#silentAt = now + this.#silenceS;
    if (chunk.tail < from) {
      if (!this.#copy) return this.#goBack();
      this.#tail = this.#position;
      return;
    }
    this.#tail = Math.max(this.#tail, chunk.tail);
    const before = this.#position;
    const evicted = ([, after, reason]) => reason === "evicted" && after > before;
    if (this.#start === "snapshot" && chunk.gone.some(evicted)) return this.rejoin();
    for (const raw of chunk.frames) {
      const frame = decodeFrame(raw);
      if (frame.source !== this.source) continue;
      this.#lose(frame.first, chunk.gone);
      this.#accept(frame);
    }
    this.#lose(Math.min(chunk.next, chunk.tail), chunk.gone);
    if (this.#position === before) this.#tail = before;
    this.#ask(now);
  }

  // ---- snapshots: the numbers in brackets are the steps of "Snapshots" -----------------------------------

  /** [1] */
  #beginSnapshot(end) {
    this.#stateEnd = end;
    this.#position = 0;
    this.#unstarted = true;
    this.#void = false;
    if (!end) this.#startSnapshot(end);
  }

  #startSnapshot(end) {
    this.#unstarted = false;
    this.#stateEnd = end;
    this.#pushEdge(false, 0);
    if (!end) this.#finishSnapshot();
  }

  /** [4] */
  #finishSnapshot() {
    this.#position = this.#stateEnd;
    this.#tail = Math.max(this.#tail, this.#position);
    this.#pushEdge(true, this.#position);
    this.#stateEnd = -1;
    this.#payOwed();
  }

  #pushEdge(complete, offset) {
    const snapshot = { source: this.source, epoch: this.epoch, at: this.#stateEnd, complete };
    this.#ready.push({ snapshot, after: this.#here(offset) });
    this.wake();
  }

  /** [3] */
  #keyState(reply, now) {
    const asked = this.#asked !== null && reply.request === this.#request && reply.epoch === this.epoch;
    if (!asked || this.#stateEnd < 0) return;
    this.#asked = null;
    this.#silentAt = now + this.#silenceS;
    if (reply.state !== this.#stateEnd && !this.#unstarted) this.#beginSnapshot(reply.state);
    if (this.#unstarted) this.#startSnapshot(reply.state);
    if (this.#stateEnd < 0) return this.#ask(now);
    const before = this.#position;
    for (const raw of reply.blocks) {
      const block = decodeBlock(raw);
      if (block.source !== this.source) continue;
      for (const event of block.events) {
        if (event.offset < this.#position || event.offset >= this.#stateEnd) continue;
        if (this.#wanted(event.topic)) this.#ready.push({ event, after: this.#here(event.offset + 1) });
        this.#position = event.offset + 1;
      }
    }
    for (const [first, after] of reply.gone) {
      this.#position = Math.max(this.#position, Math.min(first, this.#stateEnd));
      this.#giveUp(Math.min(after, this.#stateEnd), "unattributed");
    }
    this.#position = Math.max(this.#position, Math.min(reply.next, this.#stateEnd));
    this.wake();
    if (this.#position >= this.#stateEnd) this.#finishSnapshot();
    else if (this.#position === before) return this.rejoin();
    this.#ask(now);
  }

  /** What lies between the position and `until` is gone. */
  #lose(until, gone) {
    for (const [first, after, reason] of gone) {
      if (after > this.#position && first < until) this.#giveUp(Math.min(after, until), reasonOf(reason));
    }
    this.#giveUp(until, "unattributed");
  }

  #giveUp(until, reason) {
    if (until <= this.#position) return;
    this.lose(this.#position, until - 1, reason);
    this.#position = until;
    this.#payOwed();
  }

  /** [9] */
  #goBack() {
    const text = `${this.address}: we have had ${this.source} up to ${this.#position - 1}, its journal ends before that`;
    process.emitWarning(`${text}: an older copy? Going on at ${this.#restart}`, "RolledBack");
    this.#position = this.#tail = this.#restart;
    this.rejoin();
  }
}
