// The messages of the control and live sockets: docs/reference/wire-protocol.md.
import { decode as unpack, encode as pack } from "@msgpack/msgpack";

export const VERSION = 2;
export const MAX_RANGES = 1000;
/** Epochs from here on were begun by a promotion. */
const TERM = 2 ** 42;

/** Whether the writer of `epoch` was replaced by a promotion, of which `by` tells. */
export const isSuperseded = (epoch, by) => by >= TERM && epoch < by;

/** Where the epoch after `epoch` began: from there on a client of `epoch` has had nothing of this journal. */
export function firstAfter(epochs, epoch, otherwise) {
  const at = epochs.findIndex(([number]) => number === epoch);
  const later = at >= 0 ? epochs.slice(at + 1) : epochs.filter(([number]) => number > epoch);
  return Math.min(otherwise, ...later.map(([, first]) => first));
}

/** The publisher refused us, or said something that makes no sense. */
export class PeerError extends Error {
  name = "PeerError";
}

// Fields in their order; what is missing at the end has its default, what is beyond the last one is newer than us.
const FIELDS = {
  welcome: [
    65, "version", "source", "instance", "epoch", "begin", "oldest", "next", "live", "beatS", "replay", "at", "epochs",
    "mirrors", "mirrored", "copy", "leaseS", "state",
  ],
  refused: [66, "text", "again"],
  chunk: [67, "request", "epoch", "next", "tail", "gone", "frames"],
  keyState: [73, "request", "epoch", "state", "next", "blocks", "gone"],
  sent: [68, "epoch", "at", "seqs", "more"],
  deliver: [69, "epoch", "frames", "ranges", "after"],
  gone: [70, "epoch", "ranges", "reason"],
  ping: [71, "number"],
  beat: [96, "instance", "epoch", "next"],
};
const DEFAULTS = {
  replay: true, at: -1, epochs: [], mirrors: [], mirrored: 0, copy: false, leaseS: 0, state: -1, again: false, more: false,
  after: 0, number: 0, gone: [],
};
const BY_TAG = new Map(Object.entries(FIELDS).map(([kind, [tag, ...names]]) => [tag, { kind, names }]));

export const hello = (client, { group = "", durable = "", start = "", policy }) =>
  encode([1, VERSION, client, group, durable, start, policy]);
export const ready = (epoch, position) => encode([2, epoch, position]);
export const replay = (request, epoch, offset, maxBytes, state = -1) =>
  encode([3, request, epoch, offset, maxBytes, ...(state >= 0 ? [-1, state] : [])]);
export const advance = (epoch, offset) => encode([5, epoch, offset]);
export const credit = (window) => encode([6, window]);
export const settle = (epoch, { acks = [], nacks = [], extend = [], unbegun = [] }, number) =>
  encode([7, epoch, acks, nacks, extend, unbegun, number]);
export const bye = (settles = -1) => encode([8, false, settles]);
export const superseded = (epoch) => encode([32, epoch]);
export const pong = (number = 0) => encode([9, number]);

/** A message of the publisher as `{kind, …fields}`, or null if it is none that we know. */
export function decode(data) {
  try {
    const [tag, ...values] = smaller(unpack(data, { useBigInt64: true }));
    const { kind, names } = BY_TAG.get(tag);
    const message = { kind };
    names.forEach((name, i) => {
      const value = i < values.length ? values[i] : DEFAULTS[name];
      if (value === undefined) throw new PeerError(`${kind} without ${name}`);
      message[name] = value;
    });
    return message;
  } catch {
    return null;
  }
}

export const isBeat = (data) => data.length > 1 && data[0] === 0x94 && data[1] === 0x60;

/** Encode a message. The library writes integers above 32 bits as floats unless they are BigInt. */
export const encode = (message) => Buffer.from(pack(larger(message), { useBigInt64: true }));

function larger(value) {
  if (Array.isArray(value)) return value.map(larger);
  return Number.isSafeInteger(value) && Math.abs(value) > 0x7fffffff ? BigInt(value) : value;
}

/** 64-bit integers as numbers, wherever that is exact. */
export function smaller(value) {
  if (typeof value === "bigint") {
    const number = Number(value);
    return Number.isSafeInteger(number) ? number : value;
  }
  if (Array.isArray(value)) return value.map(smaller);
  if (value !== null && typeof value === "object" && Object.getPrototypeOf(value) === Object.prototype) {
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, smaller(inner)]));
  }
  return value;
}

/** The reasons of the page; one that is not known here is `unattributed`. */
const REASONS = [
  "offline", "producer_crash", "overflow_sender", "overflow_receiver", "in_flight", "evicted", "gave_up",
];
export const reasonOf = (text) => (REASONS.includes(text) ? text : "unattributed");
