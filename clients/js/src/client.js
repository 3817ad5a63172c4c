// What subscriber and worker share: the control socket, HELLO until there is a WELCOME, and answers to PING.
import { randomBytes } from "node:crypto";
import * as zmq from "zeromq";
import { PeerError, VERSION, decode, hello, isSuperseded, pong, superseded } from "./messages.js";

const FIRST_HELLO_S = 0.05;
const LAST_HELLO_S = 1;
// How often deadlines are looked at. None of the protocol's is shorter than half a second.
const TICK_MS = 50;
// Messages kept for a publisher that is away; after WELCOME everything that matters is sent again.
const MAX_OUTBOX = 256;
const MAX_REPLY_BYTES = 40 * 1024 * 1024;

/** Seconds on a clock that is never set. */
export const clock = () => Number(process.hrtime.bigint()) / 1e9;

export class Client {
  counters = { joins: 0, badMessages: 0, lost: 0 };
  /** Why the publisher was given up; receiving throws it. */
  error = null;
  source = "";
  instance = -1;
  epoch = -1;
  #control;
  #options;
  #hello;
  #helloAt = 0;
  #attempts = 0;
  #outbox = [];
  #sending = null;
  #timer;
  #waiting = [];
  #reading;
  #newest = new Map(); // the newest epoch of each source that was here

  constructor(address, options) {
    if (!/^(tcp|ipc):\/\//.test(address)) throw new TypeError(`${address} is not tcp://host:port or ipc://path`);
    this.address = address;
    this.joined = false;
    this.closed = false;
    this.onLoss = options.onLoss ?? (() => {});
    this.#options = options.curve ?? {};
    this.#hello = hello(randomBytes(16).toString("hex"), options);
    this.#control = this.socket(zmq.Dealer, address, {
      immediate: true,
      sendTimeout: 0,
      receiveHighWaterMark: 8,
      maxMessageSize: MAX_REPLY_BYTES,
    });
    this.#reading = this.#readControl();
    this.#timer = setInterval(() => this.#tick(), TICK_MS);
    setImmediate(() => this.#tick()); // not yet: a subclass is not complete
  }

  /** A connected socket. CURVE: `{curveServerKey, curvePublicKey, curveSecretKey}` in Z85. */
  socket(kind, address, options) {
    const socket = new kind({
      linger: 200,
      reconnectInterval: 50,
      reconnectMaxInterval: 1000,
      tcpKeepalive: 1,
      tcpKeepaliveIdle: 5,
      tcpKeepaliveInterval: 5,
      tcpKeepaliveCount: 3,
      ...this.#options,
      ...options,
    });
    socket.connect(address);
    return socket;
  }

  /** Put a message into the queue of the control socket. */
  send(message) {
    this.#outbox.push(message);
    if (this.#outbox.length > MAX_OUTBOX) this.#outbox.shift();
    this.#sending ??= this.#flush();
  }

  async #flush() {
    try {
      while (this.#outbox.length) {
        await this.#control.send(this.#outbox[0]);
        this.#outbox.shift();
      }
    } catch {
      // Nobody there, or no room: the next tick tries again.
    } finally {
      this.#sending = null;
    }
  }

  #tick() {
    const now = clock();
    if (this.closed || this.error) return;
    this.tick(now);
    if (!this.joined && now >= this.#helloAt) {
      this.#outbox = [this.#hello]; // what is older was for another session
      this.#helloAt = now + Math.min(LAST_HELLO_S, FIRST_HELLO_S * 2 ** this.#attempts++) * (0.5 + Math.random() / 2);
    }
    if (this.joined) this.handleDeadline(now);
    if (this.#outbox.length) this.#sending ??= this.#flush();
  }

  async #readControl() {
    try {
      for await (const [data] of this.#control) this.#receive(data);
    } catch (error) {
      if (!this.closed) this.fail(error);
    }
  }

  #receive(data) {
    const message = decode(data);
    if (message === null || this.error) {
      this.counters.badMessages++;
      return;
    }
    const now = clock();
    this.heardControl(now);
    if (message.kind === "ping") {
      this.send(pong(message.number));
    } else if (message.kind === "refused") {
      if (message.again) this.rejoin();
      else this.fail(new PeerError(`the publisher refused: ${message.text}`));
    } else if (message.kind === "welcome" && message.version !== VERSION) {
      this.fail(new PeerError(`the publisher speaks version ${message.version}, we speak ${VERSION}`));
    } else if (message.kind === "welcome" && isSuperseded(message.epoch, this.newestOf(message.source))) {
      this.send(superseded(this.newestOf(message.source))); // a mirror took its place
      this.rejoin();
    } else {
      if (message.kind === "welcome") this.#newest.set(message.source, message.epoch);
      try {
        this.receiveReply(message, now);
      } catch (error) {
        if (!(error instanceof PeerError)) return this.fail(error);
        this.counters.badMessages++;
      }
    }
  }

  /** The newest epoch of a source that we know of. */
  newestOf(source) {
    return this.#newest.get(source) ?? -1;
  }

  /** A WELCOME was taken. */
  becomeJoined() {
    this.joined = true;
    this.#attempts = 0;
    this.counters.joins++;
  }

  /** Say HELLO again, with what is known. */
  rejoin() {
    if (this.joined) {
      this.joined = false;
      this.#helloAt = clock() + FIRST_HELLO_S;
    }
  }

  lose(first, last, reason) {
    if (last < first) return;
    this.counters.lost += last - first + 1;
    this.onLoss({ source: this.source, epoch: this.epoch, first, last, reason });
  }

  fail(error) {
    this.error ??= error;
    this.wake();
  }

  heardControl() {}
  tick() {}

  // ---- waiting, by whoever iterates -----------------------------------------------------------------

  wake() {
    for (const resolve of this.#waiting.splice(0)) resolve();
  }

  /** Wait until `wake` is called; false if `timeoutMs` is over first. */
  sleep(timeoutMs) {
    return new Promise((resolve) => {
      const timer = timeoutMs === undefined ? null : setTimeout(() => resolve(false), timeoutMs);
      this.#waiting.push(() => {
        clearTimeout(timer);
        resolve(true);
      });
    });
  }

  /** Send what is queued, with the last messages, and close the socket. */
  async closeControl(...words) {
    this.closed = true;
    clearInterval(this.#timer);
    for (const word of words) this.send(word);
    await this.#sending;
    this.#control.close();
    this.wake();
    await this.#reading;
  }
}
