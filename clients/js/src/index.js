export { Subscriber } from "./subscriber.js";
export { Worker, Delivery } from "./worker.js";
export { PeerError } from "./messages.js";
export { decodeFrame } from "./frame.js";
