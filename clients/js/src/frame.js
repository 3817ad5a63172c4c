// Frames: a batch of events with consecutive offsets. docs/reference/journal-format.md, chapter "Frame".
import { crc32 } from "node:zlib";
import { decode as unpack } from "@msgpack/msgpack";
import { PeerError, smaller } from "./messages.js";

const PREFIX = 16;

/** Decode a frame, or throw PeerError: `{source, epoch, first, next, events}`. */
export function decodeFrame(bytes) {
  const raw = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (raw.length < PREFIX || raw.readUInt16BE(0) !== 0xb51e) throw new PeerError("not a frame");
  if (raw[2] !== 1) throw new PeerError(`a frame of version ${raw[2]}, we read version 1`);
  const headerEnd = PREFIX + raw.readUInt32LE(4);
  if (raw.length !== headerEnd + raw.readUInt32LE(8)) throw new PeerError("a frame of another length");
  if (crc32(raw.subarray(PREFIX), crc32(raw.subarray(0, 12))) !== raw.readUInt32LE(12)) {
    throw new PeerError("a damaged frame");
  }
  let header, columns;
  try {
    header = smaller(unpack(raw.subarray(PREFIX, headerEnd), { useBigInt64: true }));
    columns = unpack(raw.subarray(headerEnd));
  } catch (error) {
    throw new PeerError(`a frame that cannot be decoded: ${error.message}`);
  }
  const [source, epoch, first, count, topics, contentTypes] = header;
  const [topicIndex, times, datas, contentIndex, keys, headers = []] = columns;
  if (datas.length !== count || times.length !== 8 * count) throw new PeerError("columns of another length");
  const which = indexes(topicIndex);
  const types = indexes(contentIndex);
  const stamps = Buffer.from(times.buffer, times.byteOffset, times.byteLength);
  const seqs = topics.map(([, seq]) => seq);
  const events = [];
  for (let i = 0; i < count; i++) {
    const topic = which ? which(i) : 0;
    events.push({
      id: `${source}:${epoch}:${first + i}`,
      source,
      epoch,
      offset: first + i,
      topic: topics[topic][0],
      seq: seqs[topic]++,
      time: stamps.readBigInt64LE(8 * i), // microseconds since 1970 UTC
      data: Buffer.from(datas[i].buffer, datas[i].byteOffset, datas[i].byteLength),
      contentType: contentTypes.length ? contentTypes[types ? types(i) : 0] : "",
      key: keys.length ? keys[i] : "",
      headers: headers.length ? headers[i] : {},
    });
  }
  return { source, epoch, first, next: first + count, events };
}

/** Decode a block of a state, or throw PeerError: `{source, epoch, events}`. Offsets rise, with holes. */
export function decodeBlock(bytes) {
  let frame, offsets, seqs;
  try {
    [frame, offsets, seqs] = unpack(bytes).map((column) => Buffer.from(column.buffer, column.byteOffset, column.byteLength));
  } catch (error) {
    throw new PeerError(`a block that cannot be decoded: ${error.message}`);
  }
  const { source, epoch, events } = decodeFrame(frame);
  if (offsets.length !== 8 * events.length || seqs.length !== 8 * events.length) throw new PeerError("numbers of another length");
  let last = -1;
  events.forEach((event, i) => {
    const offset = Number(offsets.readBigInt64LE(8 * i));
    if (offset <= last || !Number.isSafeInteger(offset)) throw new PeerError("offsets that do not rise");
    last = offset;
    Object.assign(event, { id: `${source}:${epoch}:${offset}`, offset, seq: Number(seqs.readBigInt64LE(8 * i)) });
  });
  return { source, epoch, events };
}

/** A column of u16, or null if it is empty. */
function indexes(column) {
  if (!column.length) return null;
  const view = new DataView(column.buffer, column.byteOffset, column.byteLength);
  return (i) => view.getUint16(2 * i, true);
}
